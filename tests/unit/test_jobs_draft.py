import errno
import os
import shutil
from pathlib import Path

import pytest

from node.errors import DiskFull, StagingError
from node.jobs.draft import DraftTree, Placement, discard_draft, make_directory
from node.jobs.tree import scan_tree


def test_incomplete_tree_is_not_placed_and_its_draft_can_be_discarded(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("a")
    (source / "b").write_text("b")
    (tmp_path / "place").mkdir()
    draft = DraftTree(tmp_path, "place", scan_tree(source).manifest, "t")
    draft.open()
    draft.store(0, b"a")
    with pytest.raises(StagingError, match="1 chunks are missing"):
        draft.place(is_durable=False)
    draft.close()
    assert [path.name for path in (tmp_path / "place").iterdir()] == [".gpunode-t.partial"]
    discard_draft(tmp_path, "place", "t")
    discard_draft(tmp_path, "place", "t")
    assert list((tmp_path / "place").iterdir()) == []


def test_something_else_under_the_drafts_name_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / ".gpunode-t.partial").write_text("mine")
    draft = DraftTree(tmp_path, "place", scan_tree(tmp_path / "file").manifest, "t")
    with pytest.raises(StagingError, match="in the way"):
        draft.open()
    assert (tmp_path / ".gpunode-t.partial").read_text() == "mine"


def test_file_does_not_take_the_roots_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "root").mkdir()
    draft = DraftTree(tmp_path / "root", ".", scan_tree(tmp_path / "file").manifest, "t")
    draft.open()
    draft.store(0, b"x")
    with pytest.raises(StagingError, match="can't take its place"):
        draft.place(is_durable=False)


def test_directories_are_made_but_not_through_links(tmp_path: Path) -> None:
    make_directory(tmp_path, "a/./b/c", owner=0)
    make_directory(tmp_path, "", owner=0)
    assert (tmp_path / "a" / "b" / "c").is_dir()
    (tmp_path / "link").symlink_to("/tmp")
    with pytest.raises(StagingError):
        make_directory(tmp_path, "link/x", owner=0)


def test_errors_call_the_root_as_those_who_hear_them_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    root = tmp_path / "root"
    root.mkdir()
    manifest = scan_tree(tmp_path / "file").manifest

    def open_error(name: str) -> str:
        with pytest.raises((StagingError, DiskFull)) as caught:
            DraftTree(root, "place", manifest, name, seen_as="/job").open()
        assert str(tmp_path) not in f"{caught.value} {caught.value.hint}"
        return str(caught.value)

    (root / ".gpunode-t.partial").write_text("mine")
    assert open_error("t") == "/job/.gpunode-t.partial is in the way"
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10, 10, 0))
    assert open_error("u") == "/job lacks 17 MiB for what is coming"
    monkeypatch.setattr(
        Path, "mkdir", lambda self, mode: raise_(OSError(errno.EACCES, "Permission denied", str(self)))
    )
    assert open_error("v") == "cannot write /job/.gpunode-v.partial: Permission denied"
    monkeypatch.setattr(
        Path, "mkdir", lambda _self, mode: raise_(OSError(errno.ENOSPC, "No space left on device"))
    )
    assert open_error("w") == "the disk of /job/place is full"


def raise_(error: Exception) -> None:
    raise error


def test_a_file_replaces_files_and_links_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("new")
    manifest = scan_tree(tmp_path / "source").manifest
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("source")

    def placed(name: str) -> Placement:
        draft = DraftTree(tmp_path, name, manifest, "t")
        draft.open()
        draft.store(0, b"new")
        return draft.place(is_durable=False)

    assert placed("link").in_the_way == ""
    assert not (tmp_path / "link").is_symlink()
    beside = placed("fifo")
    assert (beside.path.name, beside.in_the_way) == ("fifo.gpunode-1", "fifo is not a file there")
    assert (tmp_path / "fifo").is_fifo()
    assert beside.path.read_text() == "new"
