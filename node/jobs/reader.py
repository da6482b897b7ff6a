"""Exact reads from a byte stream that delivers what it likes.

Pieces are kept as they came and joined once per read: a growing buffer would be copied again and again at bulk
speed. Refuses to hold more than one read's worth and the last piece.
"""

from collections import deque
from typing import ClassVar

import trio

from node.errors import JobError

RECEIVE_SIZE = 256 * 1024


class StreamCut(JobError):
    """The tunnel was cut in the middle."""

    code: ClassVar[int] = 2321


class ExactReader:
    """Reads whole parts of `stream`. One task at a time."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._pieces: deque[bytes] = deque()
        self._size = 0

    async def exactly(self, size: int) -> bytes:
        """Return the next `size` bytes. Raises StreamCut when the stream ends or breaks before."""
        if not await self._fill(size):
            raise StreamCut
        return self._take(size)

    async def exactly_or_end(self, size: int) -> bytes | None:
        """As `exactly`, and return None when the stream ends before the first byte."""
        if await self._fill(size):
            return self._take(size)
        if self._size:
            raise StreamCut
        return None

    async def _fill(self, size: int) -> bool:
        while self._size < size:
            try:
                piece = await self._stream.receive_some(RECEIVE_SIZE)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise StreamCut from None
            if not piece:
                return False
            self._pieces.append(bytes(piece))
            self._size += len(piece)
        return True

    def _take(self, size: int) -> bytes:
        self._size -= size
        taken = []
        while size:
            piece = self._pieces.popleft()
            if len(piece) > size:
                self._pieces.appendleft(piece[size:])
                piece = piece[:size]
            taken.append(piece)
            size -= len(piece)
        return taken[0] if len(taken) == 1 else b"".join(taken)
