"""What keeps a bad peer from ending, filling or fooling py-libp2p 0.8.1's host, connections and streams.

libp2p lets an exception in any stream handler end the whole process, bounds little of what a peer sends, dials
peers on its own and trusts identify messages. The subclasses below close those holes (those of gossip are in
`node.swarm.gossip`); what a peer may do is decided by the `Gatekeeper` that they ask. `PRIVATES` names every
private attribute that is read, set or overridden here and there: a contract test checks them against the installed
version, and the version is pinned. The reasons are in contrib/adr/0003. Refuses to know this project's protocols.
"""

import logging
import os
import struct
from collections import OrderedDict
from typing import Any, Protocol, TypeAlias

import trio
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.rcmgr import Direction
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux import yamux
from libp2p.transport.tcp.tcp import TCP

from node.log import get_logger
from node.swarm.limits import SwarmLimits, TokenBucket
from node.swarm.peers import InboundSlot, PeerState

log = get_logger(__name__)

Untyped: TypeAlias = Any
"""Something of libp2p's, which this project's type checker does not follow."""

WINDOW_MAX = 256 * 1024
"""Receive window of a stream, and largest frame, in bytes (libp2p's own bound is 16 MiB a stream)."""
BUFFERED_MAX = 4 * 1024 * 1024
"""Bytes of one connection that were received and not yet read, over all its streams."""
STREAMS_MAX = 512
"""Streams of one connection, ours and the peer's, those included that wait to be swept."""
FRAME_COST = 4096
"""What a frame costs of the byte rate on top of its length: handling it takes as long as copying that much."""
READ_MAX = 64 * 1024
"""Largest single read from a socket. libp2p passes a peer's announced length on to recv(), which allocates it."""

PRIVATES: dict[str, tuple[str, ...]] = {
    "libp2p.host.basic_host:BasicHost": (
        "_swarm_stream_handler",
        "_schedule_identify",
        "_push_identify_to_all_peers",
    ),
    "libp2p.network.swarm:Swarm": ("_handle_inbound_connection", "_dial_with_retry"),
    "libp2p.stream_muxer.yamux.yamux:Yamux": (
        "_measure_rtt_loop",
        "_finalize_stream_locked",
        "_sweep_stale_streams",
        "_read_data_body",
        "_write_frame",
    ),
    "libp2p.stream_muxer.yamux.yamux:YamuxStream": ("_auto_tune_and_send_window_update",),
    "libp2p.stream_muxer.yamux.yamux:": ("MAX_WINDOW_SIZE", "YAMUX_HEADER_FORMAT", "TYPE_PING", "FLAG_SYN"),
    "libp2p.pubsub.pubsub:Pubsub": (
        "_handle_new_peer",
        "_handle_dead_peer",
        "_forget_all_subscriptions",
        "_mark_msg_seen",
        "_is_msg_seen",
    ),
    "libp2p.pubsub.gossipsub:GossipSub": ("_periodic_security_cleanup",),
}
"""Module and class (or only the module) -> what of it is relied on."""
INSTANCE_PRIVATES = (
    "Yamux._ping_event Yamux._ping_id Yamux._ping_sent_time Yamux.stream_buffers Yamux.stream_events "
    "YamuxStream._pending_recv_release YamuxStream.window_lock YamuxStream.recv_window "
    "Swarm.auto_connector Swarm.manager "
    "GossipSub._pending_messages GossipSub.recent_message_deliveries GossipSub.equivocation_detection "
    "GossipSub.back_off GossipSub.scorer "
    "Pubsub.seen_messages Pubsub.counter Pubsub.peers Pubsub.peer_queues Pubsub.peer_topics "
    "Pubsub._peer_subscription_count RpcQueue._queue"
)
"""Attributes that exist only on instances; the contract test makes one of each."""


class Gatekeeper(Protocol):
    """Decides what peers may do. Addresses are IP addresses, `peer` is a libp2p ID."""

    def open_connection(self, address: str) -> InboundSlot | None:
        """Return a slot for a connection from `address`, or None; `close_connection` follows each slot."""

    def close_connection(self, slot: InboundSlot) -> None:
        """Record that the connection has ended."""

    def refusal(self, peer: Untyped) -> str:
        """Return why a peer that has proven its id is not wanted, or ""."""

    def connecting(self, muxed_conn: "GuardedYamux", *, inbound: bool) -> None:
        """Record that a wanted peer is about to be registered; its streams may come from now on."""

    def connected(self, conn: Untyped) -> None:
        """Record that the connection `conn` is registered."""

    def disconnected(self, peer: Untyped) -> None:
        """Record that a connection of `peer` has ended, perhaps before it was registered."""

    def take_stream(self, peer: Untyped) -> bool:
        """Return whether `peer` may open one more stream; `release_stream` follows each True."""

    def release_stream(self, peer: Untyped) -> None:
        """Record that a stream of `peer` has ended."""

    def stream_failed(self, peer: Untyped, error: BaseException) -> None:
        """Record that handling a stream of `peer` raised."""

    def is_admitted(self, peer: Untyped) -> bool:
        """Return whether `peer` is connected and has said hello."""

    async def wait_admitted(self, peer: Untyped) -> PeerState | None:
        """Wait until `peer` has said hello and return its state; None when it does not in time, or has gone."""


def is_our_bug(error: BaseException) -> bool:
    """Return whether `error` is, or holds, an AssertionError that libp2p did not raise itself.

    Our own assertions must end the process. libp2p's are what a peer's bytes can trigger.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(is_our_bug(inner) for inner in error.exceptions)
    if not isinstance(error, AssertionError):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__", "")) if trace is not None else ""
    return module.partition(".")[0] != "libp2p"


async def reset_quietly(stream: Untyped) -> None:
    """Reset a stream that may be broken already; never raises, never waits longer than a second."""
    with trio.move_on_after(1):
        try:
            await stream.reset()
        except Exception as error:
            log.debug("swarm.reset_failed", error=repr(error))


def tcp_stream(conn: "GuardedYamux") -> "BoundedTcpStream":
    """Return the TCP stream below a muxed connection of ours: yamux, Noise session, Noise framing, TCP."""
    stream: BoundedTcpStream = conn.secured_conn.session.conn.read_writer.read_write_closer.stream
    return stream


def is_inbound(conn: Untyped) -> bool:
    """Return whether the other side opened a connection of the swarm."""
    return bool(conn.direction == Direction.INBOUND)


async def open_stream_on(conn: Untyped, protocol: str) -> Untyped:
    """Open a stream on this very connection (the host chooses among several). Raises libp2p's errors."""
    stream = await conn.new_stream()
    try:
        await MultiselectClient().select_one_of([TProtocol(protocol)], MultiselectCommunicator(stream))
    except BaseException:
        with trio.CancelScope(shield=True):
            await reset_quietly(stream)
        raise
    stream.set_protocol(TProtocol(protocol))
    return stream


# --- TCP ----------------------------------------------------------------------------------------------------


class BoundedTcpStream(TrioTCPStream):
    """A TCP stream that never asks the kernel for more than `READ_MAX` bytes at once."""

    def __init__(self, stream: trio.SocketStream, slot: InboundSlot | None = None) -> None:
        super().__init__(stream)
        self.slot = slot
        """None for a connection that we opened."""

    @property
    def is_cut(self) -> bool:
        """Whether the socket is closed."""
        return bool(self.stream.socket.fileno() < 0)

    def cut(self) -> None:
        """Close the socket now; whoever reads or writes finds it closed."""
        self.stream.socket.close()

    async def write(self, data: bytes) -> None:
        """Send all of `data`; a failure ends the connection for its reader too, at once."""
        try:
            await super().write(data)
        except ConnectionClosedError:
            self.cut()
            raise

    async def read(self, n: int | None = None) -> bytes:
        """Return up to min(n, READ_MAX) bytes; b"" at the end."""
        data: bytes = await super().read(READ_MAX if n is None else min(n, READ_MAX))
        return data

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return the peer's address and port; unlike the original, for IPv6 too."""
        try:
            name = self.stream.socket.getpeername()
        except OSError:
            return None
        # A socket that takes both families shows IPv4 peers as ::ffff:192.0.2.1, and link-local ones with a scope.
        return str(name[0]).partition("%")[0].removeprefix("::ffff:"), int(name[1])


class GuardedTcp(TCP):
    """The TCP transport with bounded reads on the connections that we open."""

    async def dial(self, maddr: Untyped) -> Untyped:
        """Dial as the original does."""
        raw = await super().dial(maddr)
        return RawConnection(BoundedTcpStream(raw.stream.stream), True)


# --- yamux --------------------------------------------------------------------------------------------------


class MeteredSession:
    """A secured connection that is read no faster than the byte rate allows; everything else is passed on."""

    def __init__(self, session: Untyped, limits: SwarmLimits) -> None:
        self.session = session
        self._bucket = TokenBucket(limits.bytes_per_s, limits.bytes_burst, trio.current_time())

    async def read(self, n: int | None = None) -> bytes:
        """Wait until the rate allows it, and read."""
        data: bytes = await self.session.read(n)
        wait_s = self._bucket.charge(trio.current_time(), len(data) + FRAME_COST)
        if wait_s > 0:
            await trio.sleep(wait_s)
        return data

    def __getattr__(self, name: str) -> Untyped:
        return getattr(self.session, name)


class GuardedYamux(yamux.Yamux):
    """A yamux connection that bounds what it buffers, measures its latency and notices a vanished peer."""

    def __init__(
        self, secured_conn: Untyped, peer_id: Untyped, *, is_initiator: bool, limits: SwarmLimits
    ) -> None:
        super().__init__(MeteredSession(secured_conn, limits), peer_id, is_initiator=is_initiator)
        self._limits = limits
        self.latency_ms: int | None = None

    def cut(self) -> None:
        """End the connection now, without a word and without waiting: the reader finds the socket closed."""
        tcp_stream(self).cut()

    async def start(self) -> None:
        """Run the connection. Never raises: one connection's failure is not the host's."""
        try:
            await super().start()
        except Exception as error:
            if is_our_bug(error):
                raise
            log.debug("swarm.connection_failed", error=repr(error))
        finally:
            self.cut()

    async def close(self, error_code: int = yamux.GO_AWAY_NORMAL) -> None:
        """Close as the original does, but not when the peer no longer reads: there it would wait for ever."""
        with trio.move_on_after(1):
            await super().close(error_code)
        self.cut()

    async def accept_stream(self) -> Untyped:
        """Return the next stream; end the connection of a peer that has opened too many."""
        stream = await super().accept_stream()
        if len(self.streams) > STREAMS_MAX:
            self.cut()
            raise MuxedConnUnavailable("too many streams")
        return stream

    async def _measure_rtt_loop(self) -> None:
        """Ping for as long as the connection lives; replaces a loop that ignored the answers' absence."""
        while not self.event_shutting_down.is_set():
            self._ping_id += 1
            self._ping_event = trio.Event()
            self._ping_sent_time = sent = trio.current_time()
            header = struct.pack(yamux.YAMUX_HEADER_FORMAT, 0, yamux.TYPE_PING, yamux.FLAG_SYN, 0, self._ping_id)
            with trio.move_on_after(self._limits.ping_timeout_ms / 1000) as scope:
                try:
                    await self._write_frame(header)
                except Exception as error:
                    if is_our_bug(error):
                        raise
                    break  # the reader finds the same failure, and ends the connection
                await self._ping_event.wait()
            if scope.cancelled_caught:
                log.info("swarm.peer_vanished", peer=str(self.peer_id))
                break
            self.latency_ms = max(1, round((trio.current_time() - sent) * 1000))
            with trio.move_on_after(self._limits.ping_interval_ms / 1000):
                await self.event_shutting_down.wait()
        self.cut()

    async def _read_data_body(self, length: int) -> bytes:
        """Read a DATA frame's body, unless the connection holds too much already."""
        held = sum(map(len, self.stream_buffers.values()))
        if held + length > BUFFERED_MAX or len(self.streams) > STREAMS_MAX:
            self.cut()  # the read below finds the socket closed
        data: bytes = await super()._read_data_body(length)
        return data

    def _finalize_stream_locked(self, stream: Untyped, *, fully_closed: bool) -> None:
        """Forget a reset stream's unread bytes at once; the original keeps them for a minute."""
        if fully_closed and stream.reset_received:
            buffer = self.stream_buffers.get(stream.stream_id)
            if buffer:
                buffer.clear()
        super()._finalize_stream_locked(stream, fully_closed=fully_closed)

    def _sweep_stale_streams(self, now: float | None = None) -> int:
        """Sweep as the original does, and drop the events that late readers have put back."""
        swept: int = super()._sweep_stale_streams(now)
        for stream_id in [key for key in self.stream_events if key not in self.streams]:
            del self.stream_events[stream_id]
        return swept


class GuardedMuxer(MuxerMultistream):
    """Negotiates yamux and makes `GuardedYamux` of it (the original names its own class in any case)."""

    def __init__(self, protocols: Untyped, limits: SwarmLimits) -> None:
        super().__init__(protocols)
        self._limits = limits

    async def new_conn(self, conn: Untyped, peer_id: Untyped) -> GuardedYamux:
        """Upgrade a secured connection."""
        await self.select_transport(conn)
        return GuardedYamux(conn, peer_id, is_initiator=conn.is_initiator, limits=self._limits)


# --- swarm and host -----------------------------------------------------------------------------------------


class _NoAutoConnector:
    """Stands where libp2p dials up to 200 peers on its own and remembers everyone who ever left."""

    async def start(self) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""

    async def run_background_task(self, nursery: trio.Nursery) -> None:
        """Do nothing."""

    async def maybe_connect(self) -> None:
        """Do nothing."""

    def record_disconnect(self, peer_id: Untyped) -> None:
        """Do nothing."""


class GuardedSwarm(Swarm):
    """A swarm that asks the gatekeeper, and gives an inbound connection's slot back when it ends."""

    def __init__(self, *args: Untyped, keeper: Gatekeeper, **kwargs: Untyped) -> None:
        super().__init__(*args, **kwargs)
        self.auto_connector = _NoAutoConnector()
        self._keeper = keeper

    async def add_conn(self, muxed_conn: GuardedYamux, direction: str = "unknown") -> Untyped:
        """Register a connection, unless the peer is unwanted."""
        refusal = self._keeper.refusal(muxed_conn.peer_id)
        if refusal:
            muxed_conn.cut()
            raise SwarmException(refusal)
        self._keeper.connecting(muxed_conn, inbound=direction == "inbound")
        try:
            return await super().add_conn(muxed_conn, direction)
        except BaseException:
            muxed_conn.cut()
            self._keeper.disconnected(muxed_conn.peer_id)
            raise

    async def notify_connected(self, conn: Untyped) -> None:
        """Tell the gatekeeper, then libp2p's own listeners."""
        self._keeper.connected(conn)
        await super().notify_connected(conn)

    async def notify_disconnected(self, conn: Untyped) -> None:
        """Tell the gatekeeper, then libp2p's own listeners."""
        self._keeper.disconnected(conn.muxed_conn.peer_id)
        await super().notify_disconnected(conn)

    async def _handle_inbound_connection(self, read_write_closer: TrioTCPStream, maddr: Untyped) -> None:
        """Upgrade one accepted connection and hold its slot until it ends; never raises.

        The original holds one of a fixed number of slots until the swarm itself ends.
        """
        stream = BoundedTcpStream(read_write_closer.stream)
        remote = stream.get_remote_address()
        slot = self._keeper.open_connection(remote[0]) if remote is not None else None
        if slot is None:
            stream.cut()
            return
        stream.slot = slot
        try:
            muxed = await self.upgrade_inbound_raw_conn(RawConnection(stream, False), maddr)
            for conn in self.get_connections(muxed.peer_id):
                if conn.muxed_conn is muxed:
                    await conn.event_closed.wait()
        except Exception as error:
            if is_our_bug(error):
                raise
            log.debug("swarm.inbound_failed", address=slot.address, error=repr(error))
        finally:
            stream.cut()
            self._keeper.close_connection(slot)


class GuardedHost(BasicHost):
    """A host whose stream handlers cannot end it, and which believes no identify message."""

    def __init__(self, network: GuardedSwarm, keeper: Gatekeeper, protocols: dict[str, Untyped]) -> None:
        self._keeper = keeper
        # Not empty, or the host would take libp2p's own handlers.
        super().__init__(
            network, default_protocols=OrderedDict(protocols), disable_identify_address_discovery=True
        )

    async def _swarm_stream_handler(self, net_stream: Untyped) -> None:
        """Negotiate and handle one inbound stream; whatever goes wrong ends that stream only."""
        peer = net_stream.muxed_conn.peer_id
        if not self._keeper.take_stream(peer):
            await reset_quietly(net_stream)
            return
        try:
            await super()._swarm_stream_handler(net_stream)
        except Exception as error:
            if is_our_bug(error):
                raise
            self._keeper.stream_failed(peer, error)
            await reset_quietly(net_stream)
        finally:
            self._keeper.release_stream(peer)

    def _schedule_identify(self, peer_id: Untyped, *, reason: str) -> None:
        """Ask nobody: the hello says what we need, and identify's answers would fill the peer store with lies."""

    async def _push_identify_to_all_peers(self) -> None:
        """Push to nobody."""


async def _release_window(stream: Untyped, *, bytes_read: int = 0) -> None:
    """Give the peer room again once half of a stream's window was read; libp2p answers each byte with a frame."""
    stream._pending_recv_release += bytes_read
    if stream._pending_recv_release < WINDOW_MAX // 2:
        return
    released, stream._pending_recv_release = stream._pending_recv_release, 0
    async with stream.window_lock:
        stream.recv_window += released
    await stream.send_window_update(released)


def tame_library() -> None:
    """Change libp2p's process-wide settings; idempotent.

    Yamux's windows are bounded and released in large steps, and the logger is silent: libp2p logs an error for
    every peer that closes a connection, and sets its own level when it is imported.
    """
    yamux.MAX_WINDOW_SIZE = WINDOW_MAX
    yamux.YamuxStream._auto_tune_and_send_window_update = _release_window
    if not os.environ.get("LIBP2P_DEBUG"):
        logging.getLogger("libp2p").setLevel(logging.CRITICAL)
