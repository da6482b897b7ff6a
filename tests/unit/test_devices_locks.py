"""One daemon a GPU."""

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from node.devices import locks
from node.devices.locks import DeviceLocks, shared_directory
from node.errors import DeviceBusy, DeviceError

UUID = "GPU-4b7bde38-4ece-47c1-b53e-8f5240e93c00"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "locks"


def test_a_second_daemon_is_told_who_holds_the_gpu(tmp_path: Path, directory: Path) -> None:
    first, second = DeviceLocks(tmp_path / "one", directory), DeviceLocks(tmp_path / "two", directory)
    first.claim(UUID)
    first.claim(UUID)
    with pytest.raises(DeviceBusy, match=f"{UUID} is held .*pid {os.getpid()}, state in {tmp_path / 'one'}"):
        second.claim(UUID)
    second.claim("GPU-other")
    first.unclaim(UUID)
    first.unclaim(UUID)
    second.claim(UUID)
    with pytest.raises(DeviceBusy, match=str(tmp_path / "two")):
        first.claim(UUID)
    second.unclaim_all()
    assert list(directory.iterdir()) == []


def test_a_refused_claim_leaves_the_holders_lock_alone(tmp_path: Path, directory: Path) -> None:
    first, second = DeviceLocks(tmp_path / "one", directory), DeviceLocks(tmp_path / "two", directory)
    first.claim(UUID)
    for _ in range(2):
        with pytest.raises(DeviceBusy):
            second.claim(UUID)
        second.unclaim(UUID)
    first.unclaim_all()


HOLD = """
import pathlib, sys
from node.devices import DeviceLocks
DeviceLocks(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])).claim(sys.argv[3])
print("held", flush=True)
sys.stdin.read()
"""


def test_the_lock_goes_with_its_process(tmp_path: Path, directory: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    arguments = [sys.executable, "-c", HOLD, str(tmp_path / "other"), str(directory), UUID]
    mine = DeviceLocks(tmp_path / "mine", directory)
    with subprocess.Popen(arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(DeviceBusy, match=f"pid {other.pid}, state in {tmp_path / 'other'}"):
            mine.claim(UUID)
        other.kill()
        other.wait()
    # It had no time to tidy up: the file is there, the lock is not.
    assert (directory / UUID).exists()
    mine.claim(UUID)
    mine.unclaim_all()


def test_every_user_can_lock_and_only_the_owner_remove(tmp_path: Path, directory: Path) -> None:
    held = DeviceLocks(tmp_path, directory)
    before = os.umask(0o077)
    try:
        held.claim(UUID)
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o1777
    assert stat.S_IMODE((directory / UUID).stat().st_mode) == 0o666
    held.unclaim_all()


@pytest.mark.parametrize("uuid", ["", "../x", "GPU/x", "GPU-\n", "x" * 97, "."])
def test_only_a_uuid_names_a_lock(tmp_path: Path, directory: Path, uuid: str) -> None:
    with pytest.raises(DeviceError, match="is not the UUID"):
        DeviceLocks(tmp_path, directory).claim(uuid)
    assert not directory.exists()


def test_links_and_other_files_are_refused(tmp_path: Path, directory: Path) -> None:
    held = DeviceLocks(tmp_path, directory)
    shared_directory((directory,))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (directory / UUID).symlink_to(victim)
    with pytest.raises(DeviceError, match="can't be opened"):
        held.claim(UUID)
    assert victim.read_text() == "precious"
    (directory / UUID).unlink()
    os.mkfifo(directory / UUID)
    with pytest.raises(DeviceError, match="not a regular file"):
        held.claim(UUID)


def test_a_hostile_holders_text_is_bounded_and_printable(tmp_path: Path, directory: Path) -> None:
    shared_directory((directory,))
    path = directory / UUID
    path.write_bytes(b"pid=\x1b[31m\nstate_dir=\x1b[2J" + b"x" * 100_000)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DeviceBusy, match="pid unknown") as caught:
            DeviceLocks(tmp_path, directory).claim(UUID)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2000


def test_a_lock_file_that_is_removed_meanwhile_is_made_again(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_directory((directory,))
    opened = locks._open

    def removed_after_opening(path: Path) -> int | None:
        descriptor = opened(path)
        monkeypatch.setattr(locks, "_open", opened)
        path.unlink()
        return descriptor

    monkeypatch.setattr(locks, "_open", removed_after_opening)
    first, second = DeviceLocks(tmp_path / "one", directory), DeviceLocks(tmp_path / "two", directory)
    first.claim(UUID)
    with pytest.raises(DeviceBusy):
        second.claim(UUID)
    first.unclaim_all()


def test_a_lock_file_that_keeps_vanishing_is_given_up(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_is_still_at", lambda path, descriptor: False)
    with pytest.raises(DeviceBusy, match="keeps vanishing"):
        DeviceLocks(tmp_path, directory).claim(UUID)


def test_the_first_usable_directory_is_taken(tmp_path: Path) -> None:
    missing_parent = tmp_path / "none" / "locks"
    file = tmp_path / "file"
    file.touch()
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    good = tmp_path / "good"
    assert shared_directory((missing_parent, file, link, good)) == good
    assert shared_directory((good,)) == good
    with pytest.raises(DeviceError, match="no directory for GPU locks") as caught:
        shared_directory((missing_parent, file, link))
    assert "install -d -m 1777 /run/lock/gpunode" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_takes_over_a_users_directory(tmp_path: Path) -> None:
    directory = tmp_path / "locks"
    directory.mkdir()
    os.chown(directory, 12345, 12345)
    shared_directory((directory,))
    assert (directory.stat().st_uid, stat.S_IMODE(directory.stat().st_mode)) == (0, 0o1777)
