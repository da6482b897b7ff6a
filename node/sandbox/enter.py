"""The program that becomes a command: inside a running job, or outside any sandbox for `unsafe-process`.

It is started anew for each command, as root or as the job's uid, already in the job's control group; its text
is handed to a bare interpreter with -c. It gives up root first. To go inside it then joins the namespaces,
forks into the pid namespace, drops what capabilities it gained there, loads the filter and executes. Between
joining and executing it is not dumpable, holds no host descriptor but the caller's stdio and imports nothing:
a module looked up now would come from the job's own files. Refuses to do any of it in the keeper's process.

Arguments: uid, and descriptors of a pidfd in the job (-1: stay outside), the filter (-1 then), the request,
the report pipe. The request is the working directory, the number of variables, the variables, the argv, each
ended by NUL. The report is one byte MARK before the command is executed, else the reason why it was not.
Source: setns(2), capabilities(7), seccomp(2).
"""

import ctypes
import fcntl
import os
import signal
import sys
import termios

MARK = b"\x06"
NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
"""User, mount, pid, network, ipc, uts and cgroup."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 38, 47
PR_CAP_AMBIENT_CLEAR_ALL, SECCOMP_MODE_FILTER = 4, 2
CAPABILITY_VERSION_3 = 0x20080522
CAPABILITIES_MAX = 64
OWN_FAILURE = 125


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


_libc = ctypes.CDLL(None, use_errno=True)
_prctl, _setns, _capset = _libc.prctl, _libc.setns, _libc.capset


def _must(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def _control(what: str, option: int, first: int, second: int = 0) -> None:
    zero = ctypes.c_ulong(0)
    _must(_prctl(option, ctypes.c_ulong(first), ctypes.c_ulong(second), zero, zero), what)


def _read_all(fd: int) -> bytes:
    chunks = []
    while chunk := os.read(fd, 1 << 20):
        chunks.append(chunk)
    os.close(fd)
    return b"".join(chunks)


def _drop_capabilities() -> None:
    for capability in range(CAPABILITIES_MAX):
        zero = ctypes.c_ulong(0)
        if _prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), zero, zero, zero) != 0:
            break  # past the last one that this kernel knows
    _control("clear ambient capabilities", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    _must(_capset(header, (ctypes.c_uint32 * 6)()), "drop capabilities")


def _load_filter(program: bytes) -> None:
    text = ctypes.create_string_buffer(program, len(program))
    loaded = _Program(len(program) // 8, ctypes.addressof(text))
    _control("load the filter", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(loaded))


def _execute(request: bytes, program: bytes | None, report_fd: int) -> None:
    """Become the command; returns only by raising OSError."""
    directory, count, *words = request.split(b"\0")[:-1]
    environment = dict(pair.split(b"=", 1) for pair in words[: int(count)])
    argv = words[int(count) :]
    _control("die with the parent", PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getsid(0) != os.getpid():
        os.setsid()
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Python ignores these two, and what is ignored stays so across execve.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    _control("no new privileges", PR_SET_NO_NEW_PRIVS, 1)
    os.chdir(directory)
    if program is not None:
        _drop_capabilities()
        _load_filter(program)
    os.write(report_fd, MARK)
    shell = [b"sh", b"-c", b'exec "$@"', b"job"]
    os.execve(b"/bin/sh", [*shell, *argv], environment)  # noqa: S606 - becoming the job is the point


def main(uid: int, pidfd: int, filter_fd: int, request_fd: int, report_fd: int) -> int:
    """Become the command outside, or join the job, fork the command and return its exit status."""
    inside = pidfd >= 0
    for fd in (request_fd, report_fd, *((pidfd, filter_fd) if inside else ())):
        os.set_inheritable(fd, False)
    program = _read_all(filter_fd) if inside else None
    request = _read_all(request_fd)
    child = 0
    try:
        _control("not dumpable", PR_SET_DUMPABLE, 0)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        if inside:
            _control("die with the keeper", PR_SET_PDEATHSIG, signal.SIGKILL)
            _must(_setns(pidfd, NAMESPACES), "join the job's namespaces")
            os.close(pidfd)
            child = os.fork()
        if child == 0:
            _execute(request, program, report_fd)
    except BaseException as error:
        what = error.strerror if isinstance(error, OSError) else type(error).__name__
        why = os.strerror(error.errno or 0) if isinstance(error, OSError) else ""
        os.write(report_fd, f"{what}: {why}".encode())
        os._exit(OWN_FAILURE)
    os.close(report_fd)
    for fd in (0, 1, 2):
        os.close(fd)  # the command's end of a pipe must be the only one
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    result = main(*(int(word) for word in sys.argv[1:6]))
    os._exit(result if result >= 0 else 128 - result)
