"""Frames on a tunnel's stream. Refuses to read more than one frame ahead, and frames that don't belong there."""

from typing import Any, TypeVar

import trio

from node.jobs.reader import ExactReader, StreamCut
from protocol import frames
from protocol.errors import MalformedRecord
from protocol.frames import Frame

OPENER_TIMEOUT_S = 15
"""How long a peer may take to say what a stream is for, or hello."""

T = TypeVar("T")


class FrameLink:
    """One stream as frames, and, where a tree follows, as bytes. Sent by one task at a time, received by one."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.reader = ExactReader(stream)

    async def send(self, frame: Frame) -> None:
        """Send one frame. Raises StreamCut."""
        try:
            await self.stream.send_all(frames.encode(frame))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise StreamCut from None

    async def receive(self) -> Frame | None:
        """Return the next frame; None at the stream's end. Raises StreamCut, MalformedRecord."""
        header = await self.reader.exactly_or_end(frames.LENGTH.size)
        if header is None:
            return None
        return frames.parse_untrusted(await self.reader.exactly(frames.size_untrusted(header)))

    async def receive_any(self) -> Frame:
        """Return the next frame. Raises StreamCut, also at the stream's end, and MalformedRecord."""
        frame = await self.receive()
        if frame is None:
            raise StreamCut
        return frame

    async def receive_as(self, *kinds: type[T]) -> T:
        """Return the next frame, which is one of `kinds` and comes soon. Raises StreamCut, MalformedRecord."""
        frame: Any = None
        with trio.move_on_after(OPENER_TIMEOUT_S):
            frame = await self.receive()
        if frame is None:
            raise StreamCut
        if not isinstance(frame, kinds):
            raise MalformedRecord(f"a frame {type(frame).__name__} does not belong here")
        return frame
