"""A job's output, bounded: head and tail are kept, what lies between is dropped and said.

    NAME.head   the first bytes, up to `HEAD_MAX`
    NAME.tail   a ring of the last bytes: offset o lies at (o mod tail's length)
    NAME.meta   where each ends

Offsets count every byte that was ever written, so that a reader (or the renter's copy, after a cut) goes on
where it was, and sees by how much an offset jumps over what was dropped. Data is written before the meta that
tells of it, and a part of the ring is given up before it is overwritten: a reader in another process, or the
next keeper after a kill, never takes old bytes for new ones.

The job writes into a pipe that the keeper reads, not into a file: a file can't be bounded without losing its
tail, a pipe holds the job back while the disk is slow. That the pipe breaks when the keeper dies costs nothing:
the job dies with its keeper anyway.

Refuses to interpret bytes: a log may be any bytes at all, and printing them safely is the reader's matter.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import msgspec

from node.errors import JobError

HEAD_MAX = 4 * 1024 * 1024
TAIL_MAX = 4 * 1024 * 1024
PIPE_SIZE = 1024 * 1024
OFFSET_MAX = 2**62
_META = struct.Struct(">4sQQQQQ")
_MAGIC = b"GPL1"
_READS_MAX = 8
_PIECES_MAX = 64
"""Pieces taken from a pipe before those who wait for output hear of it."""
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LogError(JobError):
    """The log could not be read."""

    code: ClassVar[int] = 2323


class _Meta(msgspec.Struct, frozen=True):
    """Where a log's parts end. Offsets."""

    head_max: int
    tail_max: int
    size: int = 0
    """All bytes ever written."""
    head_size: int = 0
    tail_from: int = 0
    """The tail holds [tail_from, size)."""

    def pack(self) -> bytes:
        return _META.pack(_MAGIC, self.head_max, self.tail_max, self.size, self.head_size, self.tail_from)


class LogPiece(msgspec.Struct, frozen=True):
    """Some of a log."""

    offset: int
    """Where `data` begins; above the offset asked for when bytes between were dropped."""
    data: bytes
    """Empty at the end of what was written so far."""
    size: int
    """The log's size so far, dropped bytes included."""


class LogWriter:
    """The only writer of one log. Goes on where an earlier one ended. Blocks on the disk; one thread at a time."""

    def __init__(self, directory: Path, name: str, *, head_max: int = HEAD_MAX, tail_max: int = TAIL_MAX) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | _OPEN
        self._files = [os.open(directory / f"{name}.{part}", flags, 0o600) for part in ("head", "tail", "meta")]
        self._meta: _Meta = _read_meta(self._files[2]) or _Meta(head_max, tail_max)

    @property
    def size(self) -> int:
        """Bytes written so far, dropped ones included."""
        return self._meta.size

    def append(self, data: bytes) -> None:
        """Write `data` at the end. Raises OSError."""
        meta = self._meta
        view = memoryview(data)
        if meta.size == meta.head_size < meta.head_max:
            part = view[: meta.head_max - meta.size]
            _write_at(self._files[0], part, meta.size)
            end = meta.size + len(part)
            self._commit(msgspec.structs.replace(meta, size=end, head_size=end, tail_from=end))
            view = view[len(part) :]
        if view:
            self._append_to_tail(view)

    def skip_to(self, offset: int) -> None:
        """Leave out the bytes up to `offset`, which were dropped elsewhere. No-op for one not ahead."""
        meta = self._meta
        if meta.size < offset <= OFFSET_MAX:
            self._commit(msgspec.structs.replace(meta, size=offset, tail_from=offset))

    def close(self) -> None:
        """Close the files. Idempotent."""
        files, self._files = self._files, []
        for descriptor in files:
            os.close(descriptor)

    def _append_to_tail(self, view: memoryview) -> None:
        meta = self._meta
        end = meta.size + len(view)
        view = view[-meta.tail_max :]
        tail_from = max(meta.tail_from, end - meta.tail_max)
        self._commit(msgspec.structs.replace(meta, tail_from=min(tail_from, meta.size)))
        position = end - len(view)
        while view:
            at = position % meta.tail_max
            part = view[: meta.tail_max - at]
            _write_at(self._files[1], part, at)
            position, view = position + len(part), view[len(part) :]
        self._commit(msgspec.structs.replace(meta, size=end, tail_from=tail_from))

    def _commit(self, meta: _Meta) -> None:
        if meta != self._meta:
            _write_at(self._files[2], memoryview(meta.pack()), 0)
            self._meta = meta


class LogReader:
    """Reads a log while, or after, another process writes it. Follows no links."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name

    def read(self, offset: int, size_max: int = 256 * 1024) -> LogPiece:
        """Return at most `size_max` bytes from `offset` on, or from the first kept byte after it.

        An absent log reads as an empty one. Raises LogError when it is damaged.
        """
        with contextlib.ExitStack() as stack:
            try:
                files = [self._open(part, stack) for part in ("head", "tail", "meta")]
            except FileNotFoundError:
                return LogPiece(0, b"", 0)
            except OSError as error:
                raise LogError(f"cannot read {self._directory / self._name}: {error.strerror}") from None
            size = 0
            for _attempt in range(_READS_MAX):
                meta = _read_meta(files[2])
                if meta is None:
                    return LogPiece(0, b"", 0)
                size = meta.size
                piece = _read_piece(files, meta, offset, size_max)
                after = _read_meta(files[2])
                # The writer may have overwritten that part of the ring in the meantime.
                if piece.offset < meta.head_size or (after and after.tail_from <= piece.offset):
                    return piece
        # A writer this fast has overtaken every try: what it dropped meanwhile is dropped for this reader.
        return LogPiece(size, b"", size)

    def size(self) -> int:
        """Return how many bytes were written so far, dropped ones included."""
        return self.read(OFFSET_MAX, 0).size

    def _open(self, part: str, stack: contextlib.ExitStack) -> int:
        flags = os.O_RDONLY | _OPEN
        directory = os.open(self._directory, flags | os.O_DIRECTORY)
        stack.callback(os.close, directory)
        descriptor = os.open(f"{self._name}.{part}", flags, dir_fd=directory)
        stack.callback(os.close, descriptor)
        return descriptor


def open_pipe() -> tuple[int, int]:
    """Return (read end, write end) of a pipe for a job's output, large enough to be read in large pieces."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # beyond the user's quota for pipes: a small one does too
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    return read_end, write_end


async def pump(read_end: int, log: LogWriter, on_data: Callable[[], None]) -> None:
    """Write what comes out of the pipe to `log` until its end, calling `on_data` after each piece.

    Takes the descriptor over. A disk that fails ends the log, never the job: the rest is read and dropped.
    """
    import trio  # noqa: PLC0415 - readers of logs need no event loop

    os.set_blocking(read_end, False)
    try:
        is_over = False
        while not is_over:
            await trio.lowlevel.wait_readable(read_end)
            is_over = await trio.to_thread.run_sync(_drain, read_end, log)
            on_data()
    finally:
        trio.lowlevel.notify_closing(read_end)
        os.close(read_end)


def _drain(read_end: int, log: LogWriter) -> bool:
    """Write what the pipe holds now to `log`; return whether the pipe has ended."""
    for _piece in range(_PIECES_MAX):
        try:
            data = os.read(read_end, PIPE_SIZE)
        except BlockingIOError:
            return False
        if not data:
            return True
        with contextlib.suppress(OSError):
            log.append(data)
    return False


def _read_piece(files: list[int], meta: _Meta, offset: int, size_max: int) -> LogPiece:
    if offset < meta.head_size:
        data = os.pread(files[0], min(size_max, meta.head_size - offset), offset)
        return LogPiece(offset, data, meta.size)
    offset = min(max(offset, meta.tail_from), meta.size)
    at = offset % meta.tail_max
    wanted = min(size_max, meta.size - offset, meta.tail_max - at)
    return LogPiece(offset, os.pread(files[1], wanted, at), meta.size)


def _read_meta(descriptor: int) -> _Meta | None:
    data = os.pread(descriptor, _META.size, 0)
    if len(data) < _META.size:
        return None
    magic, *fields = _META.unpack(data)
    meta = _Meta(*fields)
    is_sound = (
        magic == _MAGIC
        and meta.tail_max > 0
        and meta.head_size <= meta.head_max
        and meta.head_size <= meta.tail_from <= meta.size <= OFFSET_MAX
        and meta.size - meta.tail_from <= meta.tail_max
    )
    if not is_sound:
        raise LogError("the log's meta file is damaged")
    return meta


def _write_at(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
