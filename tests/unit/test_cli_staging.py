"""What of a folder is sent: `.gpunodeignore`, `--ignore`, and what is wrong with either."""

from pathlib import Path

import pytest

from node.cli.staging import IGNORE_FILE, IGNORE_FILE_MAX, scan_inputs
from node.cli.values import InputArgument
from node.errors import StagingError
from node.jobs.tree import scan_tree
from node.rpc.fields import IGNORE_PATTERN_SIZE_MAX, IGNORE_PATTERNS_MAX
from node.rpc.methods.jobs import JobInput


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train.py", "run.log", "old/run.log", "cache/big", "data/x.csv"):
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "work"


def scanned(folder: Path, *ignore: str) -> JobInput:
    (found,) = scan_inputs([InputArgument(folder, ".")], ignore)
    return found


def sent(folder: Path, *ignore: str) -> set[str]:
    """Return the files that the keeper would read again for what was scanned."""
    found = scanned(folder, *ignore)
    tree = scan_tree(folder, ignore=found.ignore)
    assert tree.manifest.id.hex() == found.manifest
    assert tree.manifest.size == found.size
    return {entry.path for entry in tree.manifest.entries if not (folder / entry.path).is_dir()}


def test_everything_is_sent_unless_something_says_otherwise(folder: Path) -> None:
    assert sent(folder) == {"train.py", "run.log", "old/run.log", "cache/big", "data/x.csv"}
    assert scanned(folder).ignore == ()


def test_a_folders_own_file_says_what_is_left_out(folder: Path) -> None:
    (folder / IGNORE_FILE).write_text("# scratch\n\n*.log\ncache/\n")
    assert sent(folder) == {"train.py", "data/x.csv", IGNORE_FILE}
    assert scanned(folder).ignore == ("*.log", "cache/")


def test_the_command_line_has_the_last_word(folder: Path) -> None:
    (folder / IGNORE_FILE).write_text("*.log\ncache/\n")
    assert sent(folder, "!run.log", IGNORE_FILE) == {"train.py", "data/x.csv", "run.log", "old/run.log"}


def test_a_file_that_is_an_input_has_no_ignore_file_of_its_own(folder: Path) -> None:
    (folder / IGNORE_FILE).write_text("*\n")
    (found,) = scan_inputs([InputArgument(folder / "train.py", "train.py")])
    assert found.ignore == ()


def test_each_folder_has_its_own(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.log").write_text("")
    (folder / IGNORE_FILE).write_text("*.log\n")
    first, second = scan_inputs([InputArgument(folder, "."), InputArgument(other, "other")], ("x",))
    assert (first.ignore, second.ignore) == (("*.log", "x"), ("x",))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"x" * (IGNORE_FILE_MAX + 1), "larger than"),
        (b"\xff\xfe", "UTF-8"),
        (b"a\n" * (IGNORE_PATTERNS_MAX + 1), f"{IGNORE_PATTERNS_MAX + 1} patterns"),
        (b"a" * (IGNORE_PATTERN_SIZE_MAX + 1), "characters"),
    ],
)
def test_an_ignore_file_that_will_not_do_is_named(folder: Path, text: bytes, problem: str) -> None:
    (folder / IGNORE_FILE).write_bytes(text)
    with pytest.raises(StagingError, match=problem) as caught:
        scanned(folder)
    assert str(folder) in f"{caught.value}{caught.value.hint}"


def test_an_empty_pattern_is_refused(folder: Path) -> None:
    with pytest.raises(StagingError, match="characters"):
        scanned(folder, "")
