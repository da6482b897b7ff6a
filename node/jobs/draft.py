"""Building a received tree: chunks are written where they belong in a draft, and the whole is put in its place.

A draft is a 0700 directory beside the place (inside it when that is a directory already, which may be a mount
point), on the same file system, so that a file moves into its place by one rename and nobody ever sees half of
one. A chunk goes straight into its file: no second copy on disk. What a draft already holds is found out by
hashing it, so that a cut transfer, or a killed process, resumes without trusting a journal.

Below the place's root nothing is opened through a link; a manifest was checked before it comes here
(`protocol.manifest`). Synchronous: call it in a thread, one at a time.

Refuses to store a chunk that is not what the manifest says, and to replace a directory by a file or the
reverse: `place` then puts the tree beside that place, and says so.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import stat
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
from blake3 import blake3

from node.errors import DiskFull, StagingError
from protocol.errors import BadManifest
from protocol.manifest import Entry, EntryKind, Manifest

DISK_RESERVE = 16 * 1024 * 1024
"""Bytes that must stay free when a transfer starts."""
PARENT_MODE = 0o755
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_DRAFT_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_BESIDE_MAX = 1000


class Placement(msgspec.Struct, frozen=True):
    """Where a tree has been put."""

    path: Path
    in_the_way: str = ""
    """What kept it from its place, so that it is beside it; "" when it is where it belongs."""


class DraftTree:
    """One tree being received. `owner` is the uid and gid that its files get, when we may give them away."""

    def __init__(
        self,
        root: Path,
        beneath: str,
        manifest: Manifest,
        name: str,
        *,
        owner: int | None = None,
        seen_as: str = "",
    ) -> None:
        """Describe the draft of `manifest` for the place `beneath` below `root`; nothing is touched yet.

        `name` tells it from other drafts in the same directory, and is the same again when it is resumed.
        `seen_as`: how errors call `root`, when they are told to others, who know it as that.
        """
        self.manifest = manifest
        self._root = root
        self._seen_as = seen_as or str(root)
        self._beneath = "/".join(part for part in beneath.split("/") if part not in ("", "."))
        self._name = _draft_name(name)
        self._owner = owner if owner is not None and os.geteuid() == 0 else None
        self._directory = root / self._name
        self._file = -1
        self._file_path: str | None = None
        self._entry_of: list[Entry] = []
        self._offset_of = array("Q")
        self._twins: dict[int, list[int]] = {}
        """Chunk -> later ones with the same content."""
        self.needed: set[int] = set()
        """Chunks still to come; of equal ones the first."""

    @property
    def needed_bytes(self) -> int:
        """Bytes of content still to come."""
        return sum(self.manifest.chunk(index)[1] for index in self.needed)

    def open(self) -> None:
        """Make the draft, or find out what one of an earlier try holds. Raises DiskFull, StagingError."""
        with self._disk_errors():
            place = self._root / self._beneath
            if self._beneath and place.is_dir() and not place.is_symlink():
                self._directory = place / self._name
            self._make_directory()
            self._index_chunks()
            for entry in self.manifest.entries:
                if entry.kind is EntryKind.DIRECTORY:
                    self._tree_path(entry.path).mkdir(mode=0o700, exist_ok=True)
            self._find_present()
            free = shutil.disk_usage(self._directory).free
        if self.needed_bytes + DISK_RESERVE > free:
            missing_mib = (self.needed_bytes + DISK_RESERVE - free) // 2**20 + 1
            raise DiskFull(f"{self._shown(self._directory.parent)} lacks {missing_mib} MiB for what is coming")

    def store(self, index: int, data: bytes) -> None:
        """Check chunk `index` and write it wherever it belongs. Raises BadManifest when it is something else."""
        chunk_hash, length = self.manifest.chunk(index)
        if index not in self.needed:
            raise BadManifest(f"chunk {index} was not asked for")
        if len(data) != length or blake3(data).digest() != chunk_hash:
            raise BadManifest(f"chunk {index} is not what its hash says")
        with self._disk_errors():
            for twin in (index, *self._twins.get(index, ())):
                self._write(twin, data)
        self.needed.discard(index)

    def place(self, *, is_durable: bool) -> Placement:
        """Finish the complete draft and put it in its place, replacing files there by their new versions.

        With `is_durable`, all of it is on the disk when this returns. Raises DiskFull, StagingError.
        """
        if self.needed:
            raise StagingError(f"{len(self.needed)} chunks are missing")
        with self._disk_errors():
            self._finish_files()
            if is_durable:  # before any older file is replaced
                _sync_file_system(self._directory)
            placement = self._move()
            shutil.rmtree(self._directory, ignore_errors=True)
            if is_durable:
                _sync_file_system(placement.path.parent)
        return placement

    def close(self) -> None:
        """Close the open file; the draft stays for a later try. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._file_path = -1, None

    # --- the draft ------------------------------------------------------------------------------------------

    def _disk_errors(self) -> AbstractContextManager[None]:
        return _disk_errors(self._root, self._seen_as, self._shown(self._root / self._beneath))

    def _shown(self, path: Path) -> str:
        return str(path).replace(str(self._root), self._seen_as, 1)

    def _make_directory(self) -> None:
        marker = self._directory / "id"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = self._directory.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                there = self._shown(self._directory)
                raise StagingError(f"{there} is in the way", f"remove {there}")
            with contextlib.suppress(FileNotFoundError):
                if marker.read_bytes() == self.manifest.id:
                    return
            shutil.rmtree(self._directory)
        self._directory.mkdir(mode=0o700)
        marker.write_bytes(self.manifest.id)

    def _index_chunks(self) -> None:
        self._entry_of, self._offset_of, self._twins = [], array("Q"), {}
        first_of: dict[bytes, int] = {}
        for index, entry, offset, _length in self.manifest.places():
            self._entry_of.append(entry)
            self._offset_of.append(offset)
            first = first_of.setdefault(self.manifest.chunk_record(index), index)
            if first != index:
                self._twins.setdefault(first, []).append(index)
        self.needed = set(first_of.values())

    def _find_present(self) -> None:
        """Take from `needed` what is there. A chunk of which only some places are filled is fetched again."""
        absent: set[str] = set()
        for index in sorted(self.needed):
            if all(self._is_present(place, absent) for place in (index, *self._twins.get(index, ()))):
                self.needed.discard(index)

    def _is_present(self, index: int, absent: set[str]) -> bool:
        path = self._entry_of[index].path
        if path in absent:
            return False
        if path != self._file_path and not self._tree_path(path).is_file():
            absent.add(path)
            return False
        chunk_hash, length = self.manifest.chunk(index)
        self._open_file(path)
        data = os.pread(self._file, length, self._offset_of[index])
        return len(data) == length and blake3(data).digest() == chunk_hash

    def _write(self, index: int, data: bytes) -> None:
        self._open_file(self._entry_of[index].path)
        view, offset = memoryview(data), self._offset_of[index]
        while view:
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written

    def _open_file(self, path: str) -> None:
        if path != self._file_path:
            self.close()
            name = self._tree_path(path)
            try:
                self._file = os.open(name, _OPEN_DRAFT_FILE | os.O_CREAT, 0o600)
            except PermissionError:  # an earlier try had come to the point of setting modes
                name.chmod(0o600)
                self._file = os.open(name, _OPEN_DRAFT_FILE, 0o600)
            self._file_path = path

    def _tree_path(self, path: str) -> Path:
        """Return a path in the draft. No link is in there before `_finish_files`, and only we can write there."""
        return self._directory / "tree" / path if path else self._directory / "tree"

    def _finish_files(self) -> None:
        self.close()
        for entry in self.manifest.entries:
            path = self._tree_path(entry.path)
            if entry.kind is EntryKind.FILE:
                self._finish_file(entry)
            elif entry.kind is EntryKind.SYMLINK:
                path.unlink(missing_ok=True)
                path.symlink_to(entry.target)
            if self._owner is not None:
                os.chown(path, self._owner, self._owner, follow_symlinks=False)
        self.close()

    def _finish_file(self, entry: Entry) -> None:
        self._open_file(entry.path)
        os.ftruncate(self._file, entry.size)
        os.fchmod(self._file, entry.mode)

    # --- the place ------------------------------------------------------------------------------------------

    def _move(self) -> Placement:
        parent_path, _, name = self._beneath.rpartition("/")
        parent = open_directory(self._root, parent_path, self._owner)
        try:
            if not name:  # the root itself is the place
                if self.manifest.root.kind is EntryKind.FILE:
                    raise StagingError(f"{self._seen_as} is a directory: a file can't take its place")
                return self._merge_or_beside(os.dup(parent), None, "")
            if not _exists(name, parent):
                self._rename_whole(parent, name)
                return Placement(self._root / self._beneath)
            if self.manifest.root.kind is EntryKind.FILE:
                mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    return self._put_beside(parent, name, f"{name} is a directory there")
                if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
                    return self._put_beside(parent, name, f"{name} is not a file there")
                self._tree_path("").rename(f"/proc/self/fd/{parent}/{name}")
                return Placement(self._root / self._beneath)
            try:
                place = os.open(name, _OPEN_DIRECTORY, dir_fd=parent)
            except OSError:
                return self._put_beside(parent, name, f"{name} is not a directory there")
            return self._merge_or_beside(place, parent, name)
        finally:
            os.close(parent)

    def _rename_whole(self, parent: int, name: str) -> None:
        os.rename(self._tree_path(""), name, dst_dir_fd=parent)
        # Only now: moving a directory that is not writable is refused.
        if self.manifest.root.kind is EntryKind.DIRECTORY:
            place = os.open(name, _OPEN_DIRECTORY, dir_fd=parent)
            try:
                self._set_directory_modes(place, {entry.path for entry in self.manifest.entries})
            finally:
                os.close(place)

    def _put_beside(self, parent: int, name: str, in_the_way: str) -> Placement:
        names = (f"{name}.gpunode-{number}" for number in range(1, _BESIDE_MAX))
        free = next((beside for beside in names if not _exists(beside, parent)), None)
        if free is None:
            raise StagingError(f"{in_the_way}, and there is no free name beside it")
        self._rename_whole(parent, free)
        return Placement((self._root / self._beneath).with_name(free), in_the_way)

    def _merge_or_beside(self, place: int, parent: int | None, name: str) -> Placement:
        try:
            problem = self._merge_problem(place)
            if problem and parent is not None:
                return self._put_beside(parent, name, problem)
            if problem:
                raise StagingError(problem)
            self._merge(place)
            return Placement(self._root / self._beneath)
        finally:
            os.close(place)

    def _merge_problem(self, place: int) -> str:
        """Return what in the directory `place` is of another kind than the tree has there, or ""."""
        absent: set[str] = set()
        for entry in self.manifest.entries[1:]:
            above, _, name = entry.path.rpartition("/")
            if above in absent:
                absent.add(entry.path)
                continue
            with _walked(place, above) as directory:
                try:
                    mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
                except FileNotFoundError:
                    absent.add(entry.path)
                    continue
            if stat.S_ISDIR(mode) != (entry.kind is EntryKind.DIRECTORY):
                kind = "a directory" if stat.S_ISDIR(mode) else "not a directory"
                return f"{entry.path} is {kind} there"
        return ""

    def _merge(self, place: int) -> None:
        made: set[str] = set()
        for entry in self.manifest.entries[1:]:
            above, _, name = entry.path.rpartition("/")
            with _walked(place, above) as directory:
                if entry.kind is not EntryKind.DIRECTORY:
                    os.rename(self._tree_path(entry.path), name, dst_dir_fd=directory)
                    continue
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=directory)
                    made.add(entry.path)
                    if self._owner is not None:
                        os.chown(name, self._owner, self._owner, dir_fd=directory, follow_symlinks=False)
        self._set_directory_modes(place, made)

    def _set_directory_modes(self, place: int, paths: set[str]) -> None:
        """Give the new directories among `paths` their modes, deepest first."""
        for entry in reversed(self.manifest.entries):
            if entry.kind is EntryKind.DIRECTORY and entry.path in paths:
                with _walked(place, entry.path) as directory:
                    os.fchmod(directory, entry.mode)


def discard_draft(root: Path, beneath: str, name: str) -> None:
    """Remove what `DraftTree` of the same arguments has left, if anything."""
    for directory in (root, root / beneath):
        shutil.rmtree(directory / _draft_name(name), ignore_errors=True)


def _draft_name(name: str) -> str:
    return f".gpunode-{name}.partial"


def make_directory(root: Path, path: str, *, owner: int, seen_as: str = "") -> None:
    """Make the directory `path` below `root`, for `owner`, with what is missing above it; follow no link.

    Errors call `root` as `DraftTree` does. Raises StagingError, DiskFull.
    """
    with _disk_errors(root, seen_as or str(root), f"{seen_as or root}/{path}"):
        os.close(open_directory(root, path, owner if os.geteuid() == 0 else None))


def open_directory(root: Path, path: str, owner: int | None) -> int:
    """Open the directory `path` below `root`, making what is missing, and following no link. Raises OSError."""
    current = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in [name for name in path.split("/") if name not in ("", ".")]:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, PARENT_MODE, dir_fd=current)
            if owner is not None:
                os.chown(name, owner, owner, dir_fd=current, follow_symlinks=False)
        try:
            following = os.open(name, _OPEN_DIRECTORY, dir_fd=current)
        finally:
            os.close(current)
        current = following
    return current


@contextlib.contextmanager
def _walked(start: int, path: str) -> Iterator[int]:
    """Open the directory `path` below the directory `start`, following no link."""
    current = os.dup(start)
    try:
        for name in path.split("/") if path else ():
            following = os.open(name, _OPEN_DIRECTORY, dir_fd=current)
            os.close(current)
            current = following
        yield current
    finally:
        os.close(current)


def _exists(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _disk_errors(root: Path, seen_as: str, place: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"the disk of {place} is full") from None
        name = error.filename.replace(str(root), seen_as, 1) if isinstance(error.filename, str) else place
        raise StagingError(f"cannot write {name}: {error.strerror}") from None


def _sync_file_system(directory: Path) -> None:
    """Bring everything of `directory`'s file system to the disk: one syncfs(2) for thousands of files."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(descriptor)
