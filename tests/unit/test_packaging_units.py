"""The systemd units: accepted by systemd itself, and holding the rules that jobs depend on."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "contrib" / "systemd"
EXPOSURE_MAX = 40
"""Tenths, by `systemd-analyze security`; root with full rights is 96."""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


def analyze(*arguments: str | Path, runtime: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *map(str, arguments)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "SYSTEMD_LOG_LEVEL": "warning"},
        capture_output=True,
        text=True,
        check=False,
    )


def read_unit(name: str) -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", (UNITS / name).read_text(), re.M):
        settings.setdefault(key, []).append(value)
    return settings


def copy_unit(name: str, folder: Path) -> Path:
    """Copy a unit with programs that exist on every machine, as `verify` looks for them."""
    text = (UNITS / name).read_text()
    target = folder / Path(name).name
    target.write_text(text.replace("/opt/gpunode/current/bin/gpunode", "/bin/true"))
    return target


@needs_systemd
@pytest.mark.parametrize("name", ["gpunode.service", "gpunode.slice"])
def test_systemd_accepts_the_system_unit(name: str, tmp_path: Path) -> None:
    done = analyze("verify", "--man=no", copy_unit(name, tmp_path), runtime=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("name", ["user/gpunode.service", "user/gpunode.slice"])
def test_systemd_accepts_the_user_unit(name: str, tmp_path: Path) -> None:
    done = analyze("verify", "--user", "--man=no", copy_unit(name, tmp_path), runtime=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_verify_would_notice_a_misspelt_setting(tmp_path: Path) -> None:
    unit = copy_unit("gpunode.service", tmp_path)
    unit.write_text(unit.read_text().replace("WatchdogSec=", "WatchDogSeconds="))
    assert "WatchDogSeconds" in analyze("verify", "--man=no", unit, runtime=tmp_path).stderr


@needs_systemd
def test_daemon_is_hardened(tmp_path: Path) -> None:
    unit = copy_unit("gpunode.service", tmp_path)
    done = analyze("security", "--offline=yes", f"--threshold={EXPOSURE_MAX}", unit, runtime=tmp_path)
    assert done.returncode == 0, done.stdout[-400:]


@pytest.mark.parametrize("name", ["gpunode.service", "user/gpunode.service"])
def test_daemon_says_when_it_is_ready_and_alive(name: str) -> None:
    unit = read_unit(name)
    assert unit["Type"] == ["notify"]
    assert unit["NotifyAccess"] == ["main"]
    assert int(unit["WatchdogSec"][0]) > 0


@pytest.mark.parametrize("name", ["gpunode.service", "user/gpunode.service"])
def test_keepers_and_their_sockets_outlive_the_daemon(name: str) -> None:
    unit = read_unit(name)
    assert unit["RuntimeDirectory"] == ["gpunode"]
    assert unit["RuntimeDirectoryPreserve"] == ["yes"]
    assert "Delegate" not in unit
    assert unit["KillMode"] == ["mixed"]


def test_daemon_can_reach_the_gpus() -> None:
    unit = read_unit("gpunode.service")
    assert "PrivateDevices" not in unit
    assert any(rule.startswith("char-nvidia*") for rule in unit["DeviceAllow"])
