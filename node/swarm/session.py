"""One life of the libp2p host: from listening to the end or to a crash of the library.

What must survive a crash (the topics, the peers' faults and addresses, the ports) belongs to the caller and is
handed to the next session. This class is the `Gatekeeper` of `node.swarm.guards`: it says which connections and
streams are allowed, and cuts whoever misbehaves. Refuses to reconnect or to restart: `network` does.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.exceptions import BaseLibp2pError
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.identify import identify_handler_for
from libp2p.peer.id import ID
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from node.errors import PeerRefused, SwarmError
from node.log import get_logger
from node.swarm.admission import Admission, Lasting
from node.swarm.dialling import check_free, expand, explain, resolve
from node.swarm.gossip import GuardedPubsub, id_bytes, node_from_bytes, node_of
from node.swarm.guards import (
    GuardedHost,
    GuardedYamux,
    Untyped,
    is_inbound,
    is_our_bug,
    reset_quietly,
    tame_library,
    tcp_stream,
)
from node.swarm.hello import HELLO_PROTOCOL
from node.swarm.multiaddrs import Address, parse_multiaddr
from node.swarm.peers import FAULT_FLOOD, FAULT_MALFORMED, InboundSlot, PeerState
from node.swarm.stack import make_swarm
from protocol.identity import NodeId, peer_id

log = get_logger(__name__)

TEND_INTERVAL_S = 5.0
REASON_SIZE_MAX = 200
BAN_COST = 16.0
"""Connection tokens that a ban takes from the remote address."""
_CUT_S = 2.0
_CUT_POLL_S = 0.02


class Session:
    """A running host, its gossip and its peers."""

    def __init__(self, seed: bytes, lasting: Lasting) -> None:
        tame_library()
        self._lasting = lasting
        self._limits = lasting.limits
        self._book = lasting.book
        self._streams: Counter[bytes] = Counter()
        self._nursery: trio.Nursery | None = None
        self.listening: tuple[Address, ...] = ()
        keys = create_new_key_pair(seed)
        self.swarm = make_swarm(keys, lasting.limits, lasting.max_peers + lasting.limits.pending_max, self)
        self._admission = Admission(lasting, self._connections, self._register, self.advertised)
        self.host = GuardedHost(self.swarm, self, {HELLO_PROTOCOL: self._admission.hear_hello})
        self.host.set_stream_handler(IDENTIFY, self._gated(identify_handler_for(self.host)))
        self.pubsub = GuardedPubsub(self.host, self, lasting.gossip)

    async def run(
        self,
        listen: tuple[Address, ...],
        *,
        task_status: Any = trio.TASK_STATUS_IGNORED,  # noqa: ANN401
    ) -> None:
        """Listen and serve until cancelled; `started` is called when peers can connect.

        Raises SwarmError when an address cannot be listened on, and whatever ends libp2p.
        """
        async with background_trio_service(self.swarm):
            try:
                # Gossip runs before the first connection: peers that connect earlier never register.
                async with (
                    background_trio_service(self.pubsub),
                    background_trio_service(self.pubsub.router),
                    trio.open_nursery() as nursery,
                ):
                    self._nursery = nursery
                    await self.pubsub.wait_until_ready()
                    for topic in self._lasting.gossip.topics:
                        await self.pubsub.subscribe(topic)
                    await self._listen(listen)
                    task_status.started()
                    await self._tend()
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(5):
                    await self._close()

    # --- what the network asks of a session

    def subscribe(self, topic: str) -> None:
        """Join a topic, named as it travels, soon."""
        if self._nursery is not None:
            self._nursery.start_soon(self.pubsub.subscribe, topic)

    def set_handler(self, protocol: str, handler: Callable[[Untyped], Any]) -> None:
        """Answer streams of `protocol` (the handler checks for the hello itself)."""
        self.host.set_stream_handler(protocol, handler)

    async def connect(self, address: Address) -> PeerState:
        """Dial `address`, which names its node, and return its state after the hello. Raises SwarmError."""
        node = address.node
        if node is None:
            raise SwarmError(
                f"{address} does not say which node it leads to", hint="append /p2p/ and the node's peer id"
            )
        if node == self._lasting.node:
            raise SwarmError(f"{address} is this node's own address")
        state = await self._living(node)
        if state is None:
            await self._dial(address, node)
            state = self._book.connected.get(node)
        if state is not None:
            # A little longer than the hello itself may take, so that its own reason for failing comes first.
            await self._admission.wait_hello(state, slack_s=_CUT_S)
            if state.admitted.is_set() and not state.gone.is_set():
                return state
        reason = state.cut_reason if state is not None else ""
        raise SwarmError(
            f"{peer_id(node)} at {address.transport} cannot be joined: {reason or 'it closed the connection'}"
        )

    async def reached(self, node: NodeId) -> PeerState | None:
        """Return the state of a peer that can be asked now, or None when it must be dialled first."""
        state = await self._living(node)
        return state if state is not None and state.admitted.is_set() else None

    async def open_stream(self, node: NodeId, protocol: str) -> Untyped:
        """Open a stream to an admitted peer. Raises SwarmError; PeerRefused when it does not know `protocol`."""
        try:
            return await self.host.new_stream(ID(id_bytes(node)), [protocol])
        except BaseLibp2pError as error:
            if str(error.__cause__).startswith("protocols not supported"):
                raise PeerRefused(f"{peer_id(node)} does not answer {protocol}") from error
            raise SwarmError(f"{peer_id(node)} could not be asked: its connection or stream was closed") from error

    def is_connected(self, node: NodeId) -> bool:
        """Return whether a live connection with `node` exists."""
        return any(
            not conn.muxed_conn.event_shutting_down.is_set() and not tcp_stream(conn.muxed_conn).is_cut
            for conn in self._connections(node)
        )

    def fault(self, node: NodeId, points: float, reason: str) -> None:
        """Hold something against a peer; cut and ban it when that was too much."""
        self._book.note_misdeed(node, reason[:REASON_SIZE_MAX])
        if not self._book.penalise(node, points):
            return
        self._book.note_misdeed(node, "cut, and banned for a while")
        self._lasting.counters["peers_banned"] += 1
        log.warning("swarm.peer_cut", peer=peer_id(node), reason=reason)
        state = self._book.connected.get(node)
        if state is not None:
            self._lasting.gate.charge(state.address, BAN_COST)
        self._admission.cut(node, f"we banned it: {reason}")

    def measure(self, state: PeerState) -> None:
        """Take the latest latency of a peer from its connections."""
        latencies = [conn.muxed_conn.latency_ms for conn in self._connections(state.node)]
        state.latency_ms = min((latency for latency in latencies if latency is not None), default=None)

    def advertised(self) -> tuple[Address, ...]:
        """Return the addresses of this node as others may dial them."""
        return tuple(expanded for address in self.listening for expanded in expand(address))

    # --- Gatekeeper

    def open_connection(self, address: str) -> InboundSlot | None:
        """Gatekeeper: ask the address gate."""
        slot = self._lasting.gate.open(address)
        if slot is None:
            self._lasting.counters["connections_refused"] += 1
        return slot

    def close_connection(self, slot: InboundSlot) -> None:
        """Gatekeeper: an inbound connection has ended."""
        self._lasting.gate.close(slot)

    def refusal(self, peer: Untyped) -> str:
        """Gatekeeper: only Ed25519 nodes, not ourselves, nobody banned."""
        node = node_from_bytes(peer.to_bytes())
        if node is None:
            return "its key is not Ed25519"
        if node == self._lasting.node:
            return "it is this node itself"
        return "it is banned for a while" if self._book.is_banned(node) else ""

    def connecting(self, muxed_conn: GuardedYamux, *, inbound: bool) -> None:
        """Gatekeeper: keep the peer's state from before its first stream."""
        remote = muxed_conn.get_remote_address()
        self._book.add(node_of(muxed_conn.peer_id), remote[0] if remote else "0.0.0.0", inbound=inbound)  # noqa: S104 - shown, not bound

    def connected(self, conn: Untyped) -> None:
        """Gatekeeper: say hello to whom we dialled, expect it of whoever dialled us."""
        inbound = is_inbound(conn)
        self.connecting(conn.muxed_conn, inbound=inbound)
        state = self._book.connected[node_of(conn.muxed_conn.peer_id)]
        if self._nursery is None:
            return
        if not inbound:
            # Even when the peer is admitted: it may have restarted, and lost what it knew.
            self._nursery.start_soon(self._admission.say_hello, conn, state)
        elif state.admitted.is_set():
            self._admission.settle(state)
        else:
            self._nursery.start_soon(self._admission.expect_hello, state)

    def disconnected(self, peer: Untyped) -> None:
        """Gatekeeper: forget the peer with its last connection."""
        if self.swarm.get_connections(peer):
            return
        node = node_of(peer)
        state = self._book.connected.get(node)
        if state is not None:
            self._book.remove(node)
            self._lasting.on_gone(state)

    def take_stream(self, peer: Untyped) -> bool:
        """Gatekeeper: so many streams of one peer, and no more."""
        key = peer.to_bytes()
        if self._streams[key] >= self._limits.streams_per_peer:
            self.fault(node_of(peer), FAULT_FLOOD, "too many streams")
            return False
        self._streams[key] += 1
        return True

    def release_stream(self, peer: Untyped) -> None:
        """Gatekeeper: one stream less."""
        key = peer.to_bytes()
        self._streams[key] -= 1
        if not self._streams[key]:
            del self._streams[key]

    def stream_failed(self, peer: Untyped, error: BaseException) -> None:
        """Gatekeeper: broken streams are nobody's fault; anything else was caused by the peer's bytes."""
        self._lasting.counters["streams_failed"] += 1
        is_broken = isinstance(
            error, (BaseLibp2pError, EOFError, trio.ClosedResourceError, trio.BrokenResourceError)
        )
        self.fault(node_of(peer), FAULT_FLOOD if is_broken else FAULT_MALFORMED, f"a failed stream: {error!r}")

    def is_admitted(self, peer: Untyped) -> bool:
        """Gatekeeper: whether the peer has said hello."""
        state = self._book.connected.get(node_of(peer))
        return state is not None and state.admitted.is_set()

    async def wait_admitted(self, peer: Untyped) -> PeerState | None:
        """Gatekeeper: a peer's first streams may overtake our record of its hello."""
        state = self._book.connected.get(node_of(peer))
        if state is None:
            return None
        await self._admission.wait_hello(state)
        return state if state.admitted.is_set() and not state.gone.is_set() else None

    # --- the rest

    async def _living(self, node: NodeId) -> PeerState | None:
        """Return the state of a connected peer, or None. One whose connections are just ending is waited for."""
        with trio.move_on_after(_CUT_S):
            while (state := self._book.connected.get(node)) is not None:
                if self.is_connected(node):
                    return state
                with trio.move_on_after(_CUT_POLL_S):
                    await state.gone.wait()
        return None

    def _register(self, node: NodeId) -> None:
        self.pubsub.admit(ID(id_bytes(node)))

    def _gated(self, handler: Callable[[Untyped], Any]) -> Callable[[Untyped], Any]:
        """Return a stream handler that answers admitted peers only."""

        async def gated(stream: Untyped) -> None:
            if await self.wait_admitted(stream.muxed_conn.peer_id) is None:
                await reset_quietly(stream)
                return
            with trio.move_on_after(self._limits.request_timeout_ms / 1000):
                await handler(stream)

        return gated

    async def _dial(self, address: Address, node: NodeId) -> None:
        reason = ""
        for resolved in await resolve(address):
            with trio.move_on_after(self._limits.dial_timeout_ms / 1000) as scope:
                try:
                    await self.swarm.dial_addr(Multiaddr(str(resolved)), ID(id_bytes(node)))
                except Exception as error:
                    if is_our_bug(error):
                        raise
                    reason = reason or explain(error)
                else:
                    return
            if scope.cancelled_caught:
                reason = reason or f"no answer within {self._limits.dial_timeout_ms / 1000:g} s"
        raise SwarmError(f"{peer_id(node)} at {address.transport} cannot be reached: {reason}")

    async def _listen(self, listen: tuple[Address, ...]) -> None:
        for address in listen:
            check_free(address)
        listening = []
        for address in listen:
            await self.swarm.listen(Multiaddr(address.transport))
            listener = self.swarm.listeners.get(str(Multiaddr(address.transport)))
            bound = [parse_multiaddr(str(maddr)) for maddr in listener.get_addrs()] if listener else []
            if not bound:
                raise SwarmError(f"cannot listen on {address.transport}")
            listening += [Address(one.kind, one.host, one.port, self._lasting.node) for one in bound]
        self.listening = tuple(listening)

    async def _tend(self) -> None:
        """Register again with gossip whoever libp2p has given up on."""
        while True:
            await trio.sleep(TEND_INTERVAL_S)
            for state in self._book.admitted():
                self._register(state.node)

    async def _close(self) -> None:
        self._nursery = None
        for conn in self.swarm.get_connections():
            conn.muxed_conn.cut()
        for listener in self.swarm.listeners.values():
            await listener.close()
        for state in list(self._book.connected.values()):
            self._book.remove(state.node)
            self._lasting.on_gone(state)

    def _connections(self, node: NodeId) -> list[Untyped]:
        found: list[Untyped] = self.swarm.get_connections(ID(id_bytes(node)))
        return list(found)
