"""The seccomp filter, read by a small interpreter of its instructions: what a call with these arguments gets."""

import errno
import os
import socket
import struct

import pytest

from node.errors import TierUnavailable
from node.sandbox import filter as seccomp

if seccomp.pyseccomp is None:
    pytest.skip("needs libseccomp", allow_module_level=True)
if os.uname().machine != "x86_64":
    pytest.skip("the numbers here are x86-64's", allow_module_level=True)

X86_64, I386 = 0xC000_003E, 0x4000_0003
ALLOW, KILL = 0x7FFF_0000, 0x8000_0000
NUMBERS = {
    "read": 0,
    "ioctl": 16,
    "socket": 41,
    "socketpair": 53,
    "clone": 56,
    "execve": 59,
    "mount": 165,
    "clone3": 435,
}
SIGCHLD = 17


def run(program: bytes, call: int, *arguments: int, architecture: int = X86_64) -> int:
    """Interpret classic BPF as the kernel does for seccomp. Source: linux/filter.h, seccomp(2)."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<iIQ6Q", call, architecture, 0, *padded)
    instructions = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = instructions[at]
        at += 1
        match code:
            case 0x20:  # load a word
                (accumulator,) = struct.unpack_from("<I", data, value)
            case 0x54:  # and
                accumulator &= value
            case 0x05:  # jump
                at += value
            case 0x15:  # jump if equal
                at += if_true if accumulator == value else if_false
            case 0x25:  # if greater
                at += if_true if accumulator > value else if_false
            case 0x35:  # if greater or equal
                at += if_true if accumulator >= value else if_false
            case 0x06:  # return
                return value
            case _:
                raise AssertionError(f"instruction {code:#x} is not known here")


def outcome(name: str, *arguments: int, with_device: bool = False) -> int:
    """Return 0 when the call is allowed, else the errno that it gets."""
    result = run(seccomp.build(with_device=with_device), NUMBERS[name], *arguments)
    if result == ALLOW:
        return 0
    assert result >> 16 == 0x0005, hex(result)
    return result & 0xFFFF


def number(name: str) -> int:
    return int(seccomp.pyseccomp.resolve_syscall(seccomp.pyseccomp.system_arch(), name))


def test_ordinary_calls_pass() -> None:
    for name in ("read", "execve", "clone", "ioctl"):
        assert outcome(name) == 0
    assert outcome("clone", 0x0001_0000 | 0x0000_0100 | SIGCHLD) == 0  # CLONE_THREAD | CLONE_VM


@pytest.mark.parametrize("name", [name for names in seccomp.DENIED.values() for name in names])
def test_every_denied_call_is_denied_with_and_without_a_device(name: str) -> None:
    if number(name) < 0:
        pytest.skip("this architecture has no such call")
    for with_device in (False, True):
        result = run(seccomp.build(with_device=with_device), number(name))
        assert result == 0x0005_0000 | errno.EPERM


@pytest.mark.parametrize("name", seccomp.DENIED_WITHOUT_DEVICE)
def test_calls_of_gpu_libraries_need_a_device(name: str) -> None:
    assert run(seccomp.build(with_device=False), number(name)) == 0x0005_0000 | errno.EPERM
    assert run(seccomp.build(with_device=True), number(name)) == ALLOW


@pytest.mark.parametrize("flag", seccomp.NAMESPACE_FLAGS.values(), ids=seccomp.NAMESPACE_FLAGS)
def test_no_new_namespace_by_clone(flag: int) -> None:
    assert outcome("clone", flag | SIGCHLD) == errno.EPERM
    assert outcome("clone", 0xFFFF_FFFF_0000_0000 | flag) == errno.EPERM


def test_clone3_and_calls_to_come_do_not_exist() -> None:
    assert outcome("clone3") == errno.ENOSYS
    for unknown in (463, 500, 511):
        assert run(seccomp.build(with_device=True), unknown) == 0x0005_0000 | errno.ENOSYS


@pytest.mark.parametrize("request_number", seccomp.TERMINAL_INJECTION)
@pytest.mark.parametrize("upper", [0, 1 << 32, 0xFFFF_FFFF << 32])
def test_typing_into_a_terminal_is_denied_whatever_the_upper_bits(request_number: int, upper: int) -> None:
    assert outcome("ioctl", 0, upper | request_number) == errno.EPERM
    assert outcome("ioctl", 0, upper | 0x5413) == 0  # TIOCGWINSZ


@pytest.mark.parametrize("call", ["socket", "socketpair"])
def test_only_four_socket_families_are_left(call: str) -> None:
    allowed = {family for family in range(300) if outcome(call, family, socket.SOCK_STREAM, 0) == 0}
    assert allowed == {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}
    assert outcome(call, 1 << 32 | socket.AF_PACKET, socket.SOCK_RAW, 0) == errno.EAFNOSUPPORT


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_only_old_protocols_of_the_internet(family: int) -> None:
    for protocol, expected in (
        (0, 0),
        (6, 0),
        (17, 0),
        (132, errno.EPROTONOSUPPORT),
        (262, errno.EPROTONOSUPPORT),
    ):
        assert outcome("socket", family, socket.SOCK_STREAM, protocol) == expected


def test_netlink_lists_interfaces_and_no_more() -> None:
    assert outcome("socket", socket.AF_NETLINK, socket.SOCK_RAW, 0) == 0
    for protocol in (4, 9, 12, 15, 16):
        assert outcome("socket", socket.AF_NETLINK, socket.SOCK_RAW, protocol) == errno.EPROTONOSUPPORT


def test_other_architectures_are_killed() -> None:
    program = seccomp.build(with_device=False)
    assert run(program, 20, architecture=I386) == KILL
    assert run(program, 0x4000_0000 | 39) == KILL


def test_the_filter_fits_into_one_program_and_is_built_once() -> None:
    program = seccomp.build(with_device=False)
    assert len(program) % 8 == 0
    assert len(program) // 8 <= 4_096  # BPF_MAXINSNS
    assert seccomp.build(with_device=False) is program


def test_without_the_library_the_tier_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "pyseccomp", None)
    monkeypatch.setattr(seccomp, "_WHY_MISSING", "Unable to find libseccomp", raising=False)
    with pytest.raises(TierUnavailable, match="libseccomp") as caught:
        seccomp.build.__wrapped__(with_device=False)
    assert "libseccomp2" in caught.value.hint
