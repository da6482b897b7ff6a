import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from node.cli import uninstall
from node.cli.root import run
from node.cli.uninstall import Line
from node.errors import BadArgument


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prefix as scripts/install fills it, from which this very Python seems to run."""
    opt = tmp_path / "opt/gpunode"
    for folder in ("opt/gpunode/0.1.0/bin", "usr/local/bin", "etc/gpunode", "usr/local/share/doc/gpunode"):
        (tmp_path / folder).mkdir(parents=True)
    (opt / "0.1.0/bin/python").touch()
    (opt / "current").symlink_to("0.1.0")
    (tmp_path / "etc/gpunode/gpunode.toml").touch()
    (tmp_path / "usr/local/share/doc/gpunode/README.md").touch()
    lines = [
        f"tree {opt}/0.1.0",
        f"file {tmp_path}/usr/local/share/doc/gpunode/README.md",
        f"folder {tmp_path}/usr/local/share/doc/gpunode",
        f"config {tmp_path}/etc/gpunode/gpunode.toml",
        f"folder {tmp_path}/etc/gpunode",
        f"link {opt}/current",
    ]
    (opt / "installed-files").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(sys, "prefix", str(opt / "0.1.0"))
    monkeypatch.setenv("GPUNODE_SOCKET", str(tmp_path / "none.sock"))
    monkeypatch.setattr(uninstall, "_stop_daemon", lambda *, purge: None)
    return tmp_path


def left(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_cli_uninstall_removes_what_was_installed_but_the_configuration(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["uninstall", "--yes", "--json"], os.environ) == 0
    assert left(installed) == {"etc/gpunode/gpunode.toml", "opt/gpunode/installed-files"}
    assert (installed / "opt/gpunode/installed-files").read_text() == (
        f"config {installed}/etc/gpunode/gpunode.toml\n"
    )
    captured = capsys.readouterr()
    assert f"{installed}/opt/gpunode/0.1.0" in captured.err, "it does not list what it removes"
    assert json.loads(captured.out)["problems"] == []


def test_cli_uninstall_purge_leaves_nothing(installed: Path) -> None:
    assert run(["uninstall", "--yes", "--purge"], os.environ) == 0
    assert left(installed) == set()
    assert not (installed / "opt/gpunode").exists()


def test_cli_uninstall_asks_first(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = left(installed)
    assert run(["uninstall"], os.environ) == 125
    assert left(installed) == before
    assert "add --yes" in capsys.readouterr().err


def test_cli_uninstall_refuses_while_leases_are_live(
    installed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uninstall, "live_leases", lambda folder: ["lease abcd"])
    before = left(installed)
    assert run(["uninstall", "--yes"], os.environ) == 125
    assert left(installed) == before
    assert "gpunode stop --drain" in capsys.readouterr().err
    assert run(["uninstall", "--yes", "--purge"], os.environ) == 0


def test_cli_uninstall_refuses_while_a_keeper_runs_from_there(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uninstall, "keepers_of", lambda folder: [77])
    monkeypatch.setattr(uninstall, "live_leases", lambda folder: [])
    before = left(installed)
    assert run(["uninstall", "--yes", "--purge"], os.environ) == 125
    assert left(installed) == before


def test_cli_uninstall_finds_keepers_by_their_python(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(os.path.realpath(sys.executable))
    program = "import sys; sys.stdout.write('up'); sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen(
        [python, "-c", program, "node.keeper"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == b"up"
        assert uninstall.keepers_of(tmp_path) == [process.pid]
        assert uninstall.keepers_of(tmp_path / "other") == []
        assert process.stdin is not None
        process.stdin.close()


def test_cli_uninstall_knows_when_it_was_not_installed(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="not installed by"):
        uninstall.read_list(tmp_path / "installed-files")


@pytest.mark.parametrize("line", ["file etc/passwd", "file /a/../../etc/passwd", "disk /dev/sda"])
def test_cli_uninstall_refuses_a_list_that_it_does_not_understand(tmp_path: Path, line: str) -> None:
    (tmp_path / "installed-files").write_text(line + "\n")
    with pytest.raises(BadArgument, match="not known here"):
        uninstall.read_list(tmp_path / "installed-files")


def test_cli_uninstall_says_what_it_could_not_remove(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x").touch()
    assert uninstall.remove(Line("folder", str(tmp_path / "d"))) == "", "a folder with something else in it stays"
    assert (tmp_path / "d/x").exists()
    assert "still there" in uninstall.remove(Line("file", str(tmp_path / "d")))
    assert uninstall.remove(Line("file", str(tmp_path / "gone"))) == ""
