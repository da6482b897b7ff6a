"""A virtual link between two QUIC engines: virtual time, and loss, duplication, reordering from one seed.

The engines may be the tunnel's or aioquic's own (for peers that do not keep the rules). The server's is made when
the first datagram arrives, as an endpoint does. Nothing here waits: `run` moves the clock from event to event.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from node.tunnel.gate import destination_cid_untrusted
from node.tunnel.seam import Address, StreamData, StreamReset, StreamStopped

CLIENT: Address = ("192.0.2.1", 1000)
SERVER: Address = ("192.0.2.2", 2000)
_TICK_S = 1e-6
"""How far the clock is past what is due. aioquic compares sums and differences of floats: called at the very time
that its loss timer named, it may find itself early by a rounding error, for ever."""

Tamper = Callable[[str, bytes], list[bytes]]
"""("client" or "server", datagram) -> what leaves instead of it."""


class Side:
    """An engine with an application that reads all it gets, unless `reads` is set false."""

    def __init__(self, name: str, address: Address, engine: Any) -> None:
        self.name = name
        self.address = address
        self.engine = engine
        self.reads = True
        self.received: dict[int, bytearray] = {}
        self.unread: Counter[int] = Counter()
        self.ended: set[int] = set()
        self.resets: set[int] = set()
        self.stopped: set[int] = set()
        self._outbox: dict[int, tuple[memoryview, bool]] = {}

    def send(self, stream: int, data: bytes, *, end: bool = True) -> None:
        """Send `data` as the engine's buffer has room for it."""
        self._outbox[stream] = (memoryview(data), end)

    def read(self) -> None:
        """Read all that is unread."""
        for stream, size in self.unread.items():
            self.engine.consume(stream, size)
        self.unread.clear()

    def unsent(self) -> int:
        """Bytes that the engine had no room for yet."""
        return sum(len(data) for data, _ in self._outbox.values())

    def feed(self) -> None:
        """Hand the engine what it has room for: 64 KiB a stream."""
        for stream, (data, end) in list(self._outbox.items()):
            room = (64 << 10) - self.engine.buffered(stream)
            if room <= 0:
                continue
            is_last = len(data) <= room
            self.engine.send_stream_data(stream, data[:room], end=end and is_last)
            if is_last:
                del self._outbox[stream]
            else:
                self._outbox[stream] = (data[room:], end)

    def take_events(self) -> None:
        """Take note of what has come."""
        while (event := self.engine.next_event()) is not None:
            match event:
                case StreamData(stream, data, end):
                    self.received.setdefault(stream, bytearray()).extend(data)
                    self.unread[stream] += len(data)
                    if end:
                        self.ended.add(stream)
                case StreamReset(stream):
                    self.resets.add(stream)
                    self.unread.pop(stream, None)
                case StreamStopped(stream):
                    self.stopped.add(stream)
        if self.reads:
            self.read()


class QuicLink:
    """The link. `answer` makes the server's engine from the client's first connection id."""

    def __init__(
        self,
        dial: Callable[[Address, float], Any],
        answer: Callable[[bytes], Any],
        *,
        seed: int = 0,
        loss: float = 0.0,
        duplicate: float = 0.0,
        jitter_s: float = 0.0,
        delay_s: float = 0.01,
    ) -> None:
        self.now = 1000.0
        self.loss, self.duplicate, self.jitter_s, self.delay_s = loss, duplicate, jitter_s, delay_s
        self.tamper: Tamper | None = None
        self.sent_at: list[float] = []
        """When datagrams left either side."""
        self._random = random.Random(seed)
        self._answer = answer
        self._flight: list[tuple[float, int, str, bytes, Address]] = []
        self._count = 0
        self.client = Side("client", CLIENT, dial(SERVER, self.now))
        self._server: Side | None = None

    @property
    def server(self) -> Side:
        """The server's side; it exists once a datagram has reached it."""
        assert self._server is not None, "nothing has reached the server"
        return self._server

    @property
    def has_server(self) -> bool:
        """Whether anything has reached the server."""
        return self._server is not None

    def run(self, until: Callable[[], bool], *, limit_s: float = 300.0) -> None:
        """Move time on until `until()`; fail after `limit_s` of it, or when nothing is left to happen."""
        stop_at = self.now + limit_s
        self._pump()
        while not until():
            due = self._next_time()
            assert due is not None and due <= stop_at, f"not reached at {self.now:.3f}, next event {due}"
            self.now = max(self.now, due) + _TICK_S
            self._step()
            self._pump()

    def run_for(self, seconds: float) -> None:
        """Move time on by `seconds`."""
        stop_at = self.now + seconds
        self._pump()
        while (due := self._next_time()) is not None and due <= stop_at:
            self.now = max(self.now, due) + _TICK_S
            self._step()
            self._pump()
        self.now = stop_at

    def rebind(self, address: Address) -> None:
        """Let the client send from another address: a NAT has forgotten the old mapping."""
        self.client.address = address

    def inject(self, to: str, data: bytes, source: Address, *, delay_s: float) -> None:
        """Let a stranger's datagram arrive after `delay_s`."""
        self._count += 1
        heapq.heappush(self._flight, (self.now + delay_s, self._count, to, data, source))

    def _sides(self) -> list[Side]:
        return [self.client] if self._server is None else [self.client, self._server]

    def _next_time(self) -> float | None:
        times = [self._flight[0][0]] if self._flight else []
        times += [timer for side in self._sides() if (timer := side.engine.get_timer()) is not None]
        return min(times, default=None)

    def _step(self) -> None:
        while self._flight and self._flight[0][0] <= self.now:
            _, _, to, data, source = heapq.heappop(self._flight)
            if to == "client":
                self.client.engine.receive_datagram(data, source, self.now)
                continue
            if self._server is None:
                cid = destination_cid_untrusted(data)
                assert cid is not None
                self._server = Side("server", SERVER, self._answer(cid))
            self._server.engine.receive_datagram(data, source, self.now)
        for side in self._sides():
            timer = side.engine.get_timer()
            if timer is not None and timer <= self.now:
                side.engine.handle_timer(self.now)

    def _pump(self) -> None:
        for side in self._sides():
            side.feed()
            side.take_events()
            for data, target in side.engine.datagrams_to_send(self.now):
                self._dispatch(side, data, target)
            side.take_events()

    def _dispatch(self, side: Side, data: bytes, target: Address) -> None:
        self.sent_at.append(self.now)
        to = "server" if side is self.client else "client"
        if (to == "server" and target != SERVER) or (to == "client" and target != self.client.address):
            return  # to an address where nobody listens (any more)
        for copy in [data] if self.tamper is None else self.tamper(side.name, data):
            if self._random.random() < self.loss:
                continue
            for _ in range(2 if self._random.random() < self.duplicate else 1):
                self._count += 1
                arrival = self.now + self.delay_s + self._random.random() * self.jitter_s
                heapq.heappush(self._flight, (arrival, self._count, to, copy, side.address))
