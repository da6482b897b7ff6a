"""An in-memory `node.ports.Network`: many nodes in one process, on trio's virtual clock, from one seed.

`async with open_hub(seed=7, faults=Faults(loss=0.1)) as hub` gives a hub; `hub.join(node)` gives a node's network.
Messages travel as in the real swarm: gossip hop by hop along connections and only past nodes that accept it,
requests to connected or dialled peers. What `Faults` says is lost, doubled or delayed (delays differ, so messages
overtake each other) is drawn from the seed. Every delivery is appended to `hub.trace`.

Run it under `autojump_clock`. trio itself shuffles tasks that become ready at the same instant: inside
`deterministic_trio(seed)` it does so from the seed, and the same seed gives the same trace. Refuses to do real IO.
"""

import heapq
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

import trio

from node.errors import PeerRefused, SwarmError
from node.ports import ConnectHandler, GossipHandler, GossipVerdict, Peer, RequestHandler
from protocol.identity import NodeId, node_from_peer_id, peer_id

GOSSIP_SIZE_MAX = 64 * 1024 + 1024
MESSAGE_SIZE_MAX = 1024 * 1024


@dataclass(frozen=True)
class Faults:
    """What goes wrong on the way. Probabilities are per delivery; delays are uniform, in ms."""

    loss: float = 0.0
    """Of a gossiped message on one hop, of a request, and of a reply."""
    duplicate: float = 0.0
    """A request that is heard twice (its reply once), or a gossiped message that arrives twice."""
    delay_min_ms: int = 1
    delay_max_ms: int = 20


@asynccontextmanager
async def open_hub(*, seed: int, faults: Faults = Faults()) -> AsyncIterator["MemoryHub"]:
    """Run a hub; leaving cancels whatever is under way."""
    async with trio.open_nursery() as nursery:
        hub = MemoryHub(seed, faults, nursery)
        nursery.start_soon(hub._deliver_forever)
        yield hub
        nursery.cancel_scope.cancel()


@contextmanager
def deterministic_trio(seed: int) -> Iterator[None]:
    """Make trio's scheduler draw from `seed` while inside."""
    from trio._core import _run

    before = _run._ALLOW_DETERMINISTIC_SCHEDULING
    state = _run._r.getstate()
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    _run._r.seed(seed)
    try:
        yield
    finally:
        _run._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
        _run._r.setstate(state)


class MemoryHub:
    """The wires between the nodes."""

    def __init__(self, seed: int, faults: Faults, nursery: trio.Nursery) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.counters: Counter[str] = Counter()
        self.trace: list[str] = []
        """One line per delivery: virtual time in ms, what, from, to."""
        self.nodes: dict[NodeId, MemoryNetwork] = {}
        self._nursery = nursery
        self._group: dict[NodeId, int] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sent = 0
        self._woken = trio.Event()

    def join(self, node: NodeId, *, agent: str = "memory/1") -> "MemoryNetwork":
        """Return the network of `node`, new and without connections; after `crash` it is a restarted one."""
        if node in self.nodes:
            raise ValueError(f"{peer_id(node)} has joined already")
        network = MemoryNetwork(self, node, agent)
        self.nodes[node] = network
        return network

    def crash(self, node: NodeId) -> None:
        """End `node` at once, as its kernel would: handlers are cancelled, and peers notice that it is gone."""
        network = self.nodes.pop(node)
        network.cancel_tasks()
        for other in list(network.connected):
            network.connected.discard(other)
            if other in self.nodes:
                self.nodes[other].lose(node)

    def connect(self, one: NodeId, other: NodeId) -> None:
        """Connect two nodes, as if `one` had dialled; their `on_connect` handlers run. Idempotent."""
        if one == other or other in self.nodes[one].connected:
            return
        self.nodes[one].add_connection(other, inbound=False)
        self.nodes[other].add_connection(one, inbound=True)

    def disconnect(self, one: NodeId, other: NodeId) -> None:
        """End a connection; both notice."""
        self.nodes[one].lose(other)
        self.nodes[other].lose(one)

    def connect_all(self) -> None:
        """Connect every node with every other."""
        nodes = list(self.nodes)
        for index, one in enumerate(nodes):
            for other in nodes[index + 1 :]:
                self.connect(one, other)

    def partition(self, *groups: set[NodeId]) -> None:
        """Let nothing pass between the groups; nodes in none form one of their own. Connections look alive."""
        self._group = {node: index for index, group in enumerate(groups, 1) for node in group}

    def heal(self) -> None:
        """End a partition."""
        self._group = {}

    def is_passable(self, one: NodeId, other: NodeId) -> bool:
        """Return whether messages pass between two nodes, both running."""
        return one in self.nodes and other in self.nodes and self._group.get(one, 0) == self._group.get(other, 0)

    def send(self, what: str, source: NodeId, target: NodeId, deliver: Callable[["MemoryNetwork"], None]) -> None:
        """Call `deliver` with the target's network after a delay, or never, or twice."""
        copies = 2 if self.random.random() < self.faults.duplicate else 1
        for _ in range(copies):
            delay_ms = self.random.uniform(self.faults.delay_min_ms, self.faults.delay_max_ms)
            is_lost = self.random.random() < self.faults.loss
            if is_lost or not self.is_passable(source, target):
                self.counters["lost"] += 1
                continue
            at = trio.current_time() + delay_ms / 1000
            self._sent += 1
            recipient = self.nodes[target]

            def arrive(recipient: "MemoryNetwork" = recipient) -> None:
                # The partition may have come, or the recipient gone, while the message was on its way.
                if self.nodes.get(target) is not recipient or not self.is_passable(source, target):
                    self.counters["lost"] += 1
                    return
                self.counters[what] += 1
                now_ms = round(trio.current_time() * 1000)
                self.trace.append(f"{now_ms} {what} {source.hex()[:8]} {target.hex()[:8]}")
                deliver(recipient)

            heapq.heappush(self._queue, (at, self._sent, arrive))
            self._woken.set()

    def start(self, network: "MemoryNetwork", work: Callable[[], Awaitable[object]]) -> None:
        """Run an async function for a node, until it ends or the node crashes."""
        self._nursery.start_soon(network.run_task, work)

    async def _deliver_forever(self) -> None:
        while True:
            self._woken = trio.Event()
            if not self._queue:
                await self._woken.wait()
                continue
            with trio.move_on_at(self._queue[0][0]):
                await self._woken.wait()
            while self._queue and self._queue[0][0] <= trio.current_time():
                heapq.heappop(self._queue)[2]()


class MemoryNetwork:
    """One node's `node.ports.Network`."""

    def __init__(self, hub: MemoryHub, node: NodeId, agent: str) -> None:
        self.hub = hub
        self.agent = agent
        self.connected: set[NodeId] = set()
        self.verdicts: Counter[GossipVerdict] = Counter()
        self._node = node
        self._inbound: dict[NodeId, bool] = {}
        self._addresses: set[NodeId] = set()
        self._gossip: dict[str, GossipHandler] = {}
        self._requests: dict[str, RequestHandler] = {}
        self._connects: list[ConnectHandler] = []
        self._seen: set[tuple[NodeId, int]] = set()
        self._published = 0
        self._scopes: set[trio.CancelScope] = set()
        self._lost: dict[NodeId, trio.Event] = {}
        """Set when the connection ends."""

    @property
    def node(self) -> NodeId:
        """Our own id."""
        return self._node

    @property
    def addresses(self) -> tuple[str, ...]:
        """One address, which `connect` of any node of the hub understands."""
        return (f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id(self._node)}",)

    async def run_task(self, work: Callable[[], Awaitable[object]]) -> None:
        """Run an async function until it ends or the node crashes."""
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                await work()
            finally:
                self._scopes.discard(scope)

    def cancel_tasks(self) -> None:
        """Cancel what runs for this node."""
        for scope in self._scopes:
            scope.cancel()

    def add_connection(self, other: NodeId, *, inbound: bool) -> None:
        """Record a connection and tell the handlers."""
        self.connected.add(other)
        self._lost[other] = trio.Event()
        self._inbound[other] = inbound
        self._addresses.add(other)
        for handler in self._connects:
            self.hub.start(self, partial(handler, other))

    def lose(self, other: NodeId) -> None:
        """Record the end of a connection: requests on it fail at once."""
        self.connected.discard(other)
        self._lost[other].set()

    def forget(self, other: NodeId) -> None:
        """Lose a node's address: it can't be dialled from here."""
        self._addresses.discard(other)

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip `data` to the connected peers."""
        if len(data) > GOSSIP_SIZE_MAX:
            raise ValueError(f"{len(data)} bytes are too many to gossip")
        await trio.lowlevel.checkpoint()
        self._published += 1
        message = (self._node, self._published)
        self._seen.add(message)
        self._forward(topic, data, message, None)

    def on_gossip(self, topic: str, handler: GossipHandler) -> None:
        """Subscribe to `topic`."""
        if topic in self._gossip:
            raise ValueError(f"topic {topic!r} has a handler already")
        self._gossip[topic] = handler

    def on_request(self, name: str, handler: RequestHandler) -> None:
        """Answer requests `name`."""
        if name in self._requests:
            raise ValueError(f"requests {name!r} have a handler already")
        self._requests[name] = handler

    def on_connect(self, handler: ConnectHandler) -> None:
        """Call `handler` for each new connection."""
        self._connects.append(handler)

    async def request(self, node: NodeId, name: str, data: bytes, *, timeout_ms: int = 10_000) -> bytes:
        """Ask `node`. Raises SwarmError; PeerRefused when it raised, or does not answer such requests."""
        if len(data) > MESSAGE_SIZE_MAX:
            raise ValueError(f"{len(data)} bytes are too many for a request")
        if node == self._node:
            raise SwarmError("a node does not ask itself")
        if node not in self.connected:
            if node not in self._addresses:
                raise SwarmError(f"no address known for {peer_id(node)}")
            await self.connect(f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id(node)}")
        answered, lost = trio.Event(), self._lost[node]
        replies: list[bytes | None] = []

        def reply(data: bytes | None) -> None:
            def arrive(_: MemoryNetwork) -> None:
                replies.append(data)
                answered.set()

            self.hub.send("reply", node, self._node, arrive)

        caller = self._node
        self.hub.send("request", caller, node, lambda target: target._answer(caller, name, data, reply))
        with trio.move_on_after(timeout_ms / 1000):
            await _first_of(answered, lost)
            if not replies:
                raise SwarmError(f"the connection with {peer_id(node)} was lost")
            if replies[0] is None:
                raise PeerRefused(f"{peer_id(node)} refused a request {name}")
            return replies[0]
        raise SwarmError(f"{peer_id(node)} did not answer {name}: timed out after {timeout_ms / 1000:g} s")

    async def connect(self, multiaddr: str) -> NodeId:
        """Connect with the node at an address that ends in /p2p/."""
        await trio.lowlevel.checkpoint()
        node = node_from_peer_id(multiaddr.rpartition("/p2p/")[2])
        if not self.hub.is_passable(self._node, node):
            raise SwarmError(f"{peer_id(node)} cannot be reached")
        self.hub.connect(self._node, node)
        return node

    def add_address(self, node: NodeId, multiaddrs: tuple[str, ...]) -> None:
        """Make `request` able to dial `node`."""
        if multiaddrs:
            self._addresses.add(node)

    def misdeeds(self, node: NodeId) -> tuple[str, ...]:
        """Return nothing: nobody is watched here."""
        del node
        return ()

    def peers(self) -> tuple[Peer, ...]:
        """Return the connected peers."""
        return tuple(
            Peer(other, "127.0.0.1", True, 1, self.hub.nodes[other].agent, self._inbound[other])
            for other in sorted(self.connected)
        )

    def _forward(self, topic: str, data: bytes, message: tuple[NodeId, int], source: NodeId | None) -> None:
        for other in sorted(self.connected):
            if other not in {source, message[0]}:
                self.hub.send(
                    "gossip",
                    self._node,
                    other,
                    lambda target: target._hear(topic, data, message, self._node),
                )

    def _hear(self, topic: str, data: bytes, message: tuple[NodeId, int], forwarder: NodeId) -> None:
        handler = self._gossip.get(topic)
        if handler is None or message in self._seen:
            return
        self._seen.add(message)
        verdict = handler(forwarder, data)
        self.verdicts[verdict] += 1
        if verdict is GossipVerdict.ACCEPT:
            self._forward(topic, data, message, forwarder)

    def _answer(self, caller: NodeId, name: str, data: bytes, reply: Callable[[bytes | None], None]) -> None:
        handler = self._requests.get(name)
        if handler is None:
            reply(None)
            return

        async def run() -> None:
            try:
                answer: bytes | None = await handler(caller, data)
            except AssertionError:
                raise
            except Exception:
                answer = None
            reply(answer)

        self.hub.start(self, run)


async def _first_of(*events: trio.Event) -> None:
    """Wait for any of the events."""
    async with trio.open_nursery() as nursery:

        async def wait(event: trio.Event) -> None:
            await event.wait()
            nursery.cancel_scope.cancel()

        for event in events:
            nursery.start_soon(wait, event)
