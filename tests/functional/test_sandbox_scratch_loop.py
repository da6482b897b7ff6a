"""The lease's scratch as an ext4 loop file: limited by the kernel, found again, erased without a trace."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from sandbox_jobs import JOB_UID, Bench, loop_devices, needs_jobs, until

from node.errors import SandboxError
from node.sandbox import BubblewrapSandbox, LoopScratch, open_scratch, scratch, sweep_scratch

needs_loop = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists() or shutil.which("mkfs.ext4") is None,
    reason="needs root, loop devices and mkfs.ext4",
)
pytestmark = needs_loop
SIZE_MIB = 32


@pytest.fixture
def lease_dir(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "lease"
    directory.mkdir(mode=0o700)
    yield directory
    if (directory / scratch.MOUNT).is_mount():  # the test has failed: leave no mount behind for the next
        subprocess.run(["umount", "--lazy", directory / scratch.MOUNT], check=True)


def mount_options(point: Path) -> set[str]:
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return next(set(words[3].split(",")) for words in lines if words[1] == str(point))


def files(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def gone(lease_dir: Path) -> None:
    """Wait until the kernel has let go of the loop device, which it does a moment after unmounting."""
    assert files(lease_dir) == []
    await until(lambda: loop_devices(lease_dir / scratch.IMAGE) == "")


async def test_it_is_the_uids_and_of_that_size_and_erased_without_a_trace(lease_dir: Path) -> None:
    async with open_scratch(lease_dir, SIZE_MIB, JOB_UID) as place:
        assert isinstance(place, LoopScratch)
        state = place.path.stat()
        assert (state.st_uid, state.st_gid, state.st_mode & 0o7777) == (JOB_UID, JOB_UID, 0o700)
        assert list(place.path.iterdir()) == []
        assert place.used_mib() <= 1
        (place.path / "weights").write_bytes(b"x" * (5 << 20))
        os.sync()
        assert 5 <= place.used_mib() <= 7
        assert {"nosuid", "nodev"} <= mount_options(place.path.parent)
        await place.erase()
        await place.erase()
    await gone(lease_dir)


async def test_the_kernel_says_when_it_is_full(lease_dir: Path) -> None:
    async with open_scratch(lease_dir, SIZE_MIB, JOB_UID) as place:
        with pytest.raises(OSError, match="No space") as caught, (place.path / "big").open("wb") as file:
            for _ in range(2 * SIZE_MIB):
                file.write(bytes(1 << 20))
        assert caught.value.errno == errno.ENOSPC
        # No blocks are kept back for root: it is the renter's to fill.
        assert (place.path / "big").stat().st_size >= SIZE_MIB << 20
        assert place.used_mib() == SIZE_MIB
        await place.erase()
    await gone(lease_dir)


@needs_jobs
async def test_a_job_that_fills_its_disk_gets_enospc(lease_dir: Path, tmp_path: Path) -> None:
    async with open_scratch(lease_dir, SIZE_MIB, JOB_UID) as place:
        bench = Bench(BubblewrapSandbox(), tmp_path)
        bench.root = place.path
        end, text = await bench.run("dd", "if=/dev/zero", "of=/job/big", "bs=1M", "count=100")
        assert end.status == 1
        assert "No space left on device" in text
        (place.path / "big").unlink()
        # It may be unmounted while another job runs: no private mount of a sandbox holds it.
        bench.root = tmp_path / "job"
        job, output = await bench.start("sleep", "1000")
        await place.erase()
        await gone(lease_dir)
        await job.kill()
        output.close()


async def test_leaving_keeps_it_and_the_next_holder_finds_it(lease_dir: Path) -> None:
    async with open_scratch(lease_dir, SIZE_MIB, JOB_UID) as place:
        (place.path / "result").write_text("precious")
    async with open_scratch(lease_dir, SIZE_MIB, JOB_UID) as place:
        assert (place.path / "result").read_text() == "precious"
    device = loop_devices(lease_dir / scratch.IMAGE)
    assert device.count("\n") == 0
    assert device
    await sweep_scratch(lease_dir)
    await sweep_scratch(lease_dir)
    await gone(lease_dir)


async def test_after_a_reboot_it_is_checked_and_mounted_again(lease_dir: Path) -> None:
    async with open_scratch(lease_dir, SIZE_MIB, JOB_UID) as place:
        (place.path / "result").write_text("precious")
    mount = lease_dir / scratch.MOUNT
    await trio.to_thread.run_sync(lambda: subprocess.run(["umount", mount], check=True))
    assert not place.path.exists()  # nothing could be written to the host's disk by mistake
    async with open_scratch(lease_dir, SIZE_MIB, JOB_UID) as place:
        assert (place.path / "result").read_text() == "precious"
        await place.erase()
    await gone(lease_dir)


async def test_a_crash_while_formatting_leaves_no_half_made_scratch(lease_dir: Path) -> None:
    (lease_dir / scratch.NEW_IMAGE).write_bytes(b"half")
    (lease_dir / scratch.MOUNT).mkdir()
    async with open_scratch(lease_dir, SIZE_MIB, JOB_UID) as place:
        assert isinstance(place, LoopScratch)
        await place.erase()
    await gone(lease_dir)


async def test_a_damaged_scratch_is_kept_and_said(lease_dir: Path) -> None:
    (lease_dir / scratch.IMAGE).write_bytes(bytes(1 << 20))
    with pytest.raises(SandboxError, match="damaged"):
        async with open_scratch(lease_dir, SIZE_MIB, JOB_UID):
            pass
    assert (lease_dir / scratch.IMAGE).stat().st_size == 1 << 20
    await sweep_scratch(lease_dir)
    await gone(lease_dir)


async def test_a_scratch_in_use_is_not_claimed_to_be_erased(
    lease_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "UNMOUNT_TRIES_MAX", 2)
    async with open_scratch(lease_dir, SIZE_MIB, JOB_UID) as place:
        fd = os.open(place.path, os.O_RDONLY)
        with pytest.raises(SandboxError, match="still in use") as caught:
            await place.erase()
        assert "fuser" in caught.value.hint
        os.close(fd)
        await place.erase()
    await gone(lease_dir)


async def test_without_loop_devices_it_is_a_plain_directory(
    lease_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "MOUNT_OPTIONS", "loop,no-such-option=1")
    async with open_scratch(lease_dir, SIZE_MIB, JOB_UID) as place:
        assert isinstance(place, scratch.PolledScratch)
        assert place.path.stat().st_uid == JOB_UID
        assert not (lease_dir / scratch.IMAGE).exists()
    monkeypatch.undo()
    async with open_scratch(lease_dir, SIZE_MIB, JOB_UID) as place:
        assert isinstance(place, scratch.PolledScratch)  # the same one, though now it could be another
        await place.erase()
    await gone(lease_dir)
