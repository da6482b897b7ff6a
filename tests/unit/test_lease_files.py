import os
from pathlib import Path

import pytest

from node.lease import files, lock
from node.lease.files import LeaseFileError, LeaseKeys, LeaseStatus, Role
from protocol.machines.lease import LeasePhase


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def status_of(sequence: int) -> LeaseStatus:
    return LeaseStatus(
        lease=bytes(16),
        role=Role.RENTER,
        generation=1,
        sequence=sequence,
        phase=LeasePhase.SIGNED,
        usage={"cpu_ms": 3},
    )


def test_status_is_read_as_it_was_written_and_absent_before(tmp_path: Path) -> None:
    assert files.read_status(tmp_path) is None
    files.write_status(tmp_path, status_of(7))
    files.write_status(tmp_path, status_of(8))
    assert files.read_status(tmp_path) == status_of(8)
    assert names(tmp_path) == ["status.cbor"]


def test_links_fifos_and_large_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x")
    (tmp_path / "status.cbor").symlink_to("other")
    with pytest.raises(LeaseFileError):
        files.read_status(tmp_path)
    (tmp_path / "status.cbor").unlink()
    os.mkfifo(tmp_path / "status.cbor")
    with pytest.raises(LeaseFileError, match="not a regular file"):
        files.read_status(tmp_path)
    (tmp_path / "status.cbor").unlink()
    (tmp_path / "status.cbor").write_bytes(bytes(files.STATUS_FILE_MAX + 1))
    with pytest.raises(LeaseFileError, match="larger"):
        files.read_status(tmp_path)


def test_missing_keys_and_damaged_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(LeaseFileError, match="missing"):
        files.read_keys(tmp_path)
    files.write_atomically(tmp_path / "keys", b"\xff")
    with pytest.raises(LeaseFileError, match="damaged"):
        files.read_keys(tmp_path)


def test_keys_are_private_and_deleted(tmp_path: Path) -> None:
    keys = LeaseKeys(bytes(32))
    files.write_atomically(tmp_path / "keys", files.codec.encode(keys))
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    assert files.read_keys(tmp_path) == keys
    files.delete_keys(tmp_path)
    files.delete_keys(tmp_path)
    assert not (tmp_path / "keys").exists()


def test_lock_names_its_holder_and_raises_the_generation(tmp_path: Path) -> None:
    assert lock.holder_of(tmp_path) is None
    held = lock.LeaseLock.acquire(tmp_path)
    holder = lock.holder_of(tmp_path)
    assert holder is not None
    assert (holder.pid, holder.generation, held.generation) == (os.getpid(), 1, 1)
    with pytest.raises(lock.LeaseHeld, match=str(os.getpid())):
        lock.LeaseLock.acquire(tmp_path)
    held.release()
    held.release()
    again = lock.LeaseLock.acquire(tmp_path)
    assert again.generation == 2
    again.release()


def test_another_process_with_the_same_pid_is_not_the_holder(tmp_path: Path) -> None:
    held = lock.LeaseLock.acquire(tmp_path)
    holder = lock.holder_of(tmp_path)
    assert holder is not None
    held.release()
    other = lock.Holder(holder.pid, holder.boot_id, holder.start_ticks + 1, 1)
    (tmp_path / "lock").write_bytes(files.codec.encode(other))
    assert lock.holder_of(tmp_path) is None
    before = lock.Holder(holder.pid, "another boot", holder.start_ticks, 1)
    (tmp_path / "lock").write_bytes(files.codec.encode(before))
    assert lock.holder_of(tmp_path) is None
