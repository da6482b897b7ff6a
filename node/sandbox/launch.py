"""Starting a process that others will live and die with: from the main thread, through a small shell.

`subprocess.Popen` with no preexec function may use vfork, which keeps the start quick however big the keeper
is; what must happen between fork and exec (joining the control group, the private mount, giving up root) is
therefore done by programs, one after the other, in the same process. Only the main thread may start one:
"die with the parent" follows the *thread* that forked, and a pool's thread goes away when it is idle.
Refuses to pass on the environment or any descriptor that is not named.
"""

import os
import resource
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import trio

from node.errors import SandboxError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LANGUAGE = {"PATH": PATH, "LC_ALL": "C"}
"""The environment of the sandbox's own programs: a job's variables never reach what runs before it is confined."""
FILES_OPEN_MAX = 65_536
CAP_SYS_RESOURCE = 24
_UNLIMITED = resource.RLIM_INFINITY
OOM_SCORE = 500
"""When the whole machine runs out of memory, jobs go before keepers and daemon."""
CORE_SIZE = 1
"""Bytes. 0 would still start the host's crash handler, as root, on a stranger's memory; 1 is the kernel's sign
for "no core, no handler" (fs/coredump.c)."""
MARK = b"\x06"
"""What a started job's shell writes to the diagnostics pipe just before it becomes the job."""
DIAGNOSTICS_SIZE_MAX = 8_192

_JOIN = f"""
while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift
unset PWD OLDPWD
echo {OOM_SCORE} > /proc/self/oom_score_adj
"""
JOIN_AND_EXEC = _JOIN + 'exec "$@"'
"""sh -c JOIN_AND_EXEC NAME ENTRY... -- COMMAND...: enter the control group, then become COMMAND."""
JOIN_MOUNT_AND_EXEC = _JOIN + 'mount --no-canonicalize -n --bind . "$1" || exit 125; shift; exec "$@"'
"""The same, with the working directory mounted at a place that the job's uid can reach (in a private mount
namespace): the lease directory above it is closed to everyone but the keeper."""
BECOME = r"""printf '\006' >&2; exec 2>&0 0</dev/null; exec "$@" """
"""Runs inside the sandbox, as the job: says that it got there on descriptor 2, takes the job's stderr from
descriptor 0, and becomes the job. 127 and 126 come from it: not found, not executable."""


def limits(*more: str) -> list[str]:
    """Return the program, put before others, that sets what each process may use: `more` are its options.

    Locked memory counts as the group's, and CUDA and RDMA want much of it: as much as we may give.
    """
    files, locked = (_raised(resource.RLIMIT_NOFILE, FILES_OPEN_MAX), _raised(resource.RLIMIT_MEMLOCK, _UNLIMITED))
    return ["prlimit", f"--core={CORE_SIZE}", f"--nofile={files}", f"--memlock={locked}", *more, "--"]


def _raised(kind: int, wanted: int) -> int:
    """Return `wanted`, or as much of it as the hard limit allows those who may not raise it (also some roots)."""
    _, hard = resource.getrlimit(kind)
    _, capabilities = Path("/proc/self/status").read_text().split("CapEff:\t", 1)
    may_raise = int(capabilities.split("\n", 1)[0], 16) >> CAP_SYS_RESOURCE & 1
    return wanted if may_raise or hard == _UNLIMITED else min(hard, wanted if wanted >= 0 else hard)


def start(
    argv: Sequence[str | Path],
    *,
    stdin: int,
    stdout: int,
    stderr: int,
    pass_fds: Sequence[int] = (),
    cwd: str = "/",
) -> subprocess.Popen[bytes]:
    """Start `argv` in a session of its own. Raises SandboxError when its program is missing."""
    if threading.current_thread() is not threading.main_thread():
        raise AssertionError("a job must be started from the main thread, whose end is the keeper's end")
    try:
        return subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            cwd=cwd,
            env=LANGUAGE,
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"{argv[0]} could not be started: {error.strerror}") from error


def memory_file(name: str, content: bytes) -> int:
    """Return a descriptor of an anonymous file that holds `content`, positioned at its beginning."""
    fd = os.memfd_create(name)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def close_all(fds: list[int]) -> None:
    """Close descriptors and forget them, so that calling it twice closes each once."""
    while fds:
        os.close(fds.pop())


async def wait_until_started(diagnostics: int) -> str:
    """Read the diagnostics pipe until the job has begun; return "" then, else what the sandbox complained of."""
    text = b""
    while MARK not in text and len(text) < DIAGNOSTICS_SIZE_MAX:
        await trio.lowlevel.wait_readable(diagnostics)
        chunk = os.read(diagnostics, 4_096)
        if not chunk:
            return text.decode(errors="replace").strip() or "it ended without a word"
        text += chunk
    return "" if MARK in text else text.decode(errors="replace")


async def wait_for_exit(process: subprocess.Popen[bytes]) -> int:
    """Wait until the process has ended and reap it; return its exit status, negative for a signal."""
    if process.returncode is None:
        pidfd = os.pidfd_open(process.pid)
        try:
            await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)
    return process.wait()
