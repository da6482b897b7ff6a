"""One bidirectional stream of a tunnel, as a trio stream with back-pressure both ways.

How it ends, seen from the other side:

- `send_eof` or `aclose`: everything sent arrives, then end of file; sending to a closed reader fails there;
- `reset`, leaving `async with` by an exception, or a cancelled `aclose`: trio.BrokenResourceError, so that a
  transfer that was cut off is never taken for a whole one;
- the connection ends: what has arrived can still be read, then trio.BrokenResourceError (caused by TunnelClosed).

The peer learns of a new stream with its first byte (or its end): open, then send something. What is sent may still
wait here when `aclose` returns; closing the *connection* at once drops it. Refuses to buffer more than the limits
say, in either direction.
"""

from types import TracebackType
from typing import Protocol

import trio

from node.errors import TunnelClosed

RECEIVE_SIZE_DEFAULT = 64 << 10
"""Most bytes that `receive_some()` without a size returns."""


class StreamOwner(Protocol):
    """What a stream needs of its connection. No method waits or raises; all are no-ops once it has ended."""

    @property
    def end_reason(self) -> str | None:
        """Why the connection has ended; None while it lives."""

    def send_room(self, stream: int) -> int:
        """Return how many more bytes may be queued."""

    def send(self, stream: int, data: memoryview, *, end: bool = False) -> None:
        """Queue data and the end of file."""

    def consume(self, stream: int, size: int) -> None:
        """Give the peer credit for what was read or thrown away."""

    def reset_stream(self, stream: int) -> None:
        """Give up sending."""

    def stop_stream(self, stream: int) -> None:
        """Give up reading."""

    def await_room(self, stream: "TunnelStream") -> None:
        """Call the stream's `on_progress` once it has the room it wants."""


class TunnelStream(trio.abc.HalfCloseableStream):
    """One stream. Made by a connection's `open_stream` and `accept_stream`."""

    def __init__(self, owner: StreamOwner, number: int, send_chunk: int) -> None:
        self.number = number
        """The QUIC stream id: agreed by both sides, unique in the connection."""
        self.room_wanted = 0
        """How much room the task that is waiting to send needs."""
        self._owner = owner
        self._send_chunk = send_chunk
        self._unread = bytearray()
        self._is_eof_received = False
        self._read_broken: str | None = None
        self._write_broken: str | None = None
        self._is_eof_sent = False
        self._is_closed = False
        self._is_sending = False
        self._is_receiving = False
        self._readable = trio.Event()
        self._writable = trio.Event()

    @property
    def unread(self) -> int:
        """Bytes that have arrived and wait for `receive_some`."""
        return len(self._unread)

    # --- the connection's side ------------------------------------------------------------------------------

    def on_data(self, data: bytes, end: bool) -> None:
        """Take what has arrived."""
        if self._is_closed:
            self._owner.consume(self.number, len(data))
            return
        self._unread += data
        self._is_eof_received |= end
        self._readable.set()

    def on_reset(self) -> None:
        """Note that the peer gave up sending: what is unread is half of something, and dropped."""
        self._read_broken = "the peer reset the stream"
        self._unread.clear()
        self._readable.set()

    def on_stopped(self) -> None:
        """Note that the peer no longer reads."""
        self._write_broken = "the peer no longer reads this stream"
        self._writable.set()

    def on_progress(self) -> None:
        """Let those who wait for room look again."""
        self._writable.set()

    def on_end(self) -> None:
        """Let those who wait see that the connection has ended."""
        self._readable.set()
        self._writable.set()

    # --- sending --------------------------------------------------------------------------------------------

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send `data`, waiting while more than a bounded amount is unacknowledged.

        Raises trio.BrokenResourceError when the peer no longer reads or the connection has ended,
        trio.ClosedResourceError after `send_eof` or `aclose`. Cancelled, it may have sent a part.
        """
        self._begin_sending()
        try:
            await trio.lowlevel.checkpoint()
            self._check_sendable()
            rest = memoryview(data).cast("B")
            while rest:
                room = await self._wait_for_room(min(len(rest), self._send_chunk))
                self._owner.send(self.number, rest[:room])
                rest = rest[room:]
        finally:
            self._is_sending = False

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until `send_all` would take something at once."""
        self._begin_sending()
        try:
            await trio.lowlevel.checkpoint()
            await self._wait_for_room(self._send_chunk)
        finally:
            self._is_sending = False

    async def send_eof(self) -> None:
        """Tell the peer that no more comes; reading goes on. Idempotent."""
        self._begin_sending()
        try:
            await trio.lowlevel.checkpoint()
            if self._is_closed:
                raise trio.ClosedResourceError("this stream is closed")
            if self._is_eof_sent:
                return
            self._check_sendable()
            self._finish_sending()
        finally:
            self._is_sending = False

    def _begin_sending(self) -> None:
        if self._is_sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._is_sending = True

    def _check_sendable(self) -> None:
        if self._is_closed or self._is_eof_sent:
            raise trio.ClosedResourceError("this stream's sending side is closed")
        if self._write_broken is not None:
            raise trio.BrokenResourceError(self._write_broken)
        self._check_connection()

    def _check_connection(self) -> None:
        reason = self._owner.end_reason
        if reason is not None:
            raise trio.BrokenResourceError(f"the tunnel has ended: {reason}") from TunnelClosed(reason)

    async def _wait_for_room(self, wanted: int) -> int:
        """Return how much may be queued, once that is at least `wanted`."""
        while True:
            self._check_sendable()
            room = self._owner.send_room(self.number)
            if room >= wanted:
                return room
            self.room_wanted = wanted
            self._writable = trio.Event()
            self._owner.await_room(self)
            await self._writable.wait()

    def _finish_sending(self) -> None:
        self._is_eof_sent = True
        self._owner.send(self.number, memoryview(b""), end=True)

    # --- receiving ------------------------------------------------------------------------------------------

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return the next bytes, at least one; b"" at the end of file.

        Raises trio.BrokenResourceError when the peer reset the stream or the connection has ended before the end
        of file, trio.ClosedResourceError after `aclose`. Cancelled, it has taken nothing.
        """
        size = RECEIVE_SIZE_DEFAULT if max_bytes is None else max_bytes
        if not isinstance(size, int):
            raise TypeError("max_bytes must be an integer")
        if size < 1:
            raise ValueError("max_bytes must be at least 1")
        if self._is_receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._is_receiving = True
        try:
            await trio.lowlevel.checkpoint()
            while not self._is_something_to_read():
                self._readable = trio.Event()
                await self._readable.wait()
        finally:
            self._is_receiving = False
        data = bytes(self._unread[:size])
        del self._unread[:size]
        self._owner.consume(self.number, len(data))
        return data

    def _is_something_to_read(self) -> bool:
        if self._is_closed:
            raise trio.ClosedResourceError("this stream is closed")
        if self._unread or (self._is_eof_received and self._read_broken is None):
            return True
        if self._read_broken is not None:
            raise trio.BrokenResourceError(self._read_broken)
        self._check_connection()
        return False

    # --- ending ---------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close both directions: end of file to the peer after what was sent, and nothing more is read.

        While another task is in `send_all`, and when cancelled, this is `reset`. Idempotent.
        """
        if not self._is_closed and not self._is_sending:
            try:
                # Not cancelled: a yield here would only let another task in between.
                await trio.lowlevel.checkpoint_if_cancelled()
            except trio.Cancelled:
                if self._is_eof_sent:
                    self._close()
                else:
                    self.reset()
                raise
            if self._write_broken is None and not self._is_eof_sent:
                self._finish_sending()
            self._close()
        else:
            self.reset()
        await trio.lowlevel.checkpoint()

    def reset(self) -> None:
        """Give up both directions at once; the peer gets trio.BrokenResourceError. Idempotent."""
        if self._is_closed:
            return
        if self._write_broken is None:
            self._owner.reset_stream(self.number)
        self._close()

    def _close(self) -> None:
        self._is_closed = True
        if not self._is_eof_received and self._read_broken is None:
            self._owner.stop_stream(self.number)
        self._owner.consume(self.number, len(self._unread))
        self._unread.clear()
        self.on_end()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            self.reset()
        await self.aclose()
