import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.cli import checks
from node.cli.checks import FAIL, OK, WARN
from node.config import Config, LendSettings, NetworkSettings, TunnelSettings
from node.rpc.api import daemon


def one(findings: Iterator[daemon.Check]) -> daemon.Check:
    (finding,) = findings
    return finding


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    return tmp_path


def config(**options: object) -> Config:
    return Config(state_dir=Path("/var/lib/x"), runtime_dir=Path("/run/x"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("", OK),
        ("/dev/zram0 partition 1 0 5\n", OK),
        ("/dev/mapper/swap partition 1 0 5\n", OK),
        ("/swapfile file 1 0 5\n", WARN),
        ("/dev/mapper/swap partition 1 0 5\n/dev/sda2 partition 1 0 5\n", WARN),
    ],
)
def test_cli_doctor_looks_at_swap(root: Path, line: str, status: daemon.CheckStatus) -> None:
    (root / "proc/swaps").write_text("Filename Type Size Used Priority\n" + line)
    assert one(checks.check_swap(root)).status is status


def test_cli_doctor_sees_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        listening = config(network=NetworkSettings(listen=(f"/ip4/127.0.0.1/tcp/{port}",)))
        found = one(checks.check_ports(listening, daemon_runs=False))
        assert found.status is FAIL
        assert str(port) in found.hint
        assert one(checks.check_ports(listening, daemon_runs=True)).status is OK
    assert one(checks.check_ports(listening, daemon_runs=False)).status is OK
    any_port = config(network=NetworkSettings(listen=("/ip6/::1/tcp/0",)))
    assert "any free one" in one(checks.check_ports(any_port, daemon_runs=False)).detail


def test_cli_doctor_prints_the_lines_that_open_a_firewall(root: Path) -> None:
    ranged = config(tunnel=TunnelSettings(port_min=7500, port_max=7599))
    assert one(checks.check_firewall(ranged, root)).status is OK
    (root / "etc/ufw").mkdir()
    (root / "etc/ufw/ufw.conf").write_text("ENABLED=yes\n")
    assert one(checks.check_firewall(ranged, root)).hint == "ufw allow 7440/tcp; ufw allow 7500:7599/udp"
    lending = config(lend=LendSettings(enabled=True))
    assert "port_min" in one(checks.check_firewall(lending, root)).hint
    (root / "etc/ufw/ufw.conf").write_text("ENABLED=no\n")
    (root / "run/firewalld").mkdir(parents=True)
    assert "--add-port=7500-7599/udp" in one(checks.check_firewall(ranged, root)).hint


def test_cli_doctor_looks_at_an_ordinary_user(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    assert list(checks.check_user(root, 0)) == []
    assert [found.name for found in checks.check_user(root, 1000)] == ["subuid"]
    (root / "etc/subuid").write_text("bob:100000:65536\n")
    (root / "proc/sys/kernel/apparmor_restrict_unprivileged_userns").write_text("1\n")
    (root / "run/systemd/system").mkdir(parents=True)
    found = list(checks.check_user(root, 1000))
    assert [(check.name, check.status) for check in found] == [
        ("subuid", WARN),
        ("userns", WARN),
        ("linger", WARN),
    ]
    assert all(check.hint for check in found)
    (root / "etc/subuid").write_text("ada:100000:65536\n")
    (root / "proc/sys/kernel/apparmor_restrict_unprivileged_userns").write_text("0\n")
    (root / "var/lib/systemd/linger").mkdir(parents=True)
    (root / "var/lib/systemd/linger/ada").touch()
    assert [(check.name, check.status) for check in checks.check_user(root, 1000)] == [
        ("subuid", OK),
        ("linger", OK),
    ]


@pytest.mark.parametrize(("free_gib", "status"), [(0.5, FAIL), (5, WARN), (50, OK)])
def test_cli_doctor_looks_at_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: float, status: daemon.CheckStatus
) -> None:
    import shutil

    used = shutil.disk_usage(tmp_path)._replace(free=int(free_gib * checks.GIB))
    monkeypatch.setattr("shutil.disk_usage", lambda _: used)
    state, disk = checks.check_state(tmp_path / "not" / "yet")
    assert state.status is OK
    assert disk.status is status


def test_cli_doctor_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(checks.clock_is_synchronised(), bool)
    monkeypatch.setattr(checks, "clock_is_synchronised", lambda: False)
    assert one(checks.check_clock()).hint
    monkeypatch.setattr(checks, "clock_is_synchronised", lambda: True)
    assert one(checks.check_clock()).status is OK
