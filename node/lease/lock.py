"""One keeper a lease: the lock, and who holds it.

A keeper holds a `flock` on LEASE_DIR/lock for life and writes its identity into it: pid, boot id and start
time, which together never name two processes. Others ask `holder_of`, which looks at that identity and never
touches the lock itself (a probe that takes the lock for a moment could make a starting keeper fail). Each new
holder raises the generation, durably, before it does anything else; peers refuse an older one.
"""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import ClassVar

import msgspec

from node.errors import NodeError
from node.lease.files import read_bounded, write_atomically
from protocol import codec
from protocol.errors import MalformedRecord

LOCK_FILE = "lock"
GENERATION_FILE = "generation"
LOCK_FILE_MAX = 4096
_START_TIME_FIELD = 19
"""Of /proc/PID/stat, counted after the command's closing parenthesis: field 22 of proc(5)."""


class LeaseHeld(NodeError):
    """Another keeper holds the lease."""

    code: ClassVar[int] = 2311


class Holder(msgspec.Struct, frozen=True):
    """A process that cannot be confused with another one, even after a reboot."""

    pid: int
    boot_id: str
    start_ticks: int
    """Clock ticks since boot, as in /proc/PID/stat."""
    generation: int

    def is_alive(self) -> bool:
        """Return whether this very process still runs (a zombie does not)."""
        return self.boot_id == boot_id() and _start_ticks(self.pid) == self.start_ticks


class LeaseLock:
    """A held lock. Falls with the process, or with `release`."""

    def __init__(self, descriptor: int, generation: int) -> None:
        self._descriptor = descriptor
        self.generation = generation

    @classmethod
    def acquire(cls, directory: Path) -> "LeaseLock":
        """Take the lease of `directory` and raise its generation. Raises LeaseHeld. Blocks on the disk."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(directory / LOCK_FILE, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            holder = holder_of(directory)
            who = f"process {holder.pid}" if holder else "a process that is just starting"
            raise LeaseHeld(f"{directory} is held by {who}") from None
        generation = read_generation(directory) + 1
        write_atomically(directory / GENERATION_FILE, str(generation).encode())
        me = Holder(os.getpid(), boot_id(), _start_ticks(os.getpid()) or 0, generation)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, codec.encode(me), 0)
        return cls(descriptor, generation)

    def release(self) -> None:
        """Give the lease back. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def holder_of(directory: Path) -> Holder | None:
    """Return the living keeper of `directory`, or None when there is none.

    Raises LeaseFileError for a lock file that is no regular file. The answer can be out of date at once: use
    it to decide whether to start a keeper, and let the lock decide who is it.
    """
    try:
        data = read_bounded(directory / LOCK_FILE, LOCK_FILE_MAX)
        holder = codec.decode_untrusted(data, Holder)
    except (FileNotFoundError, MalformedRecord):
        return None
    return holder if holder.is_alive() else None


def read_generation(directory: Path) -> int:
    """Return the generation of the last keeper; 0 when there was none."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int(read_bounded(directory / GENERATION_FILE, 32))
    return 0


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def _start_ticks(pid: int) -> int | None:
    """Return when `pid` started, in clock ticks since boot; None when there is no such running process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[_START_TIME_FIELD])
