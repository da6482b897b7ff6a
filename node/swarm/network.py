"""`node.ports.Network` on libp2p: runs the host under a supervisor, and keeps it connected.

What the node wants (topics, handlers, peers to hold) is kept here and survives a crash of libp2p: the supervisor
starts the next session on the same ports with the same identity. Refuses to know what is carried.
"""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import nacl.bindings
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.stream.exceptions import StreamReset

from node.errors import PeerRefused, SwarmError
from node.log import get_logger
from node.ports import ConnectHandler, GossipHandler, Peer, RequestHandler
from node.swarm.admission import Lasting
from node.swarm.dialling import RECONNECT_GROWTH_PERMILLE, Backoff
from node.swarm.gossip import Gossip, topic_name
from node.swarm.greeting import Greeter
from node.swarm.guards import Untyped, is_our_bug, tcp_stream
from node.swarm.hello import AGENT_SIZE_MAX
from node.swarm.limits import GOSSIP_SIZE_MAX, MESSAGE_SIZE_MAX, SwarmLimits, TokenBucket
from node.swarm.multiaddrs import Address, parse_multiaddr
from node.swarm.peers import AddressGate, PeerBook, PeerState
from node.swarm.requests import Answerer, ask, protocol_name
from node.swarm.session import Session
from protocol.errors import MalformedRecord
from protocol.identity import NetworkId, NodeId, peer_id

log = get_logger(__name__)

WON_BACK_MAX = 32
"""Lost peers that are dialled again at the same time."""
OPEN_ATTEMPTS_MAX = 3
STEADY_S = 60.0
"""A session that lived so long was no part of a series of crashes."""


class SwarmNetwork:
    """A running swarm. Made by `run_swarm`."""

    def __init__(
        self,
        seed: bytes,
        *,
        network: NetworkId,
        network_key: bytes,
        max_peers: int,
        agent: str,
        limits: SwarmLimits,
    ) -> None:
        self._seed = seed
        self._network = network
        self._limits = limits
        node = NodeId(nacl.bindings.crypto_sign_seed_keypair(seed)[0])
        self.counters: Counter[str] = Counter()
        """How often what happened, by name: gossip_accept, requests_answered, hellos_failed ..."""
        book = PeerBook(limits, trio.current_time)
        self._lasting = Lasting(
            node=node,
            greeter=Greeter(node, network, network_key, agent[:AGENT_SIZE_MAX]),
            limits=limits,
            max_peers=max_peers,
            book=book,
            gate=AddressGate(limits, trio.current_time),
            gossip=Gossip(node, network, limits, self._fault, self.counters),
            counters=self.counters,
            on_admitted=self._on_admitted,
            on_gone=self._on_gone,
        )
        self._book = book
        self._answers: dict[str, RequestHandler] = {}
        self._connect_handlers: list[ConnectHandler] = []
        self._publish_bucket = TokenBucket(limits.publish_per_s, limits.publish_burst, trio.current_time())
        self._session: Session | None = None
        self._ready = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._held: set[NodeId] = set()
        self._attempts: dict[NodeId, _Attempt] = {}

    # --- node.ports.Network

    @property
    def node(self) -> NodeId:
        """Our own id."""
        return self._lasting.node

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs at which we listen, a wildcard shown as this machine's addresses; () during a restart."""
        session = self._session
        return () if session is None else tuple(str(address) for address in session.advertised())

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip `data` under `topic`; waits when we publish too fast. Raises ValueError when it is too long."""
        name = topic_name(self._network, topic)
        if len(data) > GOSSIP_SIZE_MAX:
            raise ValueError(f"{len(data)} bytes are too many to gossip: at most {GOSSIP_SIZE_MAX}")
        await trio.sleep(self._publish_bucket.charge(trio.current_time(), 1))
        session = self._session
        if session is None:
            self.counters["publishes_lost"] += 1
            return
        try:
            await session.pubsub.publish(name, data)
        except Exception as error:
            if is_our_bug(error):
                raise
            self.counters["publishes_lost"] += 1
            log.warning("swarm.publish_failed", topic=topic, error=repr(error))

    def on_gossip(self, topic: str, handler: GossipHandler) -> None:
        """Subscribe to `topic`. Raises ValueError for a second handler of one topic."""
        name = self._lasting.gossip.add_topic(topic, handler)
        if self._session is not None:
            self._session.subscribe(name)

    def on_request(self, name: str, handler: RequestHandler) -> None:
        """Answer requests `name`. Raises ValueError for a second handler of one name."""
        protocol = protocol_name(name)
        if protocol in self._answers:
            raise ValueError(f"requests {name!r} have a handler already")
        self._answers[protocol] = handler
        if self._session is not None:
            self._set_answer(self._session, protocol, handler)

    def on_connect(self, handler: ConnectHandler) -> None:
        """Call `handler` in a task of its own whenever a peer has said hello."""
        self._connect_handlers.append(handler)

    async def request(self, node: NodeId, name: str, data: bytes, *, timeout_ms: int = 10_000) -> bytes:
        """Ask `node`, dialling it when it is not connected. Raises SwarmError; PeerRefused when it says no."""
        protocol = protocol_name(name)
        if len(data) > MESSAGE_SIZE_MAX:
            raise ValueError(f"{len(data)} bytes are too many for a request: at most {MESSAGE_SIZE_MAX}")
        if node == self.node:
            raise SwarmError("a node does not ask itself")
        with trio.move_on_after(timeout_ms / 1000):
            return await self._ask(node, protocol, data)
        raise SwarmError(f"{peer_id(node)} did not answer {name}: timed out after {timeout_ms / 1000:g} s")

    async def connect(self, multiaddr: str) -> NodeId:
        """Dial an address with /p2p/, say hello, and return whom it leads to. Raises SwarmError."""
        try:
            address = parse_multiaddr(multiaddr)
        except ValueError as error:
            raise SwarmError(str(error)) from None
        session = await self._live()
        state = await session.connect(address)
        self._book.remember(state.node, (address,))
        return state.node

    def add_address(self, node: NodeId, multiaddrs: tuple[str, ...]) -> None:
        """Remember where `node` may be dialled; addresses that do not parse or name another node are left out."""
        addresses = []
        for text in multiaddrs:
            try:
                address = parse_multiaddr(text)
            except ValueError:
                continue
            if address.node in {None, node}:
                addresses.append(Address(address.kind, address.host, address.port, node))
        self._book.remember(node, addresses)

    def peers(self) -> tuple[Peer, ...]:
        """Return the peers of this run, connected ones first."""
        if self._session is not None:
            for state in self._book.admitted():
                self._session.measure(state)
        return self._book.shown()

    def misdeeds(self, node: NodeId) -> tuple[str, ...]:
        """Return what `node` did wrong in this run, the newest kind first."""
        return self._book.misdeeds(node)

    # --- asking

    async def _ask(self, node: NodeId, protocol: str, data: bytes) -> bytes:
        stream = await self._open_stream(node, protocol)
        try:
            return await ask(stream, data)
        except (StreamReset, EOFError, MalformedRecord) as error:
            if stream.muxed_conn.event_shutting_down.is_set() or tcp_stream(stream.muxed_conn).is_cut:
                raise SwarmError(f"the connection with {peer_id(node)} was lost") from error
            if isinstance(error, MalformedRecord):
                raise PeerRefused(f"{peer_id(node)} answered {protocol} wrongly: {error}") from error
            raise PeerRefused(f"{peer_id(node)} refused a request {protocol}") from error
        except BaseLibp2pError as error:
            raise SwarmError(f"the connection with {peer_id(node)} broke: {error}") from error

    async def _open_stream(self, node: NodeId, protocol: str) -> Untyped:
        """Open a stream to `node`; again when its connection ends just then, since nothing was asked yet."""
        for _ in range(OPEN_ATTEMPTS_MAX - 1):
            session = await self._live()
            await self._reach(session, node)
            try:
                return await session.open_stream(node, protocol)
            except PeerRefused:
                raise
            except SwarmError as error:
                log.debug("swarm.stream_failed", peer=peer_id(node), error=str(error))
        session = await self._live()
        await self._reach(session, node)
        return await session.open_stream(node, protocol)

    async def _live(self) -> Session:
        """Return the running session; during a restart wait for the next one."""
        while self._session is None:
            await self._ready.wait()
        return self._session

    async def _reach(self, session: Session, node: NodeId) -> PeerState:
        """Return the state of `node` after its hello. Who asks while it is being dialled shares the outcome."""
        while True:
            state = await session.reached(node)
            if state is not None:
                return state
            attempt = self._attempts.get(node)
            if attempt is None:
                break
            await attempt.done.wait()
            if attempt.failure is not None:
                raise SwarmError(str(attempt.failure), hint=attempt.failure.hint)
        attempt = self._attempts[node] = _Attempt()
        try:
            return await self._dial_addresses(session, node)
        except SwarmError as error:
            attempt.failure = error
            raise
        finally:
            del self._attempts[node]
            attempt.done.set()

    async def _dial_addresses(self, session: Session, node: NodeId) -> PeerState:
        failure = SwarmError(
            f"no address known for {peer_id(node)}", hint="connect to it once: gpunode peers connect ADDRESS"
        )
        for address in self._book.addresses_of(node):
            try:
                return await session.connect(address)
            except SwarmError as error:
                failure = error
        raise failure

    # --- what sessions report

    def _fault(self, node: NodeId, points: float, reason: str) -> None:
        if self._session is not None:
            self._session.fault(node, points, reason)

    def _on_admitted(self, state: PeerState) -> None:
        if self._nursery is not None:
            for handler in self._connect_handlers:
                self._nursery.start_soon(self._call, handler, state.node)

    async def _call(self, handler: ConnectHandler, node: NodeId) -> None:
        try:
            await handler(node)
        except Exception as error:
            if is_our_bug(error):
                raise
            log.exception("swarm.connect_handler_failed", peer=peer_id(node))

    def _on_gone(self, state: PeerState) -> None:
        if not state.admitted.is_set():
            return
        log.info("swarm.peer_gone", peer=peer_id(state.node), reason=state.cut_reason or "its connection ended")
        if self._nursery is None or state.cut_reason:
            return
        if state.node not in self._held and len(self._held) < WON_BACK_MAX and self._book.addresses_of(state.node):
            self._nursery.start_soon(self._win_back, state.node)

    # --- keeping connected

    def _patience(self) -> Backoff:
        limits = self._limits
        return Backoff(limits.backoff_initial_ms, limits.backoff_max_ms, growth_permille=RECONNECT_GROWTH_PERMILLE)

    async def _hold(self, address: Address) -> None:
        """Keep a connection with a bootstrap peer, for ever."""
        node = address.node
        if node is None or node == self.node:
            return
        self._book.remember(node, (address,))
        backoff = self._patience()
        while True:
            try:
                session = await self._live()
                state = await self._reach(session, node)
            except SwarmError as error:
                log.info("swarm.bootstrap_failed", address=str(address), reason=str(error))
            else:
                backoff.reset()
                await state.gone.wait()
            await backoff.wait()

    async def _win_back(self, node: NodeId) -> None:
        """Dial a lost peer again, a bounded number of times."""
        self._held.add(node)
        backoff = self._patience()
        try:
            for _ in range(self._limits.remembered_attempts):
                await backoff.wait()
                try:
                    await self._reach(await self._live(), node)
                except SwarmError:
                    continue
                return
        finally:
            self._held.discard(node)

    # --- supervising

    async def supervise(
        self,
        listen: tuple[Address, ...],
        *,
        task_status: Any = trio.TASK_STATUS_IGNORED,  # noqa: ANN401
    ) -> None:
        """Run sessions one after another until cancelled. `started` gets a failed first start's error, or None."""
        backoff = Backoff(self._limits.restart_backoff_initial_ms, self._limits.restart_backoff_max_ms)
        started = False
        while True:
            began = trio.current_time()
            crash: BaseException | None = None
            try:
                async with trio.open_nursery() as nursery:
                    session = Session(self._seed, self._lasting)
                    for protocol, handler in self._answers.items():
                        self._set_answer(session, protocol, handler)
                    await nursery.start(session.run, listen)
                    listen = session.listening
                    self._session = session
                    self._ready.set()
                    if not started:
                        started = True
                        task_status.started(None)
            except* Exception as group:
                if is_our_bug(group):
                    raise
                crash = group
            finally:
                self._session = None
                self._ready = trio.Event()
            if not started:
                task_status.started(_first_swarm_error(crash))
                return
            self.counters["restarts"] += 1
            log.error("swarm.host_crashed", error=repr(crash))
            if trio.current_time() - began > STEADY_S:
                backoff.reset()
            await backoff.wait()

    async def hold_bootstrap(self, nursery: trio.Nursery, addresses: tuple[Address, ...]) -> None:
        """Start to keep connections with the bootstrap peers; `nursery` also runs whatever peers cause."""
        self._nursery = nursery
        for address in addresses:
            if address.node is not None:
                self._held.add(address.node)
                nursery.start_soon(self._hold, address)

    def _set_answer(self, session: Session, protocol: str, handler: RequestHandler) -> None:
        session.set_handler(
            protocol, Answerer(protocol, handler, session, self._limits, self._fault, self.counters)
        )


class _Attempt:
    """A dial that others may wait for."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.failure: SwarmError | None = None


@asynccontextmanager
async def run_swarm(
    seed: bytes,
    *,
    listen: tuple[str, ...],
    network: NetworkId,
    network_key: bytes,
    bootstrap: tuple[str, ...],
    max_peers: int,
    agent: str,
    limits: SwarmLimits,
) -> AsyncGenerator[SwarmNetwork, None]:
    """As `node.swarm.open_swarm`, which see."""
    listen_addresses = tuple(_parse(text) for text in listen)
    bootstrap_addresses = tuple(_parse(text) for text in bootstrap)
    for address in bootstrap_addresses:
        if address.node is None:
            raise SwarmError(f"{address} does not say which node it leads to", hint="append /p2p/ and its peer id")
    swarm = SwarmNetwork(
        seed, network=network, network_key=network_key, max_peers=max_peers, agent=agent, limits=limits
    )
    failure: Exception | None
    async with trio.open_nursery() as nursery:
        failure = await nursery.start(swarm.supervise, listen_addresses)
        if failure is None:
            await swarm.hold_bootstrap(nursery, bootstrap_addresses)
            try:
                yield swarm
            except Exception as error:  # raised again outside, where the nursery does not wrap it in a group
                failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


def _parse(text: str) -> Address:
    try:
        return parse_multiaddr(text)
    except ValueError as error:
        raise SwarmError(str(error)) from None


def _first_swarm_error(error: BaseException | None) -> SwarmError:
    """Return the SwarmError inside a group, or one that says what ended the first start."""
    pending = [error]
    while pending:
        current = pending.pop()
        if isinstance(current, SwarmError):
            return current
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
    return SwarmError(f"the swarm could not be started: {error!r}")
