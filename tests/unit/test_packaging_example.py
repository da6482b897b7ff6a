"""The example job: it learns, always the same, and never passes off a broken transfer as a result."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "contrib" / "examples" / "classifier"


def train(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "train.py", "--epochs", "4"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def example(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "job"))


def test_it_learns_and_reports(example: Path) -> None:
    done = train(example)
    assert (done.returncode, done.stderr) == (0, "")
    assert "epoch   4/4" in done.stdout
    model = json.loads((example / "results" / "model.json").read_text())
    assert model["accuracy"] > 0.85
    assert f"{model['accuracy']:.4f}" in (example / "results" / "report.txt").read_text()


@pytest.mark.parametrize("name", ["moons.csv", "SHA256SUMS"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "binary"])
def test_corrupted_input_is_refused(example: Path, name: str, damage: str) -> None:
    path = example / "data" / name
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    match damage:
        case "flip":
            path.write_bytes(content)
        case "truncate":
            path.write_bytes(content[:30])
        case "remove":
            path.unlink()
        case "binary":
            path.write_bytes(b"\xff\xfe\x00" * 20)
    done = train(example)
    assert done.returncode == 3
    assert "moons.csv is corrupted" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (example / "results").exists()


def test_data_can_be_made_again(example: Path) -> None:
    shutil.rmtree(example / "data")
    subprocess.run([sys.executable, "-I", "make_data.py"], cwd=example, check=True)
    for name in ("moons.csv", "SHA256SUMS"):
        assert (example / "data" / name).read_bytes() == (EXAMPLE / "data" / name).read_bytes()
