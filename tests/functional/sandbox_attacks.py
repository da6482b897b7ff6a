"""What a hostile job tries, run inside the sandbox with the host's own interpreter.

Each attack returns a text when it got somewhere and raises OSError when it was stopped. The program prints a
JSON object: attack -> [errno name, ""] or ["", what it got]. Its argument is a JSON object of things that the
host has put up to be found: a TCP port, an abstract socket's name, a pid, a System V key, a file.
"""

import ctypes
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import termios
from collections.abc import Callable
from pathlib import Path

HOST = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER = 0x10000000
PTRACE_ATTACH = 16
ATTACKS: dict[str, Callable[[], object]] = {}
# The numbers of x86-64; the calls since io_uring have the same number everywhere.
NUMBERS = {
    "ioctl": 16, "clone": 56, "ptrace": 101, "syslog": 103, "personality": 135, "sysfs": 139, "pivot_root": 155,
    "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "reboot": 169,
    "iopl": 172, "init_module": 175, "quotactl": 179, "mbind": 237, "kexec_load": 246, "add_key": 248,
    "keyctl": 250, "unshare": 272, "vmsplice": 278, "perf_event_open": 298, "fanotify_init": 300,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "kcmp": 312,
    "finit_module": 313, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "clone3": 435,
    "pidfd_getfd": 438, "mount_setattr": 442, "memfd_secret": 447, "of_the_future": 500,
}  # fmt: skip


def attack(function: Callable[[], object]) -> Callable[[], object]:
    ATTACKS[function.__name__] = function
    return function


def call(name: str, *arguments: object) -> str:
    result = libc.syscall(NUMBERS[name], *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return f"{name} gave {result}"


def refused(name: str, *arguments: object) -> None:
    """Register an attack that is one system call."""
    ATTACKS[f"call_{name}"] = lambda: call(name, *arguments)


@attack
def use_inherited_descriptors() -> object:
    """First of all, before other attacks leave descriptors of their own."""
    found = []
    for fd in range(3, 1024):
        try:
            found.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        except OSError:
            continue
    if not found:
        raise OSError(errno.EBADF, "none")
    return found


refused("add_key", b"user", b"name", b"payload", 7, -3)
refused("keyctl", 0, -3, 0)
refused("bpf", 0, None, 0)
refused("io_uring_setup", 8, ctypes.create_string_buffer(120))
refused("io_uring_enter", 0, 0, 0, 0, 0, 0)
refused("io_uring_register", 0, 0, 0, 0)
refused("userfaultfd", 1)
refused("perf_event_open", ctypes.create_string_buffer(112), 0, -1, -1, 0)
refused("unshare", CLONE_NEWUSER)
refused("clone", CLONE_NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)
refused("clone3", None, 0)
refused("mount", b"none", b"/tmp", b"tmpfs", 0, 0)
refused("umount2", b"/proc", 2)
refused("fsopen", b"tmpfs", 0)
refused("open_tree", -100, b"/", 1)
refused("move_mount", -100, b"/", -100, b"/tmp", 0)
refused("mount_setattr", -100, b"/", 0, None, 0)
refused("pivot_root", b"/tmp", b"/tmp")
refused("chroot", b"/tmp")
refused("acct", b"/job/acct")
refused("swapon", b"/job/swap", 0)
refused("reboot", 0xFEE1DEAD, 672274793, 0, None)
refused("kexec_load", 0, 0, None, 0)
refused("init_module", b"", 0, b"")
refused("finit_module", 0, b"", 0)
refused("iopl", 3)
refused("quotactl", 0x80000100, None, 0, None)
refused("settimeofday", ctypes.create_string_buffer(16), None)
refused("syslog", 3, ctypes.create_string_buffer(64), 64)
refused("personality", 0x0040000)
refused("sysfs", 3)
refused("fanotify_init", 0, 0)
refused("name_to_handle_at", -100, b"/", None, None, 0)
refused("open_by_handle_at", 0, None, 0)
refused("kcmp", os.getpid(), os.getpid(), 0, 0, 0)
refused("memfd_secret", 0)
refused("vmsplice", 1, None, 0, 0)
refused("mbind", 0, 0, 0, None, 0, 0)
refused("process_vm_readv", 1, None, 0, None, 0, 0)
refused("pidfd_getfd", 0, 0, 0)
refused("ptrace", PTRACE_ATTACH, 1, 0, 0)
refused("of_the_future")


@attack
def tiocsti() -> object:
    return call("ioctl", 0, termios.TIOCSTI, b"x")


@attack
def tiocsti_with_upper_bits() -> object:
    return call("ioctl", 0, ctypes.c_ulong(0x1_0000_0000 | termios.TIOCSTI), b"x")


@attack
def tioclinux() -> object:
    return call("ioctl", 0, 0x541C, b"\x03")


for family in ("AF_PACKET", "AF_ALG", "AF_VSOCK", "AF_KEY", "AF_TIPC", "AF_BLUETOOTH", "AF_CAN", "AF_RDS"):
    number = getattr(socket, family, {"AF_KEY": 15}.get(family, 0))
    ATTACKS[f"socket_{family}"] = lambda number=number: socket.socket(number, socket.SOCK_RAW)
ATTACKS["socket_raw_ip"] = lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
ATTACKS["socket_sctp"] = lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132)
ATTACKS["socket_netfilter"] = lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
ATTACKS["socket_audit"] = lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9)
ATTACKS["connect_internet"] = lambda: socket.create_connection(("192.0.2.1", 80), 2)
ATTACKS["connect_host_loopback"] = lambda: socket.create_connection(("127.0.0.1", HOST["port"]), 2)


@attack
def connect_host_abstract_socket() -> object:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + HOST["abstract"])
    return "connected"


@attack
def configure_loopback() -> object:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        # SIOCSIFMTU
        return fcntl.ioctl(connection, 0x8922, struct.pack("16si", b"lo", 1400))


for path in (
    "/etc/shadow", "/dev/kmsg", "/dev/mem", "/dev/kvm", "/dev/loop-control", "/dev/fuse", "/dev/tty",
    "/proc/kcore", "/sys/kernel", "/run/systemd", "/root", "/home", HOST["file"],
):  # fmt: skip
    ATTACKS[f"open_{path}"] = lambda path=path: os.open(path, os.O_RDONLY)
for path in (
    "/usr/bin/x", "/etc/passwd", "/x", "/dev/x", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger",
    "/proc/sys/user/max_user_namespaces", "/proc/self/uid_map", "/proc/self/gid_map", "/sys/devices/system/cpu/x",
):  # fmt: skip
    ATTACKS[f"write_{path}"] = lambda path=path: os.write(os.open(path, os.O_WRONLY | os.O_CREAT), b"1")


@attack
def lower_oom_score() -> object:
    Path("/proc/self/oom_score_adj").write_text("-1000")
    return "lowered"


@attack
def become_root() -> object:
    os.setuid(0)
    return os.getuid()


@attack
def become_root_group() -> object:
    os.setgid(0)
    return os.getgid()


@attack
def add_groups() -> object:
    os.setgroups([0, 6])
    return os.getgroups()


@attack
def get_capabilities() -> object:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    wanted = (ctypes.c_uint32 * 6)(0xFFFFFFFF, 0xFFFFFFFF, 0, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    if libc.capset(header, wanted) < 0:
        raise OSError(ctypes.get_errno(), "capset")
    return "got them"


@attack
def make_device() -> object:
    return os.mknod("/job/disk", 0o060666, os.makedev(7, 0))


@attack
def raise_priority() -> object:
    return os.nice(-5)


@attack
def real_time() -> object:
    return os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))


@attack
def signal_host_process() -> object:
    os.kill(HOST["pid"], 0)
    return f"{HOST['pid']} is there"


@attack
def see_host_processes() -> object:
    seen = [path.name for path in Path("/proc").glob("[0-9]*") if int(path.name) > 64]
    if not seen:
        raise ProcessLookupError(errno.ESRCH, "none")
    return seen


@attack
def join_namespace_of_init() -> object:
    return call("setns", os.open("/proc/1/ns/user", os.O_RDONLY), 0)


@attack
def read_environment_of_monitor() -> object:
    words = Path("/proc/1/environ").read_bytes().split(b"\0")
    found = [word for word in words if word and not word.startswith((b"PATH=", b"LC_ALL="))]
    if not found:
        raise PermissionError(errno.EPERM, "nothing of the keeper's")
    return found


@attack
def use_unfiltered_monitor() -> object:
    """The monitor could be rewritten through /proc/1/mem: it must have the same filter and no capability."""
    state = dict(line.split(":\t", 1) for line in Path("/proc/1/status").read_text().splitlines())
    if (state["Seccomp"], int(state["CapPrm"], 16), state["NoNewPrivs"]) == ("2", 0, "1"):
        raise PermissionError(errno.EPERM, "it may do no more than we")
    return state


@attack
def leave_by_monitors_root() -> object:
    return Path("/proc/1/root/etc/shadow").stat()


@attack
def leave_by_working_directory() -> object:
    return Path("../" * 40 + "etc/shadow").stat()


@attack
def use_monitors_descriptors() -> object:
    """The monitor's descriptors lead to pipes and the job's own output only."""
    places = [str(path.readlink()) for path in Path("/proc/1/fd").iterdir()]
    found = [place for place in places if not place.startswith(("pipe:", "anon_inode:", "/memfd:"))]
    if not found:
        raise OSError(errno.EBADF, "none")
    return found


@attack
def system_v_memory_of_host() -> object:
    result = libc.shmget(HOST["key"], 0, 0)
    if result < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    return result


@attack
def control_groups() -> object:
    return list(Path("/sys/fs/cgroup").iterdir())


@attack
def calls_of_another_architecture() -> object:
    child = os.fork()
    if child == 0:
        libc.syscall(39 | 0x40000000)  # getpid of x32
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS:
        raise OSError(errno.ENOSYS, "killed for trying")
    return status


def main() -> None:
    results = {}
    for name, function in ATTACKS.items():
        if name == "tiocsti":
            # A terminal to type into: it must fail for the filter's reason, not for want of one.
            os.dup2(os.openpty()[1], 0)
        try:
            results[name] = ["", repr(function())[:200]]
        except OSError as error:
            results[name] = [errno.errorcode.get(error.errno or 0, type(error).__name__), ""]
    print(json.dumps(results))


main()
