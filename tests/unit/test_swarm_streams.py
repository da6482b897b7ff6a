"""Frames are bounded before they are read, and their ends are noticed."""

import pytest
import trio
from libp2p.utils.varint import encode_uvarint

from node.swarm.streams import read_frame_untrusted, read_varint_frame_untrusted, write_frame
from protocol.errors import MalformedRecord


class Tape:
    """A stream that plays back bytes, `step` at a time, and then ends (or hangs)."""

    def __init__(self, data: bytes, step: int = 1000, *, hangs: bool = False) -> None:
        self.data = data
        self.step = step
        self.hangs = hangs
        self.written = b""

    async def read(self, n: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        if not self.data and self.hangs:
            await trio.sleep_forever()
        size = min(self.step, self.step if n is None else n)
        part, self.data = self.data[:size], self.data[size:]
        return part

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.written += data

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("size", [0, 1, 5000])
async def test_frames_round_trip_in_any_pieces(size: int):
    tape = Tape(b"")
    await write_frame(tape, b"x" * size)
    tape.data, tape.step = tape.written, 7
    assert await read_frame_untrusted(tape, 5000) == b"x" * size
    varint = Tape(encode_uvarint(size) + b"x" * size, 3)
    assert await read_varint_frame_untrusted(varint, 5000, 1.0) == b"x" * size
    assert await read_varint_frame_untrusted(varint, 5000, 1.0) is None


async def test_announced_lengths_are_refused_before_anything_is_read():
    tape = Tape(b"\xff\xff\xff\xff" + b"x" * 100)
    with pytest.raises(MalformedRecord, match="4294967295 bytes"):
        await read_frame_untrusted(tape, 1000)
    assert len(tape.data) == 100
    tape = Tape(encode_uvarint(1001) + b"x" * 100)
    with pytest.raises(MalformedRecord, match="1001 bytes"):
        await read_varint_frame_untrusted(tape, 1000, 1.0)
    with pytest.raises(MalformedRecord, match="never ends"):
        await read_varint_frame_untrusted(Tape(b"\x80" * 50), 1000, 1.0)


async def test_early_ends_are_errors():
    for data in (b"", b"\0\0", b"\0\0\0\5abc"):
        with pytest.raises(EOFError):
            await read_frame_untrusted(Tape(data), 1000)
    for data in (b"\x80", b"\5abc"):
        with pytest.raises(EOFError):
            await read_varint_frame_untrusted(Tape(data), 1000, 1.0)


async def test_a_frame_that_was_begun_must_be_finished_in_time(autojump_clock):
    for data in (b"\x80", b"\5abc"):
        with pytest.raises(trio.TooSlowError):
            await read_varint_frame_untrusted(Tape(data, hangs=True), 1000, 10.0)
    with trio.move_on_after(10_000) as scope:
        await read_varint_frame_untrusted(Tape(b"", hangs=True), 1000, 10.0)
    assert scope.cancelled_caught
