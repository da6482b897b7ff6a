"""Frames on libp2p streams, read with bounds on size and time.

A stream is anything with libp2p's `read(n)`, `write(data)`, `close()` and `reset()`. Refuses to trust a length
before it was checked, and to wait for a frame's rest longer than its deadline.
"""

from typing import Protocol

import trio

from protocol.errors import MalformedRecord

_LENGTH_SIZE = 4
_VARINT_SIZE_MAX = 5


class Stream(Protocol):
    """The part of libp2p's INetStream that is used here."""

    async def read(self, n: int | None = None) -> bytes:
        """Return up to `n` bytes, or raise at the end."""

    async def write(self, data: bytes) -> None:
        """Send all of `data`."""

    async def close(self) -> None:
        """Say that no more will be sent."""

    async def reset(self) -> None:
        """Give up both directions."""


async def read_exact(stream: Stream, size: int) -> bytes:
    """Return exactly `size` bytes. Raises EOFError at an early end, and libp2p's errors when the stream breaks."""
    buffer = bytearray()
    while len(buffer) < size:
        part = await stream.read(size - len(buffer))
        if not part:
            raise EOFError("the stream ended inside a frame")
        buffer += part
    return bytes(buffer)


async def read_frame_untrusted(stream: Stream, size_max: int) -> bytes:
    """Return the next frame (a 32-bit big-endian length, then so many bytes).

    Raises MalformedRecord when it announces more than `size_max`. The caller bounds the time.
    """
    size = int.from_bytes(await read_exact(stream, _LENGTH_SIZE), "big")
    if size > size_max:
        raise MalformedRecord(f"a frame of {size} bytes, where {size_max} are allowed")
    return await read_exact(stream, size)


async def write_frame(stream: Stream, data: bytes) -> None:
    """Send one frame."""
    await stream.write(len(data).to_bytes(_LENGTH_SIZE, "big") + data)


async def read_varint_frame_untrusted(stream: Stream, size_max: int, timeout_s: float) -> bytes | None:
    """Return the next frame with a varint length (as libp2p's own protocols have it), or None at the stream's end.

    Waits for the first byte as long as it takes, and for the rest `timeout_s`: else raises trio.TooSlowError.
    Raises MalformedRecord for a length that is malformed or above `size_max`.
    """
    try:
        byte = await stream.read(1)
    except EOFError:
        return None
    if not byte:
        return None
    with trio.fail_after(timeout_s):
        size = byte[0] & 0x7F
        for index in range(1, _VARINT_SIZE_MAX + 1):
            if byte[0] < 0x80:
                break
            if index == _VARINT_SIZE_MAX:
                raise MalformedRecord("a frame's length never ends")
            byte = await read_exact(stream, 1)
            size |= (byte[0] & 0x7F) << (7 * index)
        if size > size_max:
            raise MalformedRecord(f"a frame of {size} bytes, where {size_max} are allowed")
        return await read_exact(stream, size)
