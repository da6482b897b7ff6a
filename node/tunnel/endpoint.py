"""One UDP socket of tunnels: the provider's listens, the renter's dials.

Two tasks move datagrams between the socket and the connections; nothing in here waits for anything but the socket
and the clock. Refuses identities that are not admitted, more than a bounded number of connections and handshakes,
and to let one connection's failure touch another.
"""

import errno
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import trio

from node.errors import TunnelClosed, TunnelError
from node.log import get_logger
from node.tunnel.connection import Connection
from node.tunnel.engine import QuicEngine
from node.tunnel.gate import Admitted, Gate, Ignored, Retried, destination_cid_untrusted
from node.tunnel.identity import TunnelIdentity
from node.tunnel.limits import LIMITS, TunnelLimits
from node.tunnel.seam import Address, Datagram, EndedBy
from node.tunnel.udp import bind_udp
from protocol.identity import KEY_SIZE

log = get_logger(__name__)

Admit = frozenset[bytes] | Callable[[bytes], bool]
"""Which 32-byte Ed25519 tunnel keys may dial us. An empty set: nobody, and first packets are not even parsed."""

_BATCH_MAX = 64
"""Datagrams taken from the socket before other tasks get their turn: about 10 ms of work."""
_TICK_MIN_S = 0.001
"""Timers fire at most this often (the kernel's own granularity): an engine whose timer stays in the past must not
spin the loop."""
_RECEIVE_SIZE = 65_535


class EndpointCounts(msgspec.Struct):
    """What one endpoint has seen since it was opened."""

    received: int = 0
    """Datagrams taken from the socket."""
    sent: int = 0
    unsent: int = 0
    """Datagrams that the kernel refused (a full buffer, no route): they count as lost on the way."""
    ignored: int = 0
    """Datagrams that belonged to no connection and began none."""
    retried: int = 0
    """First packets answered with a token."""
    begun: int = 0
    """Handshakes begun by others."""
    opened: int = 0
    """Connections that got past the proof of both identities."""


class Endpoint:
    """Implements `node.ports.TunnelEndpoint`. Made by `open_endpoint`."""

    def __init__(self, sock: socket.socket, identity: TunnelIdentity, admit: Admit, limits: TunnelLimits) -> None:
        self.counts = EndpointCounts()
        self._socket = sock
        self._port: int = sock.getsockname()[1]
        self._identity = identity
        self._admits = admit.__contains__ if isinstance(admit, frozenset) else admit
        self._is_listening = admit != frozenset()
        self._limits = limits
        self._gate = Gate(limits)
        self._connections: set[Connection] = set()
        self._by_cid: dict[bytes, Connection] = {}
        self._dirty: set[Connection] = set()
        self._arrived: list[Connection] = []
        self._arrival = trio.Event()
        self._is_closed = False
        self._wake = trio.Event()
        self._sleep = trio.CancelScope()

    # --- for the application --------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """The bound UDP port."""
        return self._port

    @property
    def public_key(self) -> bytes:
        """Our own 32-byte tunnel key."""
        return self._identity.public_key

    @property
    def half_open_count(self) -> int:
        """How many handshakes begun by others are under way."""
        return sum(known.half_open is not None for known in self._connections)

    async def accept(self) -> Connection:
        """Wait for the next connection of an admitted peer. Raises TunnelClosed once the endpoint is closed."""
        await trio.lowlevel.checkpoint()
        while True:
            while not self._arrived:
                if self._is_closed:
                    raise TunnelClosed("the endpoint is closed")
                self._arrival = trio.Event()
                await self._arrival.wait()
            connection = self._arrived.pop(0)
            if connection.ending is None:
                return connection

    async def connect(self, host: str, port: int, peer_key: bytes, *, timeout_ms: int = 10_000) -> Connection:
        """Dial, and return once the server has proven `peer_key` and has judged ours.

        Raises TunnelError: the name does not resolve, nobody answers, the server has another key or refused ours.
        """
        if len(peer_key) != KEY_SIZE:
            raise TunnelError(f"a tunnel key has {KEY_SIZE} bytes, not {len(peer_key)}")
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        connection: Connection | None = None
        try:
            with trio.move_on_after(timeout_ms / 1000):
                address = await self._resolve(host, port)
                if self._is_closed:
                    raise TunnelClosed("the endpoint is closed")
                now = trio.current_time()
                connection = self._add(QuicEngine.dialling(self._identity, peer_key, address, now, self._limits))
                self._touch(connection)
                await connection.wait_settled()
            if connection is None or (connection.ending is None and not connection.is_open):
                raise _no_answer(where, timeout_ms, connection)
            if connection.ending is not None:
                raise _not_opened(where, connection)
            return connection
        finally:
            if connection is not None and not (connection.is_open and connection.ending is None):
                connection.close("given up")

    async def _resolve(self, host: str, port: int) -> Address:
        family = self._socket.family
        flags = socket.AI_V4MAPPED | socket.AI_ALL if family == socket.AF_INET6 else 0
        try:
            found = await trio.socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM, 0, flags)
        except (OSError, UnicodeError) as error:
            raise TunnelError(
                f"cannot find the address of {host}: {error}", "check the address in the offer, and your DNS"
            ) from error
        address: Address = found[0][4]
        return address

    # --- connections ----------------------------------------------------------------------------------------

    def _add(self, engine: QuicEngine) -> Connection:
        connection = Connection(engine, self._limits, self._touch, self._flush)
        self._connections.add(connection)
        for cid in connection.cids:
            self._by_cid[cid] = connection
        return connection

    def _remove(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._dirty.discard(connection)
        for cid in [cid for cid, known in self._by_cid.items() if known is connection]:
            del self._by_cid[cid]

    def _touch(self, connection: Connection) -> None:
        self._dirty.add(connection)
        self._wake.set()

    def _flush(self, connection: Connection) -> None:
        """Send what the connection has to send, and take note of what has become of it."""
        if connection not in self._connections:
            return
        known = set(connection.cids)
        for datagram in connection.datagrams_to_send(trio.current_time()):
            self._send(datagram, connection)
        for cid in connection.cids - known:
            self._by_cid[cid] = connection
        for cid in known - connection.cids:
            self._by_cid.pop(cid, None)
        if connection.half_open is not None and connection.is_open:
            connection.half_open = None
            self.counts.opened += 1
            self._arrived = [known for known in self._arrived if known.ending is None]
            self._arrived.append(connection)
            self._arrival.set()
        if connection.is_over:
            self._remove(connection)

    def _flush_dirty(self) -> None:
        dirty, self._dirty = self._dirty, set()
        for connection in dirty:
            self._flush(connection)

    # --- datagrams ------------------------------------------------------------------------------------------

    def _send(self, datagram: Datagram, connection: Connection | None = None) -> None:
        try:
            self._socket.sendto(*datagram)
        except OSError as error:
            # A full buffer, a firewall, no route: lost on the way, and repeated by loss recovery.
            self.counts.unsent += 1
            if connection is not None and error.errno != errno.EAGAIN:
                connection.send_problem = error.strerror or str(error)
        else:
            self.counts.sent += 1

    def _take_untrusted(self, data: bytes, address: Address, now: float) -> None:
        self.counts.received += 1
        cid = destination_cid_untrusted(data)
        connection = None if cid is None else self._by_cid.get(cid)
        if connection is None:
            if cid is None or not self._is_listening:
                self.counts.ignored += 1
                return
            connection = self._begin_untrusted(data, address, now)
            if connection is None:
                return
        connection.receive_untrusted(data, address, now)
        if not connection.was_heard and connection.half_open is not None:
            # It looked like a first packet and was none: remember nothing.
            self.counts.ignored += 1
            self._remove(connection)
            return
        self._dirty.add(connection)

    def _begin_untrusted(self, data: bytes, address: Address, now: float) -> Connection | None:
        half_open = [known.half_open for known in self._connections if known.half_open is not None]
        match self._gate.judge_untrusted(data, address, half_open, len(self._connections) - len(half_open), now):
            case Ignored():
                self.counts.ignored += 1
                return None
            case Retried(datagram):
                self.counts.retried += 1
                self._send((datagram, address))
                return None
            case Admitted(original_cid, retry_cid, entry):
                self.counts.begun += 1
                connection = self._add(
                    QuicEngine.answering(
                        self._identity, self._admits, self._limits, original_cid=original_cid, retry_cid=retry_cid
                    )
                )
                connection.half_open = entry
                # The client goes on using the id of its first packet until it has our answer.
                self._by_cid[retry_cid or original_cid] = connection
                return connection

    async def receive_loop(self) -> None:
        """Move datagrams from the socket to the connections, for ever."""
        while True:
            await trio.lowlevel.wait_readable(self._socket.fileno())
            now = trio.current_time()
            for _ in range(_BATCH_MAX):
                try:
                    data, address = self._socket.recvfrom(_RECEIVE_SIZE)
                except BlockingIOError:
                    break
                except OSError as error:
                    # An ICMP message about something that we sent: of no consequence here.
                    log.debug("tunnel.receive_failed", error=str(error))
                    continue
                self._take_untrusted(data, address, now)
            self._flush_dirty()
            if self._next_timer() < self._sleep.deadline:
                self._wake.set()

    async def timer_loop(self) -> None:
        """Flush connections that the application has touched, and those whose time has come, for ever."""
        last_tick = -math.inf
        while True:
            self._sleep = trio.CancelScope(deadline=max(self._next_timer(), last_tick + _TICK_MIN_S))
            with self._sleep:
                await self._wake.wait()
            self._wake = trio.Event()
            now = trio.current_time()
            for connection in self._connections:
                timer = connection.timer()
                if timer is not None and timer <= now:
                    last_tick = now
                    connection.tick(now)
                    self._dirty.add(connection)
            self._flush_dirty()

    def _next_timer(self) -> float:
        timers = [timer for known in self._connections if (timer := known.timer()) is not None]
        return min(timers, default=math.inf)

    def close(self, reason: str) -> None:
        """End every connection, telling the peers; nothing can be opened afterwards. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for connection in list(self._connections):
            connection.close(reason)
        self._arrival.set()


def _no_answer(where: str, timeout_ms: int, connection: Connection | None) -> TunnelError:
    waited = f"{timeout_ms / 1000:g} s"
    hint = "the provider may be gone, or a firewall drops UDP; see `gpunode doctor`"
    if connection is None:
        return TunnelError(f"the name in {where} was not resolved within {waited}", "check your DNS")
    if connection.send_problem:
        return TunnelError(f"cannot send to {where}: {connection.send_problem}", hint)
    if connection.was_heard:
        return TunnelError(f"{where} answered, but did not finish the handshake within {waited}", hint)
    return TunnelError(f"timeout: nobody answered at {where} within {waited}", hint)


def _not_opened(where: str, connection: Connection) -> TunnelError:
    ending = connection.ending
    if ending is not None and ending.refused:
        return TunnelError(
            f"the peer at {where} refused our key: {ending.reason}",
            "the lease may be over, or this is not its endpoint",
        )
    if ending is not None and ending.by is EndedBy.FAULT:
        return TunnelError(
            f"the peer at {where} did not prove to be the one that the lease names: {ending.reason}",
            "another program may listen there now",
        )
    return TunnelError(f"the tunnel to {where} was not opened: {connection.end_reason}")


@asynccontextmanager
async def open_endpoint(
    seed: bytes,
    *,
    bind: str,
    port: int = 0,
    admit: Admit = frozenset(),
    port_range: tuple[int, int] | None = None,
    limits: TunnelLimits = LIMITS,
) -> AsyncIterator[Endpoint]:
    """Open an endpoint whose identity is the Ed25519 key of `seed` (32 bytes).

    `bind` is an IP address ("::" takes IPv4 too). `port` 0 means any free port, or one of `port_range` (both ends
    included). `admit` says who may dial us. On leaving, every connection is closed and its peer told; an exception
    of the body comes out as it is, not in a group. Raises TunnelError when the port cannot be bound.
    """
    failure: Exception | None = None
    with bind_udp(bind, port, port_range) as sock:
        endpoint = Endpoint(sock, TunnelIdentity(seed), admit, limits)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(endpoint.receive_loop)
            nursery.start_soon(endpoint.timer_loop)
            try:
                yield endpoint
            except Exception as error:  # raised again below, outside of the nursery that would wrap it
                failure = error
            finally:
                endpoint.close("the endpoint was closed")
                nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
