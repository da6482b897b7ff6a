"""One daemon a GPU: an exclusive flock on a file named after the GPU's UUID, in a directory all users share.

The lock goes with the process that holds it; the file's text only says who that is. It is cooperative: it keeps
two honest daemons from selling one GPU twice, and refuses to be more. A program that is no gpunode is noticed by
its processes on the GPU (`node.devices.idle`).
"""

import fcntl
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from node.errors import DeviceBusy, DeviceError

DIRECTORIES = (Path("/run/lock/gpunode"), Path("/tmp/gpunode-lock"))
"""Tried in order. Never a user's own runtime directory: two users' daemons have to meet."""
HOLDER_SIZE_MAX = 1024
ATTEMPTS_MAX = 16
UUID = re.compile(r"[A-Za-z0-9-]{1,96}")
_SHARED_MODE = 0o1777
_FILE_MODE = 0o666


class DeviceLocks:
    """The locks that this daemon holds."""

    def __init__(self, state_dir: Path, directory: Path | None = None) -> None:
        """`state_dir` names this daemon to others; `directory` None: the first usable of `DIRECTORIES`."""
        self._state_dir = state_dir
        self._candidates = DIRECTORIES if directory is None else (directory,)
        self._held: dict[str, tuple[int, Path]] = {}

    def claim(self, uuid: str) -> None:
        """Lock the GPU; nothing happens when we hold it already. Raises DeviceBusy naming the holder."""
        if uuid in self._held:
            return
        if UUID.fullmatch(uuid) is None:
            raise DeviceError(f"{uuid!r} is not the UUID of a GPU", "see `gpunode lend devices`")
        path = shared_directory(self._candidates) / uuid
        descriptor = _lock(path, uuid)
        # The lock counts; the text is a courtesy, and a full disk must not keep a GPU from being lent.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid={os.getpid()}\nstate_dir={self._state_dir}\n".encode(), 0)
        self._held[uuid] = (descriptor, path)

    def unclaim(self, uuid: str) -> None:
        """Give the GPU back. Idempotent."""
        descriptor, path = self._held.pop(uuid, (-1, Path()))
        if descriptor < 0:
            return
        # Removed while still locked: whoever waits for this file finds it unlinked, and looks again.
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)

    def unclaim_all(self) -> None:
        """Give every GPU back."""
        for uuid in tuple(self._held):
            self.unclaim(uuid)


def shared_directory(candidates: Iterable[Path]) -> Path:
    """Return the first candidate in which any user may lock, made when missing (mode 1777).

    Raises DeviceError when none can be used.
    """
    problems: list[str] = []
    for directory in candidates:
        try:
            with suppress(FileExistsError):
                directory.mkdir(_SHARED_MODE)
                directory.chmod(_SHARED_MODE)
            status = directory.lstat()
            if not stat.S_ISDIR(status.st_mode):
                problems.append(f"{directory} is not a directory")
                continue
            if os.geteuid() == 0 and status.st_uid != 0:
                # Made by a user's daemon before root's came: from now on nobody but root may remove others' locks.
                os.chown(directory, 0, 0, follow_symlinks=False)
                directory.chmod(_SHARED_MODE)
        except OSError as error:
            problems.append(f"{directory}: {error.strerror}")
            continue
        if os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            return directory
        problems.append(f"{directory} is not writable")
    raise DeviceError(
        f"no directory for GPU locks can be used ({'; '.join(problems)})",
        f"as root: install -d -m 1777 {DIRECTORIES[0]}",
    )


def _lock(path: Path, uuid: str) -> int:
    """Return a descriptor of the locked file. Raises DeviceBusy."""
    for _ in range(ATTEMPTS_MAX):
        descriptor = _open(path)
        if descriptor is None:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise DeviceBusy(
                f"{uuid} is held by another gpunode daemon ({holder})",
                "stop that daemon, or lend the GPU from it alone",
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise DeviceBusy(f"the lock file {path} keeps vanishing", "is something clearing that directory?")


def _open(path: Path) -> int | None:
    """Open or make the lock file; None when it came or went meanwhile. Raises DeviceError."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        # Not O_CREAT on a file that exists: fs.protected_regular refuses that for other users' files.
        descriptor = os.open(path, os.O_RDWR | flags)
    except FileNotFoundError:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, _FILE_MODE)
        except FileExistsError:
            return None
        os.fchmod(descriptor, _FILE_MODE)  # whatever the umask: every user's daemon must be able to lock it
    except OSError as error:
        raise DeviceError(f"the lock file {path} can't be opened: {error.strerror}", f"remove {path}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DeviceError(f"the lock file {path} is not a regular file", f"remove {path}")
    return descriptor


def _is_still_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    """Return what a lock file says of its holder: any user's text, so bounded and made printable."""
    text = os.pread(descriptor, HOLDER_SIZE_MAX, 0).decode(errors="replace")
    fields = dict(line.partition("=")[::2] for line in text.splitlines())
    pid = fields.get("pid", "")
    place = "".join(character if character.isprintable() else "?" for character in fields.get("state_dir", ""))
    return f"pid {pid if pid.isdecimal() else 'unknown'}, state in {place or 'an unknown place'}"
