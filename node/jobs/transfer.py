"""Moving a tree over one stream of a tunnel, in either direction.

    sender    OFFER   u32 size, manifest
    receiver  NEED    a bit for each chunk, most significant first: 1 for those it lacks (of equal ones the first)
    sender    RECORD  u32 chunk | u32 size | u8 flags | payload      for each of them; flag 1: zstd
    receiver  DONE    the manifest's id: every chunk was verified, and the tree is in its place
    either    REFUSED u16 size, "code: reason" in UTF-8

Each message begins with its number, a u8; integers are big-endian. To resume after a cut is to offer again: the
receiver keeps what it has verified. A chunk is compressed when a probe of its first 4 KiB says that it pays.

Files are read, hashed, compressed and written in threads, a batch at a time, so that the event loop stays
free. Refuses to open streams and to decide when to try again.
"""

import contextlib
import enum
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import ClassVar

import msgspec
import trio
import zstandard

from node.errors import DiskFull, JobError, NodeError
from node.jobs.draft import DraftTree, Placement
from node.jobs.reader import ExactReader, StreamCut
from node.jobs.tree import ScannedTree, TreeReader
from node.ports import Progress
from protocol.errors import BadManifest
from protocol.identity import HASH_SIZE
from protocol.manifest import MANIFEST_SIZE_MAX, Manifest, parse_untrusted

BATCH_SIZE = 1024 * 1024
"""Bytes of content that go through a thread at a time, at least."""
BATCH_CHUNKS_MAX = 256
BATCHES_AHEAD = 2
PROBE_SIZE = 4096
PROBE_PAYS = 3400
"""The probe says that compression pays when it makes fewer bytes than this of its 4 KiB."""
REASON_SIZE_MAX = 512
REFUSAL_TIMEOUT_S = 5
_REFUSED_DISK_FULL = "disk_full"
_COMPRESSED = 1
_SIZE = struct.Struct(">I")
_RECORD = struct.Struct(">IIB")
_REASON = struct.Struct(">H")


class TransferRefused(JobError):
    """The other side refuses the transfer."""

    code: ClassVar[int] = 2322


class _Message(enum.IntEnum):
    OFFER = 1
    NEED = 2
    RECORD = 3
    DONE = 4
    REFUSED = 5


async def send_tree(
    stream: trio.abc.SendStream, reader: ExactReader, tree: ScannedTree, progress: Progress | None = None
) -> None:
    """Send `tree`, and return once the receiver has all of it in its place.

    Raises StreamCut (offer it again), DiskFull or TransferRefused (the receiver said so), StagingError (a file
    here changed; the receiver was told), BadManifest (the receiver broke the protocol).
    """
    manifest = tree.manifest
    async with _refusing(stream):
        await _send(stream, _Message.OFFER, _SIZE.pack(len(manifest.data)), manifest.data)
        if await _read_message(reader) is not _Message.NEED:
            raise BadManifest("an offer is answered by NEED")
        needed = _bits_untrusted(await reader.exactly((manifest.chunk_count + 7) // 8), manifest)
        tally = _Tally(manifest.size, manifest.size - sum(manifest.chunk(i)[1] for i in needed), progress)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send_records, stream, tree, needed, tally)
            # A receiver whose disk is full says so in the middle.
            await _read_done(reader, manifest)
            nursery.cancel_scope.cancel()
    tally.advance(manifest.size - tally.done)


class TreeReceiver:
    """Receives one tree, over as many streams as it takes."""

    def __init__(
        self,
        make_draft: Callable[[Manifest], DraftTree],
        *,
        size_max: int,
        expected: bytes | None = None,
        is_durable: bool = False,
    ) -> None:
        """Accept a tree of at most `size_max` bytes whose manifest has the id `expected` (None: any)."""
        self._make_draft = make_draft
        self._size_max = size_max
        self._expected = expected
        self._is_durable = is_durable
        self._draft: DraftTree | None = None

    async def receive(
        self, stream: trio.abc.SendStream, reader: ExactReader, progress: Progress | None = None
    ) -> tuple[Manifest, Placement]:
        """Receive what the sender offers, put it in its place and say so.

        Raises StreamCut (await the next offer), DiskFull or StagingError (this side failed; the sender was
        told), TransferRefused (the sender gave up), BadManifest (the sender broke the protocol).
        """
        async with _refusing(stream):
            if await _read_message(reader) is not _Message.OFFER:
                raise BadManifest("a transfer begins with OFFER")
            manifest = await self._read_manifest(reader)
            draft = await self._open_draft(manifest)
            await _send(stream, _Message.NEED, _bits(draft.needed, manifest.chunk_count))
            tally = _Tally(manifest.size, manifest.size - draft.needed_bytes, progress)
            await _receive_records(reader, draft, tally)
            placement = await trio.to_thread.run_sync(self._place, draft)
            await _send(stream, _Message.DONE, manifest.id)
        return manifest, placement

    async def _read_manifest(self, reader: ExactReader) -> Manifest:
        (size,) = _SIZE.unpack(await reader.exactly(_SIZE.size))
        if size > MANIFEST_SIZE_MAX:
            raise BadManifest(f"a manifest of {size} bytes")
        manifest = await trio.to_thread.run_sync(parse_untrusted, await reader.exactly(size))
        if self._expected is not None and manifest.id != self._expected:
            raise BadManifest("not the tree that belongs here")
        if manifest.size > self._size_max:
            raise BadManifest(f"a tree of {manifest.size} bytes, where {self._size_max} are allowed")
        return manifest

    async def _open_draft(self, manifest: Manifest) -> DraftTree:
        if self._draft is None or self._draft.manifest.id != manifest.id:
            draft = self._make_draft(manifest)
            await trio.to_thread.run_sync(draft.open)
            self._draft = draft
        return self._draft

    def _place(self, draft: DraftTree) -> Placement:
        self._draft = None
        return draft.place(is_durable=self._is_durable)


class _Tally:
    """Counts bytes of content for `progress`."""

    def __init__(self, total: int, done: int, progress: Progress | None) -> None:
        self.total, self.done, self._progress = total, done, progress
        self.advance(0)

    def advance(self, size: int) -> None:
        self.done += size
        if self._progress:
            self._progress(self.done, self.total)


class _Batch(msgspec.Struct, frozen=True):
    """Chunks on their way: what travels, and how much content that is."""

    data: bytes
    size: int


async def _send_records(stream: trio.abc.SendStream, tree: ScannedTree, needed: set[int], tally: _Tally) -> None:
    send_channel, receive_channel = trio.open_memory_channel[_Batch](BATCHES_AHEAD)
    reader = TreeReader(tree)
    batches = _prepared_batches(tree.manifest, reader, needed)

    async def prepare() -> None:
        async with send_channel:
            while (batch := await trio.to_thread.run_sync(next, batches, None)) is not None:
                await send_channel.send(batch)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prepare)
            async for batch in receive_channel:
                await _send_all(stream, batch.data)
                tally.advance(batch.size)
    except* StreamCut:
        # A receiver that gives up closes the stream: leave its REFUSED a moment to be read.
        await trio.sleep(REFUSAL_TIMEOUT_S)
        raise StreamCut from None
    finally:
        reader.close()


def _prepared_batches(manifest: Manifest, reader: TreeReader, needed: set[int]) -> Iterator[_Batch]:
    """Yield the needed chunks as records, read and compressed. Blocks; for threads, one at a time."""
    compressor = zstandard.ZstdCompressor(level=1)
    parts: list[bytes] = []
    size = 0
    for index, entry, offset, length in manifest.places():
        if index not in needed:
            continue
        data = reader.read_chunk(entry, offset, index)
        payload, flags = _compressed(compressor, data)
        parts.append(bytes([_Message.RECORD]) + _RECORD.pack(index, len(payload), flags) + payload)
        size += length
        if size >= BATCH_SIZE or len(parts) >= BATCH_CHUNKS_MAX:
            yield _Batch(b"".join(parts), size)
            parts, size = [], 0
    if parts:
        yield _Batch(b"".join(parts), size)


def _compressed(compressor: zstandard.ZstdCompressor, data: bytes) -> tuple[bytes, int]:
    if len(compressor.compress(data[:PROBE_SIZE])) * PROBE_SIZE < PROBE_PAYS * len(data[:PROBE_SIZE]):
        smaller = compressor.compress(data)
        if len(smaller) < len(data):
            return smaller, _COMPRESSED
    return data, 0


class _Record(msgspec.Struct, frozen=True):
    """One chunk as it came."""

    index: int
    payload: bytes
    is_compressed: bool


async def _receive_records(reader: ExactReader, draft: DraftTree, tally: _Tally) -> None:
    batch: list[_Record] = []
    awaited = set(draft.needed)
    size = 0
    while awaited:
        record = await _read_record(reader, draft.manifest, awaited)
        awaited.discard(record.index)
        batch.append(record)
        size += draft.manifest.chunk(record.index)[1]
        if size >= BATCH_SIZE or len(batch) >= BATCH_CHUNKS_MAX or not awaited:
            await trio.to_thread.run_sync(_store, draft, batch)
            tally.advance(size)
            batch, size = [], 0


async def _read_record(reader: ExactReader, manifest: Manifest, awaited: set[int]) -> _Record:
    if await _read_message(reader) is not _Message.RECORD:
        raise BadManifest("chunks are missing")
    index, size, flags = _RECORD.unpack(await reader.exactly(_RECORD.size))
    if index not in awaited or flags & ~_COMPRESSED:
        raise BadManifest(f"chunk {index} was not asked for, or is marked in an unknown way")
    is_compressed = bool(flags & _COMPRESSED)
    length = manifest.chunk(index)[1]
    if size > length or (size != length and not is_compressed):
        raise BadManifest(f"chunk {index} is of {length} bytes, and {size} came")
    return _Record(index, await reader.exactly(size), is_compressed)


def _store(draft: DraftTree, batch: list[_Record]) -> None:
    for record in batch:
        data = record.payload
        if record.is_compressed:
            data = _decompress_untrusted(data, draft.manifest.chunk(record.index)[1])
        draft.store(record.index, data)


def _decompress_untrusted(data: bytes, length: int) -> bytes:
    """Return the `length` bytes that `data` holds; never makes more of it, whatever its header says."""
    try:
        if zstandard.frame_content_size(data) != length:
            raise BadManifest("a compressed chunk states another size than its manifest")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadManifest(f"a compressed chunk is damaged: {error}") from None


async def _read_done(reader: ExactReader, manifest: Manifest) -> None:
    if await _read_message(reader) is not _Message.DONE or await reader.exactly(HASH_SIZE) != manifest.id:
        raise BadManifest("a transfer ends with DONE and the manifest's id")


async def _read_message(reader: ExactReader) -> _Message:
    """Return the next message's number; raise what a REFUSED says."""
    number = (await reader.exactly(1))[0]
    if number == _Message.REFUSED:
        (size,) = _REASON.unpack(await reader.exactly(_REASON.size))
        if size > REASON_SIZE_MAX:
            raise BadManifest("a refusal that is too long")
        text = (await reader.exactly(size)).decode(errors="replace")
        code, _, reason = "".join(c if c.isprintable() else "?" for c in text).partition(": ")
        if code == _REFUSED_DISK_FULL:
            raise _PeerDiskFull(f"the other side: {reason}")
        raise TransferRefused(f"the other side: {reason or code}")
    try:
        return _Message(number)
    except ValueError:
        raise BadManifest(f"a message of kind {number}") from None


class _PeerDiskFull(DiskFull):
    """The other side's disk is full."""


@asynccontextmanager
async def _refusing(stream: trio.abc.SendStream) -> AsyncIterator[None]:
    """Say to the other side what went wrong here, and raise it as the one exception that it is."""
    try:
        yield
    except BaseException as error:
        cause = _single(error)
        if isinstance(cause, (NodeError, BadManifest)) and not isinstance(
            cause, (StreamCut, TransferRefused, _PeerDiskFull)
        ):
            code = _REFUSED_DISK_FULL if isinstance(cause, DiskFull) else type(cause).__name__
            reason = f"{code}: {cause}".encode()[:REASON_SIZE_MAX]
            deadline = trio.current_time() + REFUSAL_TIMEOUT_S
            with trio.CancelScope(deadline=deadline, shield=True), contextlib.suppress(StreamCut):
                await _send(stream, _Message.REFUSED, _REASON.pack(len(reason)), reason)
        if cause is error:
            raise
        raise cause from None


def _single(error: BaseException) -> BaseException:
    """Return the first real error of a group of them; Cancelled and bugs go out as they are."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    ours, rest = error.split((NodeError, BadManifest))
    if ours is None or rest is not None:
        return error
    leaf: BaseException = ours
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf


def _bits(indexes: set[int], count: int) -> bytes:
    bits = bytearray((count + 7) // 8)
    for index in indexes:
        bits[index >> 3] |= 0x80 >> (index & 7)
    return bytes(bits)


def _bits_untrusted(bits: bytes, manifest: Manifest) -> set[int]:
    indexes = {at * 8 + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte & (0x80 >> bit)}
    if any(index >= manifest.chunk_count for index in indexes):
        raise BadManifest("NEED asks for chunks that don't exist")
    return indexes


async def _send(stream: trio.abc.SendStream, message: _Message, *parts: bytes) -> None:
    await _send_all(stream, b"".join((bytes([message]), *parts)))


async def _send_all(stream: trio.abc.SendStream, data: bytes) -> None:
    try:
        await stream.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        raise StreamCut from None
