"""What systemd is told, against a socket that plays its part."""

import os
import socket
from pathlib import Path

import pytest
import trio

from node.daemon.notify import beat, notify, watchdog_interval_s


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(str(tmp_path / "notify"))
    receiver.settimeout(5)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    yield receiver
    receiver.close()


def test_lines_arrive_in_one_datagram(systemd: socket.socket) -> None:
    notify("READY=1", "STATUS=well")
    assert systemd.recv(100) == b"READY=1\nSTATUS=well"


def test_nobody_listening_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("READY=1")


def test_the_watchdog_is_fed_at_half_its_time_and_only_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    assert watchdog_interval_s() is None
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    assert watchdog_interval_s() == 15
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + 1))
    assert watchdog_interval_s() is None
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert watchdog_interval_s() == 15


async def test_the_heartbeat_comes_from_the_event_loop(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(beat)
        await trio.sleep(2.5)
        nursery.cancel_scope.cancel()
    assert [systemd.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
