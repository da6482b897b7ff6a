"""Admitting peers: who has said hello is served, who has not is cut in time, and each only while there is room.

Says hello on each connection that we opened, hears it on those that others opened. A peer is admitted once for
all its connections, since Noise has proven its id on each. Refuses to open connections and to look at gossip.
"""

from collections import Counter
from collections.abc import Callable

import msgspec
import trio

from node.log import get_logger
from node.swarm.gossip import Gossip, node_of
from node.swarm.greeting import Greeter
from node.swarm.guards import Untyped, is_inbound, is_our_bug, open_stream_on, reset_quietly, tcp_stream
from node.swarm.hello import ADDRESSES_MAX, HELLO_PROTOCOL, HelloFailed, addresses_untrusted, agent_untrusted
from node.swarm.limits import SwarmLimits
from node.swarm.multiaddrs import Address, is_reachable_from
from node.swarm.peers import AddressGate, PeerBook, PeerState
from protocol.errors import MalformedRecord
from protocol.identity import NodeId, peer_id

log = get_logger(__name__)

STRANGER_COST = 4.0
"""Connection tokens that a failed hello takes from the remote address."""


class Lasting(msgspec.Struct, frozen=True, kw_only=True):
    """What outlives a session."""

    node: NodeId
    greeter: Greeter
    limits: SwarmLimits
    max_peers: int
    book: PeerBook
    gate: AddressGate
    gossip: Gossip
    counters: Counter[str]
    on_admitted: Callable[[PeerState], None]
    on_gone: Callable[[PeerState], None]


class Admission:
    """Hellos of one session.

    `connections` gives a node's connections, `register` is told of each hello, `advertised` gives our addresses.
    """

    def __init__(
        self,
        lasting: Lasting,
        connections: Callable[[NodeId], list[Untyped]],
        register: Callable[[NodeId], None],
        advertised: Callable[[], tuple[Address, ...]],
    ) -> None:
        self._lasting = lasting
        self._book = lasting.book
        self._timeout_s = lasting.limits.hello_timeout_ms / 1000
        self._connections = connections
        self._register = register
        self._advertised = advertised

    async def say_hello(self, conn: Untyped, state: PeerState) -> None:
        """Say hello on a connection that we opened, and end it when that fails."""
        reason = "it did not say hello in time"
        with trio.move_on_after(self._timeout_s):
            try:
                await self._greet(conn, state)
            except HelloFailed as error:
                reason = str(error)
            except Exception as error:
                if is_our_bug(error):
                    raise
                reason = "it does not say hello as a gpunode does"
                log.debug("swarm.hello_failed", peer=peer_id(state.node), error=repr(error))
            else:
                return
        self._lasting.counters["hellos_failed"] += 1
        if not state.admitted.is_set():
            state.cut_reason = state.cut_reason or reason
        conn.muxed_conn.cut()

    async def _greet(self, conn: Untyped, state: PeerState) -> None:
        stream = await open_stream_on(conn, HELLO_PROTOCOL)
        try:
            done = await self._lasting.greeter.greet(stream, state.node, self._addresses())
            await stream.close()
        except BaseException:
            with trio.CancelScope(shield=True):
                await reset_quietly(stream)
            raise
        self._admit(state, done.agent, done.addresses)

    async def expect_hello(self, state: PeerState) -> None:
        """Cut a peer that has connected and does not say hello."""
        await self.wait_hello(state)
        if not state.admitted.is_set() and not state.gone.is_set():
            self._refuse_stranger(state, "it did not say hello in time")

    async def hear_hello(self, stream: Untyped) -> None:
        """Answer a hello: the handler of its protocol."""
        node = node_of(stream.muxed_conn.peer_id)
        state = self._book.connected.get(node)
        if state is None:
            return
        with trio.move_on_after(self._timeout_s):
            try:
                confirm = await self._lasting.greeter.receive(stream, node)
                if self._is_full() and not state.admitted.is_set():
                    await self._lasting.greeter.turn_away(stream)
                    await stream.close()
                    self.cut(node, "there is no room for more peers")
                    return
                self._cut_older(stream.muxed_conn, node)
                self._admit(state, confirm.agent, confirm.addresses)
                await self._lasting.greeter.finish(stream, self._addresses())
                await stream.close()
            except (HelloFailed, MalformedRecord) as error:
                await stream.close()
                self._refuse_stranger(state, str(error))

    async def wait_hello(self, state: PeerState, *, slack_s: float = 0.0) -> None:
        """Return when the peer has said hello, has gone, or is too late."""
        if state.admitted.is_set() or state.gone.is_set():
            return
        with trio.move_on_after(self._timeout_s + slack_s):
            async with trio.open_nursery() as nursery:
                for event in (state.admitted, state.gone):
                    nursery.start_soon(_wait_then_cancel, event, nursery.cancel_scope)

    def settle(self, state: PeerState) -> None:
        """Record that the connections of an admitted peer are no longer pending."""
        for conn in self._connections(state.node):
            slot = tcp_stream(conn.muxed_conn).slot
            if slot is not None:
                self._lasting.gate.settle(slot)

    def cut(self, node: NodeId, reason: str) -> None:
        """End all connections with `node` at once."""
        state = self._book.connected.get(node)
        if state is not None:
            state.cut_reason = state.cut_reason or reason
        for conn in self._connections(node):
            conn.muxed_conn.cut()

    def _admit(self, state: PeerState, agent: str, addresses: tuple[str, ...]) -> None:
        if state.gone.is_set():
            return
        claimed = addresses_untrusted(addresses, state.node)
        believed = (address for address in claimed if is_reachable_from(address, state.address))
        self._book.remember(state.node, believed)
        is_new = not state.admitted.is_set()
        self._book.admit(state, agent_untrusted(agent))
        self.settle(state)
        self._register(state.node)
        if is_new:
            log.info("swarm.peer_connected", peer=peer_id(state.node), address=state.address, agent=state.agent)
            self._lasting.on_admitted(state)

    def _is_full(self) -> bool:
        """Return whether inbound peers have taken all but the slots kept for whom we dial ourselves."""
        max_peers = self._lasting.max_peers
        return self._lasting.gate.settled >= max(1, max_peers - max_peers // 4)

    def _refuse_stranger(self, state: PeerState, reason: str) -> None:
        self._lasting.counters["hellos_failed"] += 1
        self._lasting.gate.charge(state.address, STRANGER_COST)
        log.info("swarm.stranger_cut", peer=peer_id(state.node), address=state.address, reason=reason)
        self.cut(state.node, reason)

    def _cut_older(self, newest: Untyped, node: NodeId) -> None:
        """End earlier inbound connections of a peer: it dials again only when it has lost them."""
        for conn in self._connections(node):
            if conn.muxed_conn is not newest and is_inbound(conn):
                conn.muxed_conn.cut()

    def _addresses(self) -> tuple[str, ...]:
        return tuple(str(address) for address in self._advertised())[:ADDRESSES_MAX]


async def _wait_then_cancel(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
