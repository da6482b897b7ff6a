"""One tunnel: an engine, its streams, and the tasks that wait for them.

The endpoint feeds it datagrams and the time; the application opens and accepts streams. Whatever the engine raises
(a stranger's bytes reach it) ends this connection and nothing else. Refuses to touch the socket.
"""

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import trio

from node.errors import TunnelClosed, TunnelError
from node.log import get_logger
from node.tunnel.gate import HalfOpen
from node.tunnel.limits import TunnelLimits
from node.tunnel.seam import (
    Address,
    CidIssued,
    CidRetired,
    Datagram,
    EndedBy,
    Ending,
    Engine,
    Event,
    StreamData,
    StreamReset,
    StreamStopped,
)
from node.tunnel.stream import TunnelStream

log = get_logger(__name__)

T = TypeVar("T")


def show_address(address: Address | None) -> str:
    """Return "host:port" ("[host]:port" for IPv6; an IPv4 address mapped into IPv6 is shown as IPv4)."""
    if address is None:
        return "unknown"
    host = address[0].removeprefix("::ffff:") if "." in address[0] else address[0]
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"


def _tell(ending: Ending) -> str:
    match ending.by:
        case EndedBy.US:
            return f"closed here: {ending.reason}" if ending.reason else "closed here"
        case EndedBy.PEER:
            return f"closed by the peer: {ending.reason}" if ending.reason else "closed by the peer"
        case EndedBy.SILENCE:
            return ending.reason
        case EndedBy.FAULT:
            return f"broken off here: {ending.reason}"


class Connection:
    """A tunnel, open or on its way. Implements `node.ports.TunnelConnection`."""

    def __init__(
        self,
        engine: Engine,
        limits: TunnelLimits,
        touch: Callable[["Connection"], None],
        flush: Callable[["Connection"], None],
    ) -> None:
        """`touch` makes the endpoint flush soon, `flush` now."""
        self._engine = engine
        self._limits = limits
        self._touch = touch
        self._flush = flush
        self._streams: dict[int, TunnelStream] = {}
        self._waiting_for_room: list[TunnelStream] = []
        self._arrived: deque[TunnelStream] = deque()
        self._arrival = trio.Event()
        self._quota = trio.Event()
        self._settled = trio.Event()
        self._ended = trio.Event()
        self._ending: Ending | None = None
        self._has_failed = False
        self.cids = {engine.host_cid}
        """Connection ids that lead here; the endpoint's table follows it."""
        self.half_open: HalfOpen | None = None
        """What the gate counts while a stranger's handshake is under way."""
        self.send_problem = ""
        """Why the last datagram could not be sent."""

    # --- for the application --------------------------------------------------------------------------------

    @property
    def peer_key(self) -> bytes:
        """The peer's proven 32-byte Ed25519 tunnel key. Raises TunnelError before the connection was open."""
        key = self._engine.peer_key
        if key is None:
            raise TunnelError("the peer has not proven its key yet")
        return key

    @property
    def peer_address(self) -> str:
        """The peer's UDP address as "host:port": the last one at which it proved to receive."""
        return show_address(self._engine.peer_address)

    @property
    def end_reason(self) -> str | None:
        """Why the connection has ended, one line; None while it lives."""
        return None if self._ending is None else _tell(self._ending)

    @property
    def ending(self) -> Ending | None:
        """The same, with who ended it."""
        return self._ending

    async def open_stream(self) -> TunnelStream:
        """Open a bidirectional stream, waiting while the peer allows no more. Raises TunnelClosed."""
        await trio.lowlevel.checkpoint()
        while True:
            self._check_alive()
            number = self._ask(self._engine.open_stream, default=None)
            if number is not None:
                return self._add_stream(number)
            self._check_alive()
            await self._quota.wait()

    async def accept_stream(self) -> TunnelStream:
        """Wait for the peer's next bidirectional stream. Raises TunnelClosed when none has come before the end."""
        await trio.lowlevel.checkpoint()
        while not self._arrived:
            self._check_alive()
            await self._arrival.wait()
        stream = self._arrived.popleft()
        if not self._arrived and self._ending is None:
            self._arrival = trio.Event()
        return stream

    async def wait_closed(self) -> str:
        """Wait until the connection has ended, and return why."""
        await self._ended.wait()
        return self.end_reason or ""

    async def aclose(self, reason: str = "") -> None:
        """Close at once; idempotent. The peer is told `reason` (at most 200 bytes).

        What the path takes now is sent first, so last words mostly arrive; what does not fit or gets lost is gone.
        """
        self.close(reason)
        await trio.lowlevel.checkpoint()

    def close(self, reason: str) -> None:
        """Do what `aclose` does, without a checkpoint."""
        if self._ending is None:
            self._flush(self)
        if self._ending is None:
            self._ask(lambda: self._engine.shut(reason), default=None)
            self._flush(self)
            self._touch(self)

    def _check_alive(self) -> None:
        if self._ending is not None:
            raise TunnelClosed(f"the tunnel has ended: {_tell(self._ending)}")

    # --- for the endpoint -----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether both sides have proven themselves; stays true after the end."""
        return self._engine.is_open

    @property
    def was_heard(self) -> bool:
        """Whether anything valid has come from the peer."""
        return self._engine.was_heard

    @property
    def is_over(self) -> bool:
        """Whether the endpoint may forget it."""
        return self._has_failed or self._engine.is_over

    async def wait_settled(self) -> None:
        """Wait until the connection is open or has ended."""
        await self._settled.wait()

    def receive_untrusted(self, data: bytes, address: Address, now: float) -> None:
        """Take a datagram; the caller flushes afterwards."""
        self._ask(lambda: self._engine.receive_datagram(data, address, now), default=None)

    def timer(self) -> float | None:
        """Return when `tick` must be called."""
        return self._ask(self._engine.get_timer, default=None)

    def tick(self, now: float) -> None:
        """Do what time demands; the caller flushes afterwards."""
        self._ask(lambda: self._engine.handle_timer(now), default=None)

    def datagrams_to_send(self, now: float) -> list[Datagram]:
        """Return what must leave now, after waking whoever waited for what has happened."""
        nothing: list[Datagram] = []
        datagrams = self._ask(lambda: self._engine.datagrams_to_send(now), default=nothing)
        while (event := self._ask(self._engine.next_event, default=None)) is not None:
            self._take(event)
        ending = self._ask(lambda: self._engine.ending, default=None)
        if ending is not None:
            self._end(ending)
        elif not self._has_failed:
            self._settle()
        return datagrams

    def _ask(self, work: Callable[[], T], default: T) -> T:
        """Let the engine work; should it raise, this connection has failed and `default` is the answer."""
        if self._has_failed:
            return default
        try:
            return work()
        # AssertionError too: the assertions inside aioquic can be reached by a stranger's bytes, and are no reason
        # to end the other tunnels of this endpoint. No code of ours that asserts runs in here.
        except Exception as error:
            log.warning(
                "tunnel.engine_failed", error=repr(error)[:500], peer=show_address(self._engine.peer_address)
            )
            self._has_failed = True
            self._end(Ending(EndedBy.FAULT, f"the QUIC engine failed ({type(error).__name__})"))
            self._touch(self)  # so that the endpoint forgets it
            return default

    def _take(self, event: Event) -> None:
        match event:
            case StreamData(number, data, end):
                self._stream(number).on_data(data, end)
            case StreamReset(number):
                self._stream(number).on_reset()
            case StreamStopped(number):
                self._stream(number).on_stopped()
            case CidIssued(cid):
                self.cids.add(cid)
            case CidRetired(cid):
                self.cids.discard(cid)

    def _stream(self, number: int) -> TunnelStream:
        """Return the stream of an event; the first event of a stream that the peer opened announces it."""
        stream = self._streams.get(number)
        if stream is None:
            stream = self._add_stream(number)
            self._arrived.append(stream)
            self._arrival.set()
        return stream

    def _add_stream(self, number: int) -> TunnelStream:
        stream = self._streams[number] = TunnelStream(self, number, self._limits.send_chunk)
        return stream

    def _settle(self) -> None:
        """Wake whoever waited for what the engine has just learned, and forget finished streams."""
        engine = self._engine
        if engine.is_open and not self._settled.is_set():
            log.info("tunnel.opened", peer=self.peer_address)
            self._settled.set()
        self._quota.set()
        self._quota = trio.Event()
        if self._waiting_for_room:
            total = engine.buffered_total()
            waiting, self._waiting_for_room = self._waiting_for_room, []
            for stream in waiting:
                if self._room(stream.number, total) >= stream.room_wanted:
                    stream.on_progress()
                else:
                    self._waiting_for_room.append(stream)
        # Nothing more comes for these, and the application may still hold and read them.
        for number in [number for number in self._streams if engine.is_discarded(number)]:
            del self._streams[number]

    def _end(self, ending: Ending) -> None:
        if self._ending is not None:
            return
        self._ending = ending
        if self._settled.is_set():
            log.info("tunnel.ended", peer=self.peer_address, reason=_tell(ending))
        else:
            log.debug("tunnel.not_opened", peer=self.peer_address, reason=_tell(ending))
        for stream in self._streams.values():
            stream.on_end()
        self._streams.clear()
        self._waiting_for_room.clear()
        for event in (self._settled, self._arrival, self._quota, self._ended):
            event.set()

    # --- for the streams (`stream.StreamOwner`) -------------------------------------------------------------

    def send_room(self, number: int) -> int:
        """Return how many more bytes of the stream may be queued."""
        return self._room(number, self._engine.buffered_total())

    def _room(self, number: int, total: int) -> int:
        own, limits = self._engine.buffered(number), self._limits
        return min(limits.send_buffer - own, max(limits.send_buffer_total - total, limits.send_buffer_floor - own))

    def send(self, number: int, data: memoryview, *, end: bool = False) -> None:
        """Queue data and the end of file."""
        self._do(lambda: self._engine.send_stream_data(number, data, end))

    def consume(self, number: int, size: int) -> None:
        """Give the peer credit for what was read or thrown away."""
        if size and self._ending is None and self._ask(lambda: self._engine.consume(number, size), default=False):
            self._touch(self)

    def reset_stream(self, number: int) -> None:
        """Give up sending."""
        self._do(lambda: self._engine.reset_stream(number))

    def stop_stream(self, number: int) -> None:
        """Give up reading."""
        self._do(lambda: self._engine.stop_stream(number))

    def await_room(self, stream: TunnelStream) -> None:
        """Call the stream's `on_progress` when it has room."""
        if stream not in self._waiting_for_room:
            self._waiting_for_room.append(stream)

    def _do(self, work: Callable[[], None]) -> None:
        if self._ending is None:
            self._ask(work, default=None)
            self._touch(self)
