"""What the wheel holds, found out by building it."""

import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path

import pytest

from node import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling", reason="the build tools of scripts/requirements/build.txt are not installed")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    [path] = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def read_metadata(wheel: zipfile.ZipFile, name: str) -> str:
    [path] = [entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def test_wheel_holds_both_packages_as_they_lie_on_disk(wheel: zipfile.ZipFile) -> None:
    on_disk = {
        str(path.relative_to(ROOT)) for package in ("node", "protocol") for path in (ROOT / package).rglob("*.py")
    }
    assert {name for name in wheel.namelist() if name.endswith(".py")} == on_disk


def test_wheel_holds_the_shared_files(wheel: zipfile.ZipFile) -> None:
    assert wheel.read("node/share/gpunode.toml") == (ROOT / "contrib" / "gpunode.toml").read_bytes()
    for unit in ("gpunode.service", "gpunode.slice", "user/gpunode.service", "user/gpunode.slice"):
        assert wheel.read(f"node/share/systemd/{unit}") == (ROOT / "contrib" / "systemd" / unit).read_bytes()


def test_wheel_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"node", "protocol"}
    assert not [name for name in wheel.namelist() if name.endswith((".pyc", ".orig", ".rej"))]


def test_wheel_installs_the_command(wheel: zipfile.ZipFile) -> None:
    scripts = ConfigParser()
    scripts.read_string(read_metadata(wheel, "entry_points.txt"))
    assert dict(scripts["console_scripts"]) == {"gpunode": "node.cli:main"}


def test_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    metadata = message_from_string(read_metadata(wheel, "METADATA"))
    assert metadata["Name"] == "gpunode"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload().startswith("# gpunode")


def test_wheel_and_program_tell_the_same_version(wheel: zipfile.ZipFile) -> None:
    assert message_from_string(read_metadata(wheel, "METADATA"))["Version"] == __version__
