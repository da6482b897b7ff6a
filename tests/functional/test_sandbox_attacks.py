"""What a hostile job cannot do: one run of `sandbox_attacks` inside, and one test for each attack."""

import ctypes
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from sandbox_jobs import Bench, needs_jobs

from node.sandbox import BubblewrapSandbox

pytestmark = needs_jobs
PROGRAM = Path(__file__).with_name("sandbox_attacks.py").read_text()
IPC_CREAT, IPC_RMID = 0o1000, 0
# What stopped them must be the filter (its errno), not the kernel's own refusal of a call made without care.
BY_ERRNO = {
    "EPERM": (
        "call_add_key",
        "call_keyctl",
        "call_bpf",
        "call_io_uring_setup",
        "call_io_uring_enter",
        "call_io_uring_register",
        "call_userfaultfd",
        "call_perf_event_open",
        "call_unshare",
        "call_clone",
        "call_mount",
        "call_umount2",
        "call_fsopen",
        "call_open_tree",
        "call_move_mount",
        "call_mount_setattr",
        "call_pivot_root",
        "call_chroot",
        "call_acct",
        "call_swapon",
        "call_reboot",
        "call_kexec_load",
        "call_init_module",
        "call_finit_module",
        "call_iopl",
        "call_quotactl",
        "call_settimeofday",
        "call_syslog",
        "call_personality",
        "call_sysfs",
        "call_fanotify_init",
        "call_name_to_handle_at",
        "call_open_by_handle_at",
        "call_kcmp",
        "call_memfd_secret",
        "call_vmsplice",
        "call_mbind",
        "call_process_vm_readv",
        "call_pidfd_getfd",
        "call_ptrace",
        "tiocsti",
        "tiocsti_with_upper_bits",
        "tioclinux",
    ),
    "ENOSYS": ("call_clone3", "call_of_the_future", "calls_of_another_architecture"),
    "EAFNOSUPPORT": ("socket_AF_PACKET", "socket_AF_ALG", "socket_AF_VSOCK", "socket_AF_KEY", "socket_AF_TIPC"),
    "EPROTONOSUPPORT": ("socket_sctp", "socket_netfilter", "socket_audit"),
    # And these by the walls.
    "ENETUNREACH": ("connect_internet",),
    "ECONNREFUSED": ("connect_host_loopback", "connect_host_abstract_socket"),
    "ESRCH": ("signal_host_process", "see_host_processes"),
    "EROFS": ("write_/usr/bin/x", "write_/x", "write_/dev/x"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """Put up on the host what a job should not find, run the attacks once, and return what came of them."""
    secret = tmp_path_factory.mktemp("secret") / "file"
    secret.write_text("of the host")
    libc = ctypes.CDLL(None, use_errno=True)
    key = os.getpid()
    segment = libc.shmget(key, 4_096, IPC_CREAT | 0o666)
    assert segment >= 0
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
            name = f"gpunode-test-{os.getpid()}"
            abstract.bind("\0" + name)
            abstract.listen()
            host = {
                "port": server.getsockname()[1],
                "abstract": name,
                "pid": os.getpid(),
                "key": key,
                "file": str(secret),
            }
            bench = Bench(BubblewrapSandbox(), tmp_path_factory.mktemp("attacks"))
            end, text = trio.run(bench.run, "python3", "-I", "-c", PROGRAM, json.dumps(host))
            assert end.status == 0, text
            yield json.loads(text)
    finally:
        libc.shmctl(segment, IPC_RMID, None)


def test_no_attack_succeeds(results: dict[str, list[str]]) -> None:
    assert len(results) >= 80
    assert {name: got for name, (stopped, got) in results.items() if not stopped} == {}


@pytest.mark.parametrize(
    ("errno_name", "name"), [(why, name) for why, names in BY_ERRNO.items() for name in names]
)
def test_it_is_stopped_by_what_should_stop_it(results: dict[str, list[str]], errno_name: str, name: str) -> None:
    assert results[name][0] == errno_name
