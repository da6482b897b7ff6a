"""Scratch as a plain directory: counted, bounded by whoever polls, erased whatever is in it."""

import os
from pathlib import Path

import pytest

from node.sandbox import PolledScratch, open_scratch, scratch, sweep_scratch


@pytest.fixture
def lease_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scratch, "_can_loop", lambda: False)
    return tmp_path


async def opened(lease_dir: Path, size_mib: int = 4) -> PolledScratch:
    async with open_scratch(lease_dir, size_mib, os.geteuid()) as place:
        assert isinstance(place, PolledScratch)
        return place


async def test_it_is_found_again_and_erased(lease_dir: Path) -> None:
    place = await opened(lease_dir)
    assert place.path.stat().st_mode & 0o7777 == 0o700
    (place.path / "result").write_text("precious")
    again = await opened(lease_dir)
    assert (again.path / "result").read_text() == "precious"
    await again.erase()
    await again.erase()
    assert list(lease_dir.iterdir()) == []  # noqa: ASYNC240 - a temporary directory


async def test_use_is_counted_in_blocks_and_entries(lease_dir: Path) -> None:
    place = await opened(lease_dir)
    assert place.used_mib() == 0
    (place.path / "deep").mkdir()
    (place.path / "deep" / "data").write_bytes(b"x" * (2 << 20))
    (place.path / "link").symlink_to("/usr")
    assert place.used_mib() == 3  # 2 MiB, and a little for the entries, rounded up
    with (place.path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert place.used_mib() == 3


async def test_many_empty_files_are_not_free(lease_dir: Path) -> None:
    place = await opened(lease_dir, size_mib=1)
    for number in range(1_100):
        (place.path / str(number)).touch()
    assert place.used_mib() == 2


async def test_what_is_too_deep_to_be_counted_counts_as_too_much(lease_dir: Path) -> None:
    place = await opened(lease_dir)
    fd = os.open(place.path, os.O_RDONLY)
    for _ in range(40):  # 40 x 250 characters: no path to the bottom is short enough
        os.mkdir("d" * 250, dir_fd=fd)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    assert place.used_mib() == 5
    await place.erase()
    assert not place.path.exists()


async def test_erasing_takes_more_levels_than_python_recurses(lease_dir: Path) -> None:
    place = await opened(lease_dir)
    fd = os.open(place.path, os.O_RDONLY)
    for _ in range(1_100):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    await sweep_scratch(lease_dir)
    assert not place.path.exists()


async def test_sweeping_where_there_is_nothing(lease_dir: Path) -> None:
    await sweep_scratch(lease_dir)
    await sweep_scratch(lease_dir / "gone")
