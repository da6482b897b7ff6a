"""The world of simulated markets: a virtual clock, wires that fail, and the books of who has what; from one seed.

It loses, doubles, delays and reorders what nodes say, and cuts their power. At every grant it looks whether a
device is leased twice. Every step is a line of the trace; `digest` is its hash. Refuses real time, chance and IO.
"""

import heapq
import random
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from blake3 import blake3
from support.signers import NETWORK

from protocol.envelope import Sealed, open_untrusted
from protocol.units import MINUTE_MS, Millis, Price, cost

START = 1_790_000_000_000
RESEND_MS = 700


class Weather(NamedTuple):
    """What goes wrong. Probabilities are per message; `outage` is per node and minute."""

    loss: float = 0.0
    duplicate: float = 0.0
    delay_max_ms: int = 60
    outage: float = 0.0
    keeper_failure: float = 0.0


class Sale(NamedTuple):
    """A lease as its provider granted it."""

    provider: bytes
    renter: bytes
    keys: tuple[bytes, ...]
    price: int
    max_spend: int


class Node(Protocol):
    """A machine in the world."""

    id: bytes
    is_up: bool

    def answer(self, letter: Sealed[Any]) -> Any:
        """Return the record that answers a letter."""

    def crash(self, down_ms: int) -> None:
        """Lose power for a while."""


class World:
    """The clock, the wires, and the books of who has what."""

    def __init__(self, seed: int, weather: Weather) -> None:
        self.random = random.Random(seed)
        self.weather = weather
        self.now = Millis(START)
        self.nodes: dict[bytes, Node] = {}
        self.sales: dict[bytes, Sale] = {}
        """Leases whose devices are taken now."""
        self.ended: dict[bytes, tuple[Sale, int]] = {}
        """Leases that are over, and what was paid for them."""
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._trace = blake3()
        self.lines = 0

    @property
    def digest(self) -> str:
        return self._trace.hexdigest()

    def note(self, *words: object) -> None:
        self.lines += 1
        self._trace.update(f"{self.now} {' '.join(str(word) for word in words)}\n".encode())

    def after(self, ms: int, work: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + max(0, ms), self._count, work))

    def run(self, until_ms: int) -> None:
        while self._events and self._events[0][0] <= START + until_ms:
            at, _, work = heapq.heappop(self._events)
            self.now = Millis(max(self.now, at))
            work()

    def carry(self, source: bytes, target: bytes, work: Callable[[Any], None]) -> None:
        """Bring something to a node: late, twice, or never."""
        for _ in range(2 if self.random.random() < self.weather.duplicate else 1):
            delay_ms = self.random.randint(1, self.weather.delay_max_ms)
            if self.random.random() >= self.weather.loss:
                self.after(delay_ms, lambda: self._arrive(source, target, work))

    def _arrive(self, source: bytes, target: bytes, work: Callable[[Any], None]) -> None:
        node = self.nodes[target]
        if node.is_up and self.nodes[source].is_up:
            work(node)

    def post(
        self, source: Node, target: bytes, letter: Sealed[Any], lifetime_ms: int,
        on_answer: Callable[[Any], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Send a record until it is answered or expires; `on_answer` hears the answer's record once, or None."""
        ends = self.now + lifetime_ms
        is_done = False

        def hear(answer: Any) -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                self.note("answer", type(letter.record).__name__, type(answer).__name__)
                on_answer(answer)

        def deliver(node: Any) -> None:
            answer = node.answer(open_untrusted(letter.data, NETWORK))
            self.carry(target, source.id, lambda _: hear(answer))

        def attempt() -> None:
            if is_done:
                return
            if self.now >= ends:
                hear(None)
                return
            if source.is_up:
                self.carry(source.id, target, deliver)
            self.after(RESEND_MS, attempt)

        attempt()

    def granted(self, lease: bytes, sale: Sale) -> None:
        taken = {name for other in self.sales.values() for name in other.keys}
        assert taken.isdisjoint(sale.keys), "a device is leased twice"
        assert lease not in self.ended
        self.sales[lease] = sale

    def released(self, lease: bytes, metered_ms: int) -> None:
        sale = self.sales.pop(lease)
        paid = min(sale.max_spend, cost(Price(sale.price), len(sale.keys), metered_ms))
        self.ended[lease] = (sale, paid)

    def storms(self) -> None:
        """Cut somebody's power now and then."""
        for node in self.nodes.values():
            if node.is_up and self.random.random() < self.weather.outage:
                node.crash(self.random.randint(500, 20_000))
        self.after(MINUTE_MS, self.storms)


def money_is_conserved(world: World) -> bool:
    """Return whether what was paid is within every cap, and paid once."""
    caps_hold = all(paid <= sale.max_spend for sale, paid in world.ended.values())
    return caps_hold and not set(world.ended) & set(world.sales)
