"""Another command in the job's sandbox, over a link of its own: the daemon's side.

    async with execute(socket_path, ("nvidia-smi",)) as execution:
        await execution.send_input(b"")              # b"": its end
        async for piece in execution.output():       # ExecutionOutput
            ...
        execution.ended                              # ExecutionEnded, once the output is over

Back-pressure goes all the way: output that is not taken holds the command back. Closing the context ends the
command. Refuses terminals.
"""

import enum
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import trio

from node.lease.link import FrameStream, LinkError, Request, open_frames
from protocol.errors import MalformedRecord

PIECE_MAX = 64 * 1024


class Output(enum.StrEnum):
    """The command's two outputs."""

    STDOUT = "stdout"
    STDERR = "stderr"


class ExecutionInput(msgspec.Struct, frozen=True):
    """Bytes for the command; empty: the end of its input."""

    data: Annotated[bytes, msgspec.Meta(max_length=PIECE_MAX)]


class ExecutionOutput(msgspec.Struct, frozen=True, tag_field="piece", tag="output"):
    """Bytes that the command has written."""

    source: Output
    data: bytes


class ExecutionEnded(msgspec.Struct, frozen=True, tag_field="piece", tag="ended"):
    """The command is over, or never began: then the status is -1 and `detail` says why."""

    status: int
    detail: str = ""


_Piece: TypeAlias = ExecutionOutput | ExecutionEnded


class Execution:
    """A running command. Input and output may be handled by two tasks."""

    def __init__(self, frames: FrameStream) -> None:
        self._frames = frames
        self.ended: ExecutionEnded | None = None

    async def send_input(self, data: bytes) -> None:
        """Send bytes to the command's standard input; b"" is its end. Raises LinkError."""
        pieces = [data[at : at + PIECE_MAX] for at in range(0, len(data), PIECE_MAX)] or [b""]
        try:
            for piece in pieces:
                await self._frames.send(ExecutionInput(piece))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise LinkError from None

    async def output(self) -> AsyncGenerator[ExecutionOutput, None]:
        """Yield what the command writes until it is over, then set `ended`. Raises LinkError.

        Close the generator (`contextlib.aclosing`) to stop earlier.
        """
        while True:
            try:
                piece: _Piece = await self._frames.receive_one_of(_Piece)
            except (EOFError, MalformedRecord, trio.BrokenResourceError, trio.ClosedResourceError):
                raise LinkError from None
            if isinstance(piece, ExecutionEnded):
                self.ended = piece
                return
            yield piece


@asynccontextmanager
async def execute(socket_path: str | Path, argv: tuple[str, ...]) -> AsyncIterator[Execution]:
    """Run `argv` in the sandbox of the job whose renter's keeper listens at `socket_path`. Raises LinkError."""
    frames, _hello = await open_frames(socket_path)
    try:
        await frames.send(Request(1, "execute", argv=argv))
        yield Execution(frames)
    finally:
        with trio.CancelScope(shield=True):
            await frames.aclose()
