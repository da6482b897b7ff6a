"""Starting keepers: what a process or a systemd unit is started with. `systemd-run` is a stand-in here."""

import os
import stat
import sys
from pathlib import Path

import pytest
import trio
import trio.testing

from node.daemon.keepers import KeeperProcesses, KeeperUnits, keeper_environment, keeper_host, unit_command
from node.errors import ConfigError, JobError

LEASE = bytes(range(16))


def test_sockets_have_short_paths_in_a_directory_that_others_cannot_list(tmp_path: Path) -> None:
    host = KeeperProcesses(tmp_path / "run")
    host.prepare()
    path = host.socket_path(LEASE)
    assert path == tmp_path / "run" / "k" / LEASE.hex()[:12] / "s"
    assert stat.S_IMODE((tmp_path / "run" / "k").stat().st_mode) == 0o711


def test_a_socket_path_that_would_be_too_long_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    host = KeeperProcesses(tmp_path / ("x" * 100))
    with pytest.raises(ConfigError) as caught:
        host.socket_path(LEASE)
    assert "runtime_dir" in caught.value.hint


def test_what_systemd_meant_for_the_daemon_does_not_reach_its_keepers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "yes")
    environment = keeper_environment()
    assert environment["KEPT"] == "yes"
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS"} & environment.keys()


def test_a_system_unit_is_in_the_slice_and_runs_as_the_caller(tmp_path: Path) -> None:
    command = unit_command(tmp_path / "abc", tmp_path / "s", 1000, 1001, is_user_manager=False)
    assert command[0] == "systemd-run"
    options = command[: command.index("--")]
    for option in (
        "--collect",
        "--unit=gpunode-keeper-abc",
        "--slice=gpunode.slice",
        "--uid=1000",
        "--gid=1001",
        "--property=OOMPolicy=continue",
    ):
        assert option in options
    assert command[command.index("--") + 2 :] == [
        "-P",
        "-m",
        "node.keeper",
        str(tmp_path / "abc"),
        str(tmp_path / "s"),
    ]


def test_a_user_unit_has_no_uid() -> None:
    command = unit_command(Path("/x/abc"), Path("/x/s"), 1000, 1000, is_user_manager=True)
    assert "--user" in command
    assert not any(word.startswith(("--uid", "--slice")) for word in command)


async def test_a_unit_is_started_by_systemd_run_and_its_refusal_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    stand_in = tmp_path / "bin" / "systemd-run"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f'#!/bin/sh\necho "$@" > {seen}\n[ ! -e {tmp_path}/refuse ] || {{ echo no bus >&2; exit 1; }}\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    host = KeeperUnits(tmp_path / "run")
    host.prepare()
    lease = tmp_path / "lease"
    lease.mkdir()
    await host.start(lease, host.socket_path(LEASE), os.getuid(), os.getgid())
    assert "--unit=gpunode-keeper-lease" in seen.read_text()
    (tmp_path / "refuse").touch()
    with pytest.raises(JobError, match="no bus"):
        await host.start(lease, host.socket_path(LEASE), os.getuid(), os.getgid())


def test_units_are_used_only_where_systemd_runs_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "bin" / "systemd-run"
    stand_in.parent.mkdir()
    stand_in.write_text("#!/bin/sh\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("SYSTEMD_EXEC_PID", raising=False)
    assert type(keeper_host(tmp_path / "run")) is KeeperProcesses
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getppid()))
    assert type(keeper_host(tmp_path / "run")) is KeeperProcesses
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))
    assert type(keeper_host(tmp_path / "run")) is KeeperUnits


async def test_keepers_that_have_ended_do_not_stay_as_zombies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = KeeperProcesses(tmp_path / "run")
    host.prepare()
    command = [sys.executable, "-c", "pass"]
    monkeypatch.setattr("node.daemon.keepers.keeper_command", lambda _directory, _socket: command)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.run)
        await trio.testing.wait_all_tasks_blocked()
        await host.start(tmp_path, host.socket_path(LEASE), os.getuid(), os.getgid())
        (child,) = host._children
        with trio.fail_after(60):
            while child.returncode is None:
                await trio.sleep(0.005)
        nursery.cancel_scope.cancel()
    assert child.returncode == 0
