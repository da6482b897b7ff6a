"""The seccomp filter of every sandboxed job: a list of system calls that it may not make.

It takes away the parts of the kernel that compute jobs don't need and that most escapes went through: new
namespaces, mounts, keyrings, bpf, io_uring, modules, ptrace, rare socket families. Namespaces, uid and
control group are the walls; this thins what can be reached behind them. Refuses to be an allow list: a job is
a stranger's binary, and a list of what CUDA, MPI and Python need would be wrong on the next release. Calls
newer than this list do not exist for the job (ENOSYS), so a new kernel opens nothing by itself.

Sources: seccomp(2), libseccomp's seccomp_rule_add(3); the deny lists of Docker's default profile and of
flatpak's `setup_seccomp`; CVE-2017-5226 and CVE-2023-28100 for TIOCSTI and TIOCLINUX.
"""

import errno
import functools
import os
from typing import Any

from node.errors import TierUnavailable

try:
    import pyseccomp
except (ImportError, RuntimeError) as failure:  # RuntimeError: the C library is missing
    pyseccomp = None
    _WHY_MISSING = str(failure)

DENIED = {
    "new views of the system": (
        "unshare",
        "setns",
        "chroot",
        "pivot_root",
        "mount",
        "umount",
        "umount2",
        "mount_setattr",
        "move_mount",
        "open_tree",
        "fsopen",
        "fsconfig",
        "fsmount",
        "fspick",
    ),
    "keyrings, which no namespace holds": (
        "add_key",
        "request_key",
        "keyctl",
    ),
    "the kernel's own programs, and tracing": (
        "bpf",
        "perf_event_open",
        "ptrace",
        "kcmp",
        "process_madvise",
        "userfaultfd",
        "lookup_dcookie",
        "syslog",
    ),
    "the kernel itself": (
        "kexec_load",
        "kexec_file_load",
        "init_module",
        "finit_module",
        "delete_module",
        "reboot",
    ),
    "calls that pass no filter": (
        "io_uring_setup",
        "io_uring_enter",
        "io_uring_register",
    ),
    "files by handle, events of whole file systems, quotas": (
        "open_by_handle_at",
        "name_to_handle_at",
        "fanotify_init",
        "fanotify_mark",
        "quotactl",
        "quotactl_fd",
    ),
    "memory": (
        "memfd_secret",
        "vmsplice",
        "migrate_pages",
    ),
    "the machine": (
        "acct",
        "swapon",
        "swapoff",
        "settimeofday",
        "clock_settime",
        "adjtimex",
        "clock_adjtime",
        "stime",
        "iopl",
        "ioperm",
        "vhangup",
    ),
    "what nobody needs any more": (
        "nfsservctl",
        "_sysctl",
        "sysfs",
        "uselib",
        "ustat",
        "personality",
        "modify_ldt",
    ),
}
"""What no job may call, by what it would reach; EPERM."""
DENIED_WITHOUT_DEVICE = (
    "mbind",
    "set_mempolicy",
    "set_mempolicy_home_node",
    "move_pages",
    "process_vm_readv",
    "process_vm_writev",
    "pidfd_getfd",
)
"""NUMA placement and the memory of the job's other processes: CUDA, NCCL and MPI use them, other jobs need not.
The kernel's own checks (same uid, same pid namespace) remain."""
UNKNOWN_CALLS = range(463, 512)
"""Numbers above the newest call that was looked at (mseal, 462), common to all architectures; x86's second
range begins at 512."""
NAMESPACE_FLAGS = {
    "CLONE_NEWNS": 0x00020000,
    "CLONE_NEWCGROUP": 0x02000000,
    "CLONE_NEWUTS": 0x04000000,
    "CLONE_NEWIPC": 0x08000000,
    "CLONE_NEWUSER": 0x10000000,
    "CLONE_NEWPID": 0x20000000,
    "CLONE_NEWNET": 0x40000000,
}
TERMINAL_INJECTION = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: typing into a terminal from within."""
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
"""The socket families that a job may use."""
FAMILY_MAX = 64
"""Above the last family that any kernel has (46 in Linux 6.18)."""
PROTOCOL_MAX = 17
"""UDP; what lies above (SCTP, DCCP, MPTCP ...) would load kernel modules."""
UINT32 = 0xFFFF_FFFF


@functools.cache
def build(*, with_device: bool) -> bytes:
    """Return the filter as BPF instructions (struct sock_filter), for this machine's architecture.

    With a device the calls of `DENIED_WITHOUT_DEVICE` are allowed. Raises TierUnavailable without libseccomp.
    """
    if pyseccomp is None:
        raise TierUnavailable(
            f"the seccomp filter cannot be built: {_WHY_MISSING}", "apt install libseccomp2 (dnf: libseccomp)"
        )
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    rules.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)  # 32-bit and x32 calls
    rules.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, 2)  # a binary tree: some five comparisons for any call
    denied = [name for names in DENIED.values() for name in names]
    for name in denied if with_device else [*denied, *DENIED_WITHOUT_DEVICE]:
        number = pyseccomp.resolve_syscall(pyseccomp.system_arch(), name)
        if number >= 0:  # negative: this architecture has no such call
            rules.add_rule(pyseccomp.ERRNO(errno.EPERM), number)
    for number in UNKNOWN_CALLS:
        rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), number)
    # clone3 hides its flags behind a pointer; with ENOSYS the C library falls back to clone.
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    for flag in NAMESPACE_FLAGS.values():
        rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    for request in TERMINAL_INJECTION:
        # The kernel looks at 32 bits only: compare no more, or a set upper bit slips through.
        low = pyseccomp.Arg(1, pyseccomp.MASKED_EQ, UINT32, request)
        rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "ioctl", low)
    _limit_sockets(rules)
    return _export(rules)


def _limit_sockets(rules: Any) -> None:  # noqa: ANN401 - pyseccomp has no types
    refuse = pyseccomp.ERRNO(errno.EAFNOSUPPORT)
    for call in ("socket", "socketpair"):
        for family in range(FAMILY_MAX + 1):
            if family not in FAMILIES.values():
                rules.add_rule(refuse, call, pyseccomp.Arg(0, pyseccomp.EQ, family))
        # Also catches a family with upper bits set, which the kernel would cut off.
        rules.add_rule(refuse, call, pyseccomp.Arg(0, pyseccomp.GT, FAMILY_MAX))
    refuse = pyseccomp.ERRNO(errno.EPROTONOSUPPORT)
    for family in (FAMILIES["AF_INET"], FAMILIES["AF_INET6"]):
        of_family = pyseccomp.Arg(0, pyseccomp.EQ, family)
        rules.add_rule(refuse, "socket", of_family, pyseccomp.Arg(2, pyseccomp.GT, PROTOCOL_MAX))
    # Of netlink only NETLINK_ROUTE (0), with which programs list interfaces.
    of_family = pyseccomp.Arg(0, pyseccomp.EQ, FAMILIES["AF_NETLINK"])
    rules.add_rule(refuse, "socket", of_family, pyseccomp.Arg(2, pyseccomp.NE, 0))


def _export(rules: Any) -> bytes:  # noqa: ANN401 - pyseccomp has no types
    with os.fdopen(os.memfd_create("seccomp"), "rb") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
