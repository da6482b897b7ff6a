"""The manifest: a tree of files by content, as one block of bytes that has exactly one form.

    "GPM1" | u32 entries | u32 chunks
    entries, parents first, ascending by path components:
        u8 kind | u16 mode | u16 length, path        file: | u32 chunks        symlink: | u16 length, target
    chunks, in the order of the files:
        BLAKE3 hash (32 bytes) | u32 length

All integers are big-endian. The first entry is the root, with an empty path: a directory, or the only file.
Paths are UTF-8, separated by "/", and keep their case. A symlink's target is relative and stays in the tree:
".." may only stand at its start, and no more often than the link is deep (a ".." further on could step out of
a directory that is itself reached through a link). Nothing lies below a file or a symlink. Only the mode bits
0o777 exist: no set-uid, no owners, no times. A manifest's id is the BLAKE3 hash of its bytes.

Refuses to read files and to know where chunks are stored.
"""

import enum
import struct
from collections.abc import Iterable, Iterator

import msgspec

from protocol.errors import BadManifest
from protocol.identity import HASH_SIZE, hash_bytes

MAGIC = b"GPM1"
MANIFEST_SIZE_MAX = 64 * 1024 * 1024
ENTRIES_MAX = 200_000
CHUNKS_MAX = 500_000
CHUNK_SIZE_MAX = 4 * 1024 * 1024
"""Largest chunk, in bytes; so no manifest is of more than 2 TB."""
PATH_SIZE_MAX = 4095
"""Longest path or symlink target, in bytes: PATH_MAX of Linux, without the NUL."""
NAME_SIZE_MAX = 255
DEPTH_MAX = 64
MODE_MAX = 0o777

_HEAD = struct.Struct(">4sII")
_ENTRY = struct.Struct(">BHH")
_COUNT = struct.Struct(">I")
_LENGTH = struct.Struct(">H")
CHUNK_RECORD = struct.Struct(f">{HASH_SIZE}sI")


class EntryKind(enum.IntEnum):
    """What an entry is."""

    DIRECTORY = 0
    FILE = 1
    SYMLINK = 2


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One file, directory or symlink of the tree."""

    path: str
    """Below the root; "" for the root itself."""
    kind: EntryKind
    mode: int
    target: str = ""
    """Of a symlink."""
    first_chunk: int = 0
    chunk_count: int = 0
    """Of a file: its content is these chunks, one after the other."""
    size: int = 0
    """Bytes of content."""


class EntryDraft(msgspec.Struct, frozen=True, gc=False):
    """What `build` makes an entry of."""

    path: str
    kind: EntryKind
    mode: int
    target: str = ""
    chunks: bytes = b""
    """`CHUNK_RECORD`s of a file."""


class Manifest:
    """A checked manifest. Immutable; made by `parse_untrusted` and `build` only."""

    __slots__ = ("_chunks", "data", "entries", "id", "size")

    def __init__(self, data: bytes, entries: tuple[Entry, ...], chunks: memoryview) -> None:
        self.data = data
        self.id = hash_bytes(data)
        self.entries = entries
        self.size = sum(entry.size for entry in entries)
        self._chunks = chunks

    @property
    def root(self) -> Entry:
        """The tree's root: a directory, or the only file."""
        return self.entries[0]

    @property
    def chunk_count(self) -> int:
        """Number of chunks, repeated ones included."""
        return len(self._chunks) // CHUNK_RECORD.size

    def chunk(self, index: int) -> tuple[bytes, int]:
        """Return the hash and the length of chunk `index`."""
        chunk_hash, length = CHUNK_RECORD.unpack_from(self._chunks, index * CHUNK_RECORD.size)
        return chunk_hash, length

    def chunk_record(self, index: int) -> bytes:
        """Return the 36 bytes that stand for chunk `index`: equal bytes are equal chunks."""
        return bytes(self._chunks[index * CHUNK_RECORD.size : (index + 1) * CHUNK_RECORD.size])

    def places(self) -> Iterator[tuple[int, Entry, int, int]]:
        """Yield (chunk, its file, offset in the file, length) for every chunk, in order."""
        for entry in self.entries:
            offset = 0
            for index in range(entry.first_chunk, entry.first_chunk + entry.chunk_count):
                length = self.chunk(index)[1]
                yield index, entry, offset, length
                offset += length


def build(drafts: Iterable[EntryDraft]) -> Manifest:
    """Return the manifest of `drafts`, in any order. Raises BadManifest when they make no valid tree."""
    ordered = sorted(drafts, key=lambda draft: _sort_key(draft.path))
    parts: list[bytes] = []
    chunks: list[bytes] = []
    for draft in ordered:
        path = draft.path.encode()
        if len(path) > PATH_SIZE_MAX:
            raise BadManifest(f"the path {draft.path[:80]!r}... is longer than {PATH_SIZE_MAX} bytes")
        parts.append(_ENTRY.pack(draft.kind, draft.mode, len(path)) + path)
        if draft.kind is EntryKind.FILE:
            parts.append(_COUNT.pack(len(draft.chunks) // CHUNK_RECORD.size))
            chunks.append(draft.chunks)
        elif draft.kind is EntryKind.SYMLINK:
            target = draft.target.encode()
            if len(target) > PATH_SIZE_MAX:
                raise BadManifest(f"the target of {draft.path!r} is longer than {PATH_SIZE_MAX} bytes")
            parts.append(_LENGTH.pack(len(target)) + target)
    chunk_data = b"".join(chunks)
    head = _HEAD.pack(MAGIC, len(ordered), len(chunk_data) // CHUNK_RECORD.size)
    return parse_untrusted(b"".join((head, *parts, chunk_data)))


def parse_untrusted(data: bytes) -> Manifest:
    """Return the manifest that `data` is. Raises BadManifest, and nothing else.

    Takes up to a second for the largest ones: call it in a thread.
    """
    if not _HEAD.size <= len(data) <= MANIFEST_SIZE_MAX:
        raise BadManifest(f"a manifest of {len(data)} bytes")
    magic, entry_count, chunk_count = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise BadManifest("not a manifest")
    if not 1 <= entry_count <= ENTRIES_MAX or chunk_count > CHUNKS_MAX:
        raise BadManifest(f"{entry_count} entries, {chunk_count} chunks")
    chunks_at = len(data) - chunk_count * CHUNK_RECORD.size
    if chunks_at < _HEAD.size:
        raise BadManifest("it is cut off")
    chunks = memoryview(data)[chunks_at:]
    lengths = _chunk_lengths(chunks)
    parser = _EntryParser(data, _HEAD.size, chunks_at, lengths)
    entries = tuple(parser.take() for _ in range(entry_count))
    parser.finish()
    _check_tree(entries)
    return Manifest(data, entries, chunks)


class _EntryParser:
    """Reads entries one after the other; every read is bounded by the block's end."""

    def __init__(self, data: bytes, position: int, end: int, lengths: list[int]) -> None:
        self._data = data
        self._position = position
        self._end = end
        self._lengths = lengths
        self._next_chunk = 0

    def take(self) -> Entry:
        number, mode, path_size = self._unpack(_ENTRY)
        path = self._text(path_size)
        if number == EntryKind.DIRECTORY:
            return Entry(path, EntryKind.DIRECTORY, _checked_mode(mode))
        if number == EntryKind.SYMLINK:
            if mode:
                raise BadManifest(f"the symlink {path!r} has a mode")
            (target_size,) = self._unpack(_LENGTH)
            return Entry(path, EntryKind.SYMLINK, 0, target=self._text(target_size))
        if number != EntryKind.FILE:
            raise BadManifest(f"an entry of kind {number}")
        (count,) = self._unpack(_COUNT)
        first = self._next_chunk
        if count > len(self._lengths) - first:
            raise BadManifest(f"the file {path!r} has more chunks than there are")
        self._next_chunk += count
        size = sum(self._lengths[first : first + count])
        return Entry(path, EntryKind.FILE, _checked_mode(mode), "", first, count, size)

    def finish(self) -> None:
        if self._position != self._end or self._next_chunk != len(self._lengths):
            raise BadManifest("bytes or chunks that belong to no entry")

    def _unpack(self, fields: struct.Struct) -> tuple[int, ...]:
        start, self._position = self._position, self._position + fields.size
        if self._position > self._end:
            raise BadManifest("it is cut off")
        return fields.unpack_from(self._data, start)

    def _text(self, size: int) -> str:
        start, self._position = self._position, self._position + size
        if self._position > self._end or size > PATH_SIZE_MAX:
            raise BadManifest("a path is cut off, or too long")
        try:
            return self._data[start : self._position].decode()
        except UnicodeDecodeError:
            raise BadManifest("a path that is not UTF-8") from None


def _chunk_lengths(chunks: memoryview) -> list[int]:
    lengths = [length for _hash, length in CHUNK_RECORD.iter_unpack(chunks)]
    if lengths and not (min(lengths) >= 1 and max(lengths) <= CHUNK_SIZE_MAX):
        raise BadManifest(f"a chunk that is empty, or larger than {CHUNK_SIZE_MAX} bytes")
    return lengths


def _checked_mode(mode: int) -> int:
    if mode > MODE_MAX:
        raise BadManifest(f"the mode {mode:o}")
    return mode


def _sort_key(path: str) -> bytes:
    """Return a key by which parents come before what lies below them. NUL is in no path, and sorts first."""
    return path.encode().replace(b"/", b"\0")


def _check_tree(entries: tuple[Entry, ...]) -> None:
    """Raise BadManifest unless the entries are one tree in its only order, that nothing in it leaves."""
    if entries[0].path or entries[0].kind is EntryKind.SYMLINK:
        raise BadManifest("the first entry is not the root")
    directories = {""} if entries[0].kind is EntryKind.DIRECTORY else set()
    previous = b""
    for entry in entries[1:]:
        names = entry.path.split("/")
        _check_names(entry.path, names)
        key = _sort_key(entry.path)
        if key <= previous:
            raise BadManifest(f"{entry.path!r} is out of order, or there twice")
        previous = key
        if entry.path.rpartition("/")[0] not in directories:
            raise BadManifest(f"{entry.path!r} lies below something that is not a directory")
        if entry.kind is EntryKind.DIRECTORY:
            directories.add(entry.path)
        elif entry.kind is EntryKind.SYMLINK:
            problem = symlink_problem(entry.path, entry.target)
            if problem:
                raise BadManifest(f"the symlink {entry.path!r} {problem}")


def _check_names(path: str, names: list[str]) -> None:
    if len(names) > DEPTH_MAX:
        raise BadManifest(f"{path[:80]!r}... is deeper than {DEPTH_MAX}")
    for name in names:
        if name in ("", ".", "..") or "\0" in name or len(name.encode()) > NAME_SIZE_MAX:
            raise BadManifest(f"the path {path[:200]!r} is absolute, empty, too long, or leaves the tree")


def symlink_problem(path: str, target: str) -> str:
    """Return why a symlink at `path` may not point to `target`, or "" when it may."""
    if not target or "\0" in target or len(target.encode()) > PATH_SIZE_MAX:
        return "points nowhere"
    if target.startswith("/"):
        return f"points to an absolute path, {target!r}"
    names = [name for name in target.split("/") if name not in ("", ".")]
    ups = 0
    while ups < len(names) and names[ups] == "..":
        ups += 1
    if ".." in names[ups:]:
        return f"has '..' inside its target, {target!r}"
    if ups > path.count("/"):
        return f"points out of the tree, to {target!r}"
    return ""
