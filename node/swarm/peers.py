"""What this node knows of other nodes: who is connected, where they can be dialled, what they did wrong.

Every table is bounded, since strangers fill them; the oldest entry makes room. Refuses to do IO and to load
libp2p; `clock` gives seconds of any epoch that never goes back.
"""

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import trio

from node.ports import Peer
from node.swarm.limits import SwarmLimits, TokenBucket
from node.swarm.multiaddrs import Address
from protocol.identity import NodeId

FAULTY_MAX = 4096
"""Nodes of which a penalty or a ban is kept."""
MISDEEDS_MAX = 8
"""Kinds of misdeeds kept of one node."""
ADDRESS_BOOK_MAX = 4096
ADDRESSES_PER_NODE_MAX = 8
LATELY_MAX = 256
"""Disconnected peers that `peers` still shows."""
REMOTE_ADDRESSES_MAX = 4096

FAULT_MALFORMED = 25.0
"""Bytes that no correct node sends."""
FAULT_REJECTED = 20.0
"""A gossiped record that a validator rejected."""
FAULT_HANDLER = 10.0
"""A request whose handler raised."""
FAULT_SLOW = 5.0
"""A request or frame that was begun and not finished in time."""
FAULT_FLOOD = 0.2
"""One request, stream or control frame above the allowed rate."""
FAULT_FLOOD_GOSSIP = 0.02
"""One gossiped message above it. Small: in a busy network honest forwarders pass the rate by a little, and must
not be banned for what others publish; one that passes it by fifty a second for long is."""

K = TypeVar("K")
V = TypeVar("V")


class _Bounded(OrderedDict[K, V], Generic[K, V]):
    """A dict that holds at most `size_max` entries: the one set longest ago goes first."""

    def __init__(self, size_max: int) -> None:
        super().__init__()
        self._size_max = size_max

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._size_max:
            self.popitem(last=False)


class PeerState:
    """A node that is connected now. `admitted` is set by a good hello; until then it may do nothing else."""

    def __init__(self, node: NodeId, address: str, *, inbound: bool, limits: SwarmLimits, now: float) -> None:
        self.node = node
        self.address = address
        self.inbound = inbound
        self.agent = ""
        self.latency_ms: int | None = None
        self.admitted = trio.Event()
        self.gone = trio.Event()
        self.cut_reason = ""
        self.streams = 0
        self.requests = 0
        self.gossip_bucket = TokenBucket(limits.gossip_per_s, limits.gossip_burst, now)
        self.control_bucket = TokenBucket(limits.control_per_s, limits.control_burst, now)
        self.request_bucket = TokenBucket(limits.requests_per_s, limits.requests_burst, now)

    def shown(self) -> Peer:
        """Return what `Network.peers` says of it."""
        return Peer(
            node=self.node,
            address=self.address,
            connected=self.admitted.is_set() and not self.gone.is_set(),
            latency_ms=self.latency_ms,
            agent=self.agent,
            inbound=self.inbound,
        )


class PeerBook:
    """The nodes that are connected, were lately, or are only known by their addresses."""

    def __init__(self, limits: SwarmLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self.connected: dict[NodeId, PeerState] = {}
        self._lately: _Bounded[NodeId, Peer] = _Bounded(LATELY_MAX)
        self._addresses: _Bounded[NodeId, tuple[Address, ...]] = _Bounded(ADDRESS_BOOK_MAX)
        self._penalties: _Bounded[NodeId, tuple[float, float]] = _Bounded(FAULTY_MAX)
        self._banned_until: _Bounded[NodeId, float] = _Bounded(FAULTY_MAX)
        self._misdeeds: _Bounded[NodeId, Counter[str]] = _Bounded(FAULTY_MAX)

    def add(self, node: NodeId, address: str, *, inbound: bool) -> PeerState:
        """Return the state of `node`, made now unless it has another connection already."""
        state = self.connected.get(node)
        if state is None:
            state = PeerState(node, address, inbound=inbound, limits=self._limits, now=self._clock())
            self.connected[node] = state
        return state

    def admit(self, state: PeerState, agent: str) -> None:
        """Record a good hello."""
        state.agent = agent
        state.admitted.set()

    def remove(self, node: NodeId) -> None:
        """Record that the last connection with `node` has ended. Idempotent."""
        state = self.connected.pop(node, None)
        if state is None:
            return
        state.gone.set()
        if state.admitted.is_set():
            self._lately[node] = state.shown()

    def admitted(self) -> list[PeerState]:
        """Return the connected peers that have said hello."""
        return [state for state in self.connected.values() if state.admitted.is_set()]

    def shown(self) -> tuple[Peer, ...]:
        """Return the connected peers, then those of this run that are no longer connected, newest first."""
        now_connected = [state.shown() for state in self.admitted()]
        known = {peer.node for peer in now_connected}
        return (*now_connected, *(peer for node, peer in reversed(self._lately.items()) if node not in known))

    # --- addresses

    def remember(self, node: NodeId, addresses: Iterable[Address]) -> None:
        """Remember where `node` may be dialled; the newest go first, and at most eight are kept."""
        kept = dict.fromkeys((*addresses, *self._addresses.get(node, ())))
        if kept:
            self._addresses[node] = tuple(kept)[:ADDRESSES_PER_NODE_MAX]

    def addresses_of(self, node: NodeId) -> tuple[Address, ...]:
        """Return the remembered addresses of `node`."""
        return self._addresses.get(node, ())

    # --- faults

    def is_banned(self, node: NodeId) -> bool:
        """Return whether `node` is to be refused."""
        until = self._banned_until.get(node)
        if until is None:
            return False
        if until > self._clock():
            return True
        del self._banned_until[node]
        return False

    def penalise(self, node: NodeId, points: float) -> bool:
        """Hold `points` against `node`; return True when that was too much, and it is banned from now on."""
        now = self._clock()
        score, updated = self._penalties.get(node, (0.0, now))
        score = max(0.0, score - (now - updated) * self._limits.penalty_decay_per_s) + points
        if score <= self._limits.penalty_max:
            self._penalties[node] = (score, now)
            return False
        self._penalties.pop(node, None)
        self._banned_until[node] = now + self._limits.ban_ms / 1000
        return True

    def note_misdeed(self, node: NodeId, reason: str) -> None:
        """Remember what `node` did wrong, for people."""
        counts = self._misdeeds.get(node, Counter())
        # The newest last, and the oldest kind goes when there are many.
        counts[reason] = counts.pop(reason, 0) + 1
        if len(counts) > MISDEEDS_MAX:
            del counts[next(iter(counts))]
        self._misdeeds[node] = counts

    def misdeeds(self, node: NodeId) -> tuple[str, ...]:
        """Return what `node` did wrong in this run, the newest kind first."""
        counts = self._misdeeds.get(node, Counter())
        lines = [f"{reason} ({count} times)" if count > 1 else reason for reason, count in counts.items()]
        return tuple(reversed(lines))


class InboundSlot:
    """One accepted connection. Pending until its peer has said hello."""

    __slots__ = ("address", "group", "is_settled")

    def __init__(self, address: str) -> None:
        self.address = address
        self.group = _group(address)
        self.is_settled = False


class AddressGate:
    """How many connections each remote IP address (for IPv6: each /64 prefix) may open, and hold.

    Connections whose peer has not said hello have few slots of their own, and fewer per address: so
    neither silent strangers nor one address alone can take the place of peers.
    """

    def __init__(self, limits: SwarmLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._open: Counter[str] = Counter()
        self._pending: Counter[str] = Counter()
        self._buckets: _Bounded[str, TokenBucket] = _Bounded(REMOTE_ADDRESSES_MAX)
        self.settled = 0
        """Inbound connections whose peer has said hello."""

    @property
    def pending(self) -> int:
        """Inbound connections whose peer has not said hello yet."""
        return self._pending.total()

    def open(self, address: str) -> InboundSlot | None:
        """Return a slot for a connection from `address` (close it in the end), or None when it may have none."""
        slot = InboundSlot(address)
        if (
            self.pending >= self._limits.pending_max
            or self._pending[slot.group] >= self._limits.pending_per_address
            or self._open[slot.group] >= self._limits.connections_per_address
            or not self._bucket(slot.group).take(self._clock())
        ):
            self._forget_zeros(slot.group)
            return None
        self._open[slot.group] += 1
        self._pending[slot.group] += 1
        return slot

    def settle(self, slot: InboundSlot) -> None:
        """Record that the slot's peer has said hello. Idempotent."""
        if not slot.is_settled:
            slot.is_settled = True
            self.settled += 1
            self._pending[slot.group] -= 1
            self._forget_zeros(slot.group)

    def close(self, slot: InboundSlot) -> None:
        """Give the slot back."""
        self._open[slot.group] -= 1
        if slot.is_settled:
            self.settled -= 1
        else:
            self._pending[slot.group] -= 1
        self._forget_zeros(slot.group)

    def charge(self, address: str, tokens: float) -> None:
        """Make `address` wait longer before it may connect again."""
        self._bucket(_group(address)).charge(self._clock(), tokens)

    def _bucket(self, group: str) -> TokenBucket:
        now = self._clock()
        bucket = self._buckets.get(group)
        if bucket is None:
            bucket = TokenBucket(self._limits.connects_per_s, self._limits.connects_burst, now)
        self._buckets[group] = bucket  # most recent last, so that an idle address is forgotten first
        return bucket

    def _forget_zeros(self, group: str) -> None:
        for counts in (self._open, self._pending):
            if not counts[group]:
                del counts[group]


def _group(address: str) -> str:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
