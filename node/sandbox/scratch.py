"""A lease's scratch: the directory that its job writes to, bounded in size.

As root it is an ext4 file system in a sparse file, mounted by a loop device: the file's size is the limit, the
kernel says ENOSPC, and the owner's disk is never filled. Elsewhere it is a plain directory whose use must be
polled by the caller, who ends the job that takes too much.

Leaving the context neither unmounts nor erases: results may still be waiting to be fetched, and so a clean
exit looks like a crash. Whoever opens the same lease directory next, after a kill -9 or a reboot, finds the
same files. Only `erase` (or `sweep_scratch`) ends it. Refuses to erase by halves: when the file system is
still in use, erasing raises. Not encrypted: what was stored can be read from the disk by its owner, also
after erasing, until it is overwritten.

LEASE_DIR/scratch.img  the file system        LEASE_DIR/scratch      where it is mounted
LEASE_DIR/scratch/job  the job's directory: it cannot be mistaken for a directory on the host's disk when
                       nothing is mounted, because then it does not exist
"""

import os
import shutil
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from node.errors import DiskFull, SandboxError
from node.log import get_logger
from node.sandbox import launch

log = get_logger(__name__)

MIB = 1 << 20
OVERHEAD_MIB_MIN, OVERHEAD_PART = 4, 50
"""ext4's own tables: one 256-byte inode for every 16 KiB is 1.6%, which the file gets on top of what was lent."""
UNMOUNT_TRIES_MAX = 60
UNMOUNT_PAUSE_MS = 50
ENTRY_SIZE = 1_024
"""What an empty file or directory counts, so that millions of them are not free."""
IMAGE, NEW_IMAGE, MOUNT, JOB = "scratch.img", "scratch.img.new", "scratch", "job"
MOUNT_OPTIONS = "loop,nosuid,nodev,noatime,discard,noinit_itable"
"""discard: deleted files leave holes in the sparse file. noinit_itable: holes read as zeros already."""


class LoopScratch:
    """An ext4 file system in a file. Implements `node.ports.Scratch`."""

    def __init__(self, lease_dir: Path, size_mib: int) -> None:
        self._lease_dir = lease_dir
        self._size_mib = size_mib

    @property
    def path(self) -> Path:
        """The job's directory."""
        return self._lease_dir / MOUNT / JOB

    def used_mib(self) -> int:
        """Return how much of it is used, rounded up. Quick.

        Never more than was lent: the little that fits on top is room for ext4's tables, and whoever fills
        the last of it has done nothing wrong.
        """
        state = os.statvfs(self._lease_dir / MOUNT)
        return min(self._size_mib, -(-(state.f_blocks - state.f_bfree) * state.f_frsize // MIB))

    async def erase(self) -> None:
        """Unmount, free the loop device and delete the file. Idempotent. Raises SandboxError while in use."""
        await sweep_scratch(self._lease_dir)


class PolledScratch:
    """A plain directory: nothing but the caller's polling bounds it. Implements `node.ports.Scratch`."""

    def __init__(self, lease_dir: Path, size_mib: int) -> None:
        self._lease_dir = lease_dir
        self._size_mib = size_mib

    @property
    def path(self) -> Path:
        """The job's directory."""
        return self._lease_dir / MOUNT / JOB

    def used_mib(self) -> int:
        """Add up the tree, rounded up; stops counting once it is over the size.

        Takes as long as the tree is big: call it in a thread. What cannot be looked at (a path too long, a
        directory closed to us) counts as being over the size, since it may hold anything.
        """
        total = 0
        todo = [self.path]
        while todo and total <= self._size_mib * MIB:
            try:
                with os.scandir(todo.pop()) as entries:
                    for entry in entries:
                        info = entry.stat(follow_symlinks=False)
                        total += ENTRY_SIZE + info.st_blocks * 512
                        if stat.S_ISDIR(info.st_mode):
                            todo.append(Path(entry.path))
            except (FileNotFoundError, NotADirectoryError):
                continue  # deleted while we looked
            except OSError:
                return self._size_mib + 1
        return -(-total // MIB)

    async def erase(self) -> None:
        """Delete the tree. Idempotent. Raises SandboxError when something resists."""
        await sweep_scratch(self._lease_dir)


@asynccontextmanager
async def open_scratch(lease_dir: Path, size_mib: int, uid: int) -> AsyncIterator[LoopScratch | PolledScratch]:
    """Make the lease's scratch of `size_mib` for `uid`, or find the one that is there (of whatever size).

    Implements `node.ports.OpenScratch`. Leaving the context leaves everything in place. Raises DiskFull, and
    SandboxError when an existing scratch cannot be mounted again.
    """
    image = lease_dir / IMAGE
    found_plain = not image.exists() and lease_dir.joinpath(MOUNT, JOB).exists()
    if image.exists() or (not found_plain and _can_loop()):
        made = not image.exists()
        try:
            await _prepare_loop(lease_dir, size_mib + size_mib // OVERHEAD_PART + OVERHEAD_MIB_MIN)
            _give(lease_dir / MOUNT / JOB, uid)
        except SandboxError as error:
            if not made:
                raise  # somebody's results are in there
            log.warning("sandbox.scratch_polled", lease_dir=str(lease_dir), reason=str(error))
            await sweep_scratch(lease_dir)
        else:
            yield LoopScratch(lease_dir, size_mib)
            return
    lease_dir.joinpath(MOUNT).mkdir(mode=0o711, exist_ok=True)
    _give(lease_dir / MOUNT / JOB, uid)
    yield PolledScratch(lease_dir, size_mib)


async def sweep_scratch(lease_dir: Path) -> None:
    """Unmount and delete whatever scratch the lease directory holds. Idempotent.

    Raises SandboxError when the file system is still in use, and when a file cannot be deleted.
    """
    mount = lease_dir / MOUNT
    with trio.CancelScope(shield=True):
        for _ in range(UNMOUNT_TRIES_MAX):
            if not mount.is_mount():
                break
            error = await _run("umount", str(mount))
            if error:
                await trio.sleep(UNMOUNT_PAUSE_MS / 1_000)
        else:
            raise SandboxError(f"the scratch {mount} is still in use: {error}", f"fuser -vm {mount}")
        if mount.exists():
            if os.geteuid() != 0:  # a job under our own uid may have closed its directories
                await _run("chmod", "-R", "u+rwX", "--", str(mount))
            # Not shutil: a tree of a stranger's making may be deeper than Python recurses.
            if error := await _run("rm", "-rf", "--one-file-system", "--", str(mount)):
                raise SandboxError(f"the scratch {mount} cannot be deleted: {error}")
        for name in (IMAGE, NEW_IMAGE):
            lease_dir.joinpath(name).unlink(missing_ok=True)


async def _prepare_loop(lease_dir: Path, size_mib: int) -> None:
    """Have the file system made, checked and mounted. Repeatable at any step. Raises SandboxError."""
    image, mount = lease_dir / IMAGE, lease_dir / MOUNT
    if mount.is_mount():
        return
    mount.mkdir(mode=0o711, exist_ok=True)
    if image.exists():
        # It was mounted when the machine went down. There is no journal to replay: look at everything.
        if error := await _run("e2fsck", "-p", str(image), good=(0, 1)):
            raise SandboxError(f"the scratch {image} is damaged: {error}", f"e2fsck -y {image}")
    else:
        new = lease_dir / NEW_IMAGE
        new.unlink(missing_ok=True)
        _make_sparse(new, size_mib)
        features = (
            "-O",
            "^has_journal,^resize_inode",
            "-m",
            "0",
            "-E",
            "lazy_itable_init=1,nodiscard,root_owner=0:0",
        )
        if error := await _run("mkfs.ext4", "-q", "-F", "-b", "4096", *features, str(new)):
            raise SandboxError(f"the scratch cannot be formatted: {error}")
        new.rename(image)
    if error := await _run("mount", "-t", "ext4", "-o", MOUNT_OPTIONS, str(image), str(mount)):
        raise SandboxError(f"the scratch cannot be mounted: {error}", "modprobe loop; ls -l /dev/loop-control")


def _make_sparse(path: Path, size_mib: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size_mib * MIB)
    except OSError as error:
        raise DiskFull(
            f"no scratch of {size_mib} MiB fits on the disk of {path.parent}: {error.strerror}"
        ) from error
    finally:
        os.close(fd)


def _give(path: Path, uid: int) -> None:
    """Make the job's directory and give it to `uid`. Its parent is ours, so nobody can exchange it."""
    path.mkdir(mode=0o700, exist_ok=True)
    if path.lstat().st_uid != uid:
        os.chown(path, uid, uid if os.geteuid() == 0 else -1, follow_symlinks=False)


def _can_loop() -> bool:
    tools = ("mkfs.ext4", "e2fsck", "mount", "umount")
    return (
        os.geteuid() == 0
        and Path("/dev/loop-control").exists()
        and all(shutil.which(tool, path=launch.PATH) for tool in tools)
    )


async def _run(*argv: str, good: tuple[int, ...] = (0,)) -> str:
    """Run a program; return "" when it ended well, else what it said."""
    done = await trio.run_process(
        argv, check=False, capture_stdout=True, capture_stderr=True, env={**launch.LANGUAGE}
    )
    if done.returncode in good:
        return ""
    said = (done.stderr + done.stdout).decode(errors="replace").strip()
    return said[:400] or f"{argv[0]} ended with {done.returncode}"
