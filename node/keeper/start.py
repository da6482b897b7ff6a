"""What both keepers need to begin: the lease's facts, their hello, and a process in good order.

Refuses to hold what only one side needs.
"""

import contextlib
import ctypes
import importlib
import os
import signal
import stat
import sys
from pathlib import Path

import msgspec
import trio

from node.lease.files import LeaseFile
from node.lease.link import VERSION, VERSION_MIN, LinkHello
from node.tunnel import LIMITS, TunnelLimits
from protocol.machines.lease import LeaseFacts

LAST_WORDS_S = 0.2
"""How long a keeper that leaves lets its links read their last status."""
IDLE_MS = 12_000
"""After this long a silent peer counts as gone: a keeper that died and came back is not dialled before."""
REAP_INTERVAL_S = 5.0
SWITCH_INTERVAL_S = 0.0005
"""Python's default of 5 ms starves threads that move bytes while the event loop computes, and the reverse."""
LOG_SIZE_MAX = 4 * 1024 * 1024
LATE_MODULES = (
    "cryptography.hazmat.backends.openssl.backend",
    "encodings.ascii",
    "encodings.idna",
    "encodings.latin_1",
    "encodings.unicode_escape",
)
"""What libraries load only when they first need it: by then the files may be another version's, or not readable
for the user that a spare has become."""
DROPPED_PREFIXES = ("NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_")
"""What systemd tells its service is not for keepers: they must not answer in its name."""
_PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h: orphans of the job become ours, not init's."""


def facts_of(lease_file: LeaseFile) -> LeaseFacts:
    """Return what the machines need of a lease."""
    return LeaseFacts(
        lease=lease_file.lease,
        network=lease_file.network,
        voucher_key=lease_file.voucher_key,
        price=lease_file.price,
        quantity=lease_file.quantity,
        max_spend=lease_file.max_spend,
        until=lease_file.until,
        terms=lease_file.terms,
    )


def tunnel_limits(idle_ms: int) -> TunnelLimits:
    """Return the tunnel's limits for a keeper that counts a peer as gone after `idle_ms`."""
    return msgspec.structs.replace(LIMITS, idle_ms=idle_ms, keepalive_ms=max(1, idle_ms // 3))


def link_hello(lease_file: LeaseFile, generation: int) -> LinkHello:
    """Return what this keeper says first on every link."""
    return LinkHello(
        version=VERSION,
        version_min=VERSION_MIN,
        lease=lease_file.lease,
        generation=generation,
        pid=os.getpid(),
    )


def prepare_process() -> None:
    """Make this process independent of whoever started it, and of the files that it was started from."""
    for name in LATE_MODULES:
        importlib.import_module(name)
    os.umask(0o077)
    os.chdir("/")
    for name in [name for name in os.environ if name.startswith(DROPPED_PREFIXES)]:
        del os.environ[name]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


async def reap_orphans() -> None:
    """Collect what the job's dead parents have left to us, for ever.

    Our own children are waited for by those who started them, at once: what is still a zombie after a pause is
    an orphan. Never waits for "any" child, which would take the status from its owner.
    """
    seen: set[int] = set()
    while True:
        await trio.sleep(REAP_INTERVAL_S)
        zombies = {pid for pid in _children() if _is_zombie(pid)}
        for pid in zombies & seen:
            _collect(pid)
        seen = zombies


def _collect(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def _children() -> set[int]:
    with contextlib.suppress(OSError):
        lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
        return {int(pid) for text in lists for pid in text.split()}
    return set()


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return text[text.rindex(")") + 2] == "Z"
    return False


def bound_own_log() -> None:
    """Empty our log file (what stderr goes to, if it is a file) when it has grown too large."""
    descriptor = sys.stderr.fileno()
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size > LOG_SIZE_MAX:
        os.ftruncate(descriptor, 0)
