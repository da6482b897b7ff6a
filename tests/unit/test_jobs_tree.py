import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from node.errors import StagingError
from node.jobs import tree
from node.jobs.ignore import IgnoreRules, parse_ignore_file
from node.jobs.tree import scan_beneath, scan_tree
from protocol.manifest import EntryKind, Manifest

SIZE_MAX = 2**30


def paths(manifest: Manifest) -> list[str]:
    return [entry.path for entry in manifest.entries]


def test_scanning_loads_no_event_loop() -> None:
    code = "import node.jobs.tree, sys; print([m for m in ('trio', 'libp2p', 'aioquic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_same_content_is_the_same_manifest_wherever_it_lies(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "b").mkdir(parents=True)
        (tmp_path / name / "b" / "file").write_text("x")
        (tmp_path / name / "b-file").write_text("y")
    one = scan_tree(tmp_path / "one").manifest
    assert one.id == scan_tree(tmp_path / "two").manifest.id
    assert paths(one) == ["", "b", "b/file", "b-file"]
    assert one.size == 2
    (tmp_path / "two" / "b" / "file").chmod(0o755)
    assert one.id != scan_tree(tmp_path / "two").manifest.id


def test_an_insertion_changes_few_chunks(tmp_path: Path) -> None:
    data = os.urandom(8_000_000)
    (tmp_path / "file").write_bytes(data)
    before = scan_tree(tmp_path / "file").manifest
    (tmp_path / "file").write_bytes(data[:4_000_000] + b"inserted" + data[4_000_000:])
    after = scan_tree(tmp_path / "file").manifest
    known = {before.chunk_record(i) for i in range(before.chunk_count)}
    assert sum(after.chunk_record(i) not in known for i in range(after.chunk_count)) <= 3


def test_inner_links_are_kept_and_absolute_ones_made_relative(tmp_path: Path) -> None:
    (tmp_path / "t" / "a").mkdir(parents=True)
    (tmp_path / "t" / "file").write_text("x")
    (tmp_path / "t" / "a" / "one").symlink_to("../file")
    (tmp_path / "t" / "a" / "two").symlink_to(tmp_path / "t" / "file")
    (tmp_path / "t" / "a" / "top").symlink_to(tmp_path / "t")
    targets = {entry.path: entry.target for entry in scan_tree(tmp_path / "t").manifest.entries if entry.target}
    assert targets == {"a/one": "../file", "a/two": "../file", "a/top": "../"}


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "a/../../outside"])
def test_links_out_of_the_tree_are_named(tmp_path: Path, target: str) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "bad link").symlink_to(target)
    with pytest.raises(StagingError, match="bad link"):
        scan_tree(tmp_path / "t")
    found = scan_beneath(tmp_path, "t", seen_as="/job", size_max=SIZE_MAX)
    assert found is not None
    assert paths(found.manifest) == [""]
    assert "bad link" in found.skipped[0]


def test_what_is_no_file_and_names_that_are_not_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "good").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StagingError, match="pipe is a fifo"):
        scan_tree(tmp_path)
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
    (tmp_path / os.fsdecode(b"bad\xff")).write_text("x")
    found = scan_beneath(tmp_path, ".", seen_as="/job", size_max=SIZE_MAX)
    assert found is not None
    assert paths(found.manifest) == ["", "good"]
    assert "\n".join(found.skipped).count(" is a ") == 2
    assert any("bad\\xff has a name that is not UTF-8" in line for line in found.skipped)


def test_an_output_behind_a_link_or_absent_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("x")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "way").symlink_to(tmp_path / "secret")
    assert scan_beneath(tmp_path / "job", "none", seen_as="/job", size_max=SIZE_MAX) is None
    assert scan_beneath(tmp_path / "job", "way/key", seen_as="/job", size_max=SIZE_MAX) is None
    with pytest.raises(StagingError, match="cannot read"):
        scan_beneath(tmp_path / "job", "way", seen_as="/job", size_max=SIZE_MAX)


def test_a_jobs_own_absolute_links_keep_their_meaning(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "best").write_text("x")
    (tmp_path / "out" / "latest").symlink_to("/job/out/best")
    found = scan_beneath(tmp_path, "out/", seen_as="/job", size_max=SIZE_MAX)
    assert found is not None
    assert found.manifest.entries[-1].target == "best"


def test_trees_beyond_their_bound_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10_000_000)
    with pytest.raises(StagingError, match="more than 5000000 bytes"):
        scan_tree(tmp_path, size_max=5_000_000)


def test_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"first")
    changes = iter(range(2))

    def change(_done: int) -> None:
        for number in changes:
            path.write_bytes(b"changed")
            os.utime(path, ns=(number, number))
            return

    found = scan_tree(path, progress=change)
    assert found.manifest.size == len(b"changed")
    monkeypatch.setattr(tree, "READS_MAX", 1)
    changes = iter(range(10, 20))
    with pytest.raises(StagingError, match="changes while it is read"):
        scan_tree(path, progress=change)


def test_absent_and_unreadable_inputs_are_named(tmp_path: Path) -> None:
    with pytest.raises(StagingError, match="nothing-here"):
        scan_tree(tmp_path / "nothing-here")
    with pytest.raises(StagingError, match="a device"):
        scan_tree(Path("/dev/null"))


def test_control_characters_in_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[2J").symlink_to("/etc")
    with pytest.raises(StagingError) as caught:
        scan_tree(tmp_path)
    assert str(caught.value).isprintable()


def test_ignored_files_are_left_out(tmp_path: Path) -> None:
    for name in ("a.pyc", "keep.py", ".git/config", "sub/b.pyc", "sub/keep.pyc", "build/x", "sub/build"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    rules = parse_ignore_file("# compiled\n*.pyc\n!keep.pyc\n\n.git/\n/build/\n")
    found = scan_tree(tmp_path, ignore=rules).manifest
    files = [entry.path for entry in found.entries if entry.kind is EntryKind.FILE]
    assert files == ["keep.py", "sub/build", "sub/keep.pyc"]


@pytest.mark.parametrize(
    ("pattern", "path", "is_directory", "is_ignored"),
    [
        ("*.o", "a/b/c.o", False, True),
        ("a/*.o", "a/b/c.o", False, False),
        ("a/**/c.o", "a/b/c.o", False, True),
        ("a/**/c.o", "a/c.o", False, True),
        ("a/**", "a", True, False),
        ("a/**", "a/b", True, True),
        ("/b", "a/b", False, False),
        ("b", "a/b", False, True),
        ("b/", "a/b", False, False),
        ("b/", "a/b", True, True),
        ("B", "a/b", False, False),
    ],
)
def test_ignore_patterns(pattern: str, path: str, is_directory: bool, is_ignored: bool) -> None:
    assert IgnoreRules([pattern]).is_ignored(path, is_directory=is_directory) == is_ignored


def test_a_file_that_can_be_opened_but_not_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StagingError, match=r"cannot read /proc/\d+/mem: Input/output error"):
        scan_tree(Path("/proc/self/mem"))
