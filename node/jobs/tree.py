"""Reading a tree of files into a manifest, and its chunks back out.

Content is cut by FastCDC (Xia et al., USENIX ATC 2016), so that an insertion changes only the chunks around
it. Everything is opened relative to a directory descriptor and without following links, so that a tree which
changes under us, or was made by a job to trick us, can't lead elsewhere. This part is synchronous and loads no
async library: the command line scans inputs as the calling user, where it can read what that user can.

Refuses to follow symlinks out of the tree, to read devices, sockets and fifos, and to guess at file names that
are not UTF-8: each is a StagingError that names the path, or is skipped and listed when `is_lenient`.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from blake3 import blake3
from pyfastcdc import FastCDC

from node.errors import StagingError
from node.jobs.ignore import IgnoreRules
from protocol.errors import BadManifest
from protocol.manifest import (
    CHUNK_RECORD,
    CHUNK_SIZE_MAX,
    CHUNKS_MAX,
    DEPTH_MAX,
    ENTRIES_MAX,
    Entry,
    EntryDraft,
    EntryKind,
    Manifest,
    build,
    symlink_problem,
)

CHUNK_AVERAGE = 256 * 1024
LARGE_FILE = 256 * 1024 * 1024
LARGE_CHUNK_AVERAGE = 1024 * 1024
"""Files from `LARGE_FILE` bytes on are cut into larger chunks, or their manifest would grow large itself."""
READS_MAX = 3
"""How often a file that changes while it is read is read again before that is an error."""
SKIPPED_MAX = 100

_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

ScanProgress = Callable[[int], None]
"""(bytes read so far)."""


class ScannedTree(msgspec.Struct, frozen=True):
    """A tree on disk and its manifest."""

    root: Path
    """An absolute path without links; or, with `beneath`, the directory that holds the tree."""
    beneath: str
    """Path of the tree below `root`, walked without following links; "" for `root` itself."""
    seen_as: str
    """How errors call the tree: as whoever they are told to knows it."""
    manifest: Manifest
    skipped: tuple[str, ...] = ()
    """What a lenient scan left out and why, one sentence each."""


def scan_tree(
    path: Path,
    *,
    ignore: tuple[str, ...] = (),
    size_max: int = CHUNKS_MAX * CHUNK_SIZE_MAX,
    progress: ScanProgress | None = None,
) -> ScannedTree:
    """Read the tree (or the file) at `path`, for an input. Links in `path` itself are followed.

    Raises StagingError naming what could not be read and why. Blocks on the disk, about a second a GB.
    """
    try:
        root = path.resolve(strict=True)
    except OSError as error:
        raise StagingError(f"cannot read {path}: {error.strerror}") from None
    scan = _Scan(IgnoreRules(ignore), str(root), size_max, is_lenient=False, progress=progress)
    manifest = scan.run(root, "")
    return ScannedTree(root, "", str(root), manifest)


def scan_beneath(root: Path, beneath: str, *, seen_as: str, size_max: int) -> ScannedTree | None:
    """Read the tree at `beneath` below `root`, for an output; None when there is nothing at that place.

    Nothing there is trusted: no link is followed, and what can't be sent (devices, sockets, links that leave
    the tree, names that are not UTF-8, unreadable files) is skipped and listed. `seen_as` is the path under
    which the job saw `root`, so that its absolute links keep their meaning. Raises StagingError when the tree
    is larger than `size_max` bytes, or changes all the time.
    """
    names = [name for name in beneath.split("/") if name not in ("", ".")]
    beneath = "/".join(names)
    top = f"{seen_as}/{beneath}".rstrip("/")
    scan = _Scan(IgnoreRules(()), top, size_max, is_lenient=True, progress=None)
    try:
        manifest = scan.run(root, beneath)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return ScannedTree(root, beneath, top, manifest, tuple(scan.skipped))


class TreeReader:
    """Reads chunks of a scanned tree. Keeps one file open. Used by one thread at a time."""

    def __init__(self, tree: ScannedTree) -> None:
        self._tree = tree
        self._open_path: str | None = None
        self._descriptor = -1

    def read_chunk(self, entry: Entry, offset: int, index: int) -> bytes:
        """Return chunk `index`, which begins at `offset` of `entry`.

        Raises StagingError when the file is gone or no longer what was scanned.
        """
        chunk_hash, length = self._tree.manifest.chunk(index)
        try:
            if entry.path != self._open_path:
                self.close()
                self._descriptor = _open_beneath(self._tree.root, self._tree.beneath, entry.path)
                self._open_path = entry.path
            data = os.pread(self._descriptor, length, offset)
        except OSError as error:
            raise StagingError(f"cannot read {self._name(entry)}: {error.strerror}") from None
        if len(data) != length or blake3(data).digest() != chunk_hash:
            raise StagingError(
                f"{self._name(entry)} changed after it was scanned", "run again when nothing writes to it"
            )
        return data

    def close(self) -> None:
        """Close the open file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._open_path = -1, None

    def _name(self, entry: Entry) -> str:
        return _printable(Path(self._tree.seen_as) / entry.path)


class _Unusable(Exception):
    """Why an entry can't be sent."""


class _Scan:
    """One walk over one tree."""

    def __init__(
        self,
        ignore: IgnoreRules,
        seen_as: str,
        size_max: int,
        *,
        is_lenient: bool,
        progress: ScanProgress | None,
    ) -> None:
        self._ignore = ignore
        self._top = seen_as
        self._size_max = size_max
        self._is_lenient = is_lenient
        self._progress = progress
        self._size = 0
        self._drafts: list[EntryDraft] = []
        self._cutters = {
            average: FastCDC(average, min_size=average // 4, max_size=average * 4)
            for average in (CHUNK_AVERAGE, LARGE_CHUNK_AVERAGE)
        }
        self.skipped: list[str] = []

    def run(self, root: Path, beneath: str) -> Manifest:
        """Walk, and return the manifest. Raises StagingError; FileNotFoundError for an absent `beneath`."""
        try:
            descriptor = _open_beneath(root, beneath, "")
        except (FileNotFoundError, NotADirectoryError):
            if beneath:
                raise
            raise StagingError(f"there is no {root}") from None
        except OSError as error:
            raise StagingError(f"cannot read {self._top}: {error.strerror}") from None
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                self._drafts.append(EntryDraft("", EntryKind.DIRECTORY, mode & 0o777))
                self._walk(descriptor, "", 1)
            elif stat.S_ISREG(mode):
                self._drafts.append(self._read_file(descriptor, ""))
            else:
                raise StagingError(f"{self._top} is {_kind_name(mode)}", "only files and directories can be sent")
        except OSError as error:  # of the top itself, a disk that fails, say: below it each entry is judged
            raise StagingError(f"cannot read {self._top}: {error.strerror}") from None
        finally:
            os.close(descriptor)
        try:
            return build(self._drafts)
        except BadManifest as error:
            raise StagingError(f"{self._top} cannot be sent: {error}") from None

    def _walk(self, directory: int, prefix: str, depth: int) -> None:
        with os.scandir(directory) as listing:
            names = sorted(item.name for item in listing)
        for name in names:
            path = prefix + name
            try:
                self._visit(directory, name, path, depth)
            except _Unusable as reason:
                self._refuse(path, str(reason))
            except FileNotFoundError:
                continue  # deleted since the directory was listed
            except OSError as error:
                self._refuse(path, f"cannot be read: {error.strerror}")

    def _visit(self, directory: int, name: str, path: str, depth: int) -> None:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise _Unusable("has a name that is not UTF-8") from None
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if self._ignore.is_ignored(path, is_directory=stat.S_ISDIR(mode)):
            return
        if len(self._drafts) >= ENTRIES_MAX:
            raise StagingError(f"{self._top} has more than {ENTRIES_MAX} files", "send an archive instead")
        if stat.S_ISLNK(mode):
            target = self._inner_target(path, os.readlink(name, dir_fd=directory))
            self._drafts.append(EntryDraft(path, EntryKind.SYMLINK, 0, target))
        elif stat.S_ISDIR(mode):
            if depth >= DEPTH_MAX:
                raise _Unusable(f"lies deeper than {DEPTH_MAX} directories")
            with _opened(name, _OPEN_DIRECTORY, directory) as descriptor:
                self._drafts.append(EntryDraft(path, EntryKind.DIRECTORY, mode & 0o777))
                self._walk(descriptor, f"{path}/", depth + 1)
        elif stat.S_ISREG(mode):
            with _opened(name, _OPEN_FILE, directory) as descriptor:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise _Unusable("changed its kind while it was read")
                self._drafts.append(self._read_file(descriptor, path))
        else:
            raise _Unusable(f"is {_kind_name(mode)}")

    def _read_file(self, descriptor: int, path: str) -> EntryDraft:
        size_before = self._size
        for _attempt in range(READS_MAX):
            before = os.fstat(descriptor)
            self._size = size_before
            chunks = self._cut(descriptor, before.st_size)
            after = os.fstat(descriptor)
            if (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
                return EntryDraft(path, EntryKind.FILE, after.st_mode & 0o777, chunks=chunks)
        raise StagingError(
            f"{self._top}/{path} changes while it is read".replace("/ ", " "),
            "run again when nothing writes to it",
        )

    def _cut(self, descriptor: int, size: int) -> bytes:
        os.lseek(descriptor, 0, os.SEEK_SET)
        cutter = self._cutters[LARGE_CHUNK_AVERAGE if size >= LARGE_FILE else CHUNK_AVERAGE]
        records = []
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            for chunk in cutter.cut_stream(file):
                records.append(CHUNK_RECORD.pack(blake3(chunk.data).digest(), chunk.length))
                self._size += chunk.length
                if self._size > self._size_max:
                    raise StagingError(f"{self._top} holds more than {self._size_max} bytes")
                if self._progress:
                    self._progress(self._size)
        return b"".join(records)

    def _inner_target(self, path: str, target: str) -> str:
        """Return `target` as the manifest may have it: relative, and inside the tree."""
        try:
            target.encode()
        except UnicodeEncodeError:
            raise _Unusable("is a symlink to a name that is not UTF-8") from None
        if target == self._top or target.startswith(f"{self._top}/"):
            ups = "../" * path.count("/")
            target = ups + target[len(self._top) + 1 :] or "."
        problem = symlink_problem(path, target)
        if problem:
            raise _Unusable(f"is a symlink that {problem}")
        return target

    def _refuse(self, path: str, reason: str) -> None:
        if not self._is_lenient:
            hint = "leave it out (.gpunodeignore), or put a copy in its place"
            raise StagingError(f"{_printable(Path(self._top) / path)} {reason}", hint)
        if len(self.skipped) < SKIPPED_MAX:
            self.skipped.append(f"{_printable(path)} {reason}")


@contextlib.contextmanager
def _opened(name: str, flags: int, directory: int) -> Iterator[int]:
    descriptor = os.open(name, flags, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_beneath(root: Path, beneath: str, path: str) -> int:
    """Open root/beneath/path for reading, following no link below `root`."""
    names = [name for name in (*beneath.split("/"), *path.split("/")) if name]
    current = os.open(root, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for number, name in enumerate(names, 1):
            flags = _OPEN_FILE if number == len(names) else _OPEN_DIRECTORY
            following = os.open(name, flags, dir_fd=current)
            os.close(current)
            current = following
    except BaseException:
        os.close(current)
        raise
    return current


def _printable(path: Path | str) -> str:
    """Return `path` so that a terminal can print it, whatever bytes it has."""
    text = os.fsencode(path).decode(errors="backslashreplace")
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _kind_name(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a fifo"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device"
