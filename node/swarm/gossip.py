"""Gossip: gossipsub v1.1 among admitted peers, with this node's own reader, judge and bounds.

libp2p's reader ends the process on one malformed frame, and its validator on one bad key, so both are replaced:
each frame is bounded in size and time before it is parsed, each message is charged to its forwarder's rate,
checked (one topic of ours, an Ed25519 author, a good signature) and only then shown to the topic's handler. A
message that is rejected, and bytes that no correct node sends, are held against the forwarder. Topics carry the
network's id, so that two networks never mix. Refuses to know what the payload means.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Container
from weakref import WeakKeyDictionary

import trio
from google.protobuf.message import DecodeError
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.validators import PUBSUB_SIGNING_PREFIX

from node.log import get_logger
from node.ports import GossipHandler, GossipVerdict
from node.swarm.guards import WINDOW_MAX, Gatekeeper, GuardedHost, Untyped, is_our_bug, reset_quietly
from node.swarm.limits import GOSSIP_SIZE_MAX, NAME_SIZE_MAX, SwarmLimits
from node.swarm.peers import (
    FAULT_FLOOD,
    FAULT_FLOOD_GOSSIP,
    FAULT_MALFORMED,
    FAULT_REJECTED,
    FAULT_SLOW,
    PeerState,
)
from node.swarm.streams import read_varint_frame_untrusted
from protocol.errors import MalformedRecord
from protocol.identity import KEY_SIZE, NetworkId, NodeId, is_signature_valid

log = get_logger(__name__)

DEGREE, DEGREE_LOW, DEGREE_HIGH = 6, 4, 10
"""Peers of the mesh of one topic. Source: libp2p specs, pubsub/gossipsub/gossipsub-v1.0.md, parameters."""
HEARTBEAT_S = 1
STREAMS_PER_PEER_MAX = 4
"""Gossip streams that one peer may have open to us; a correct one has one, or two while it reopens it."""
SUBSCRIPTIONS_MAX = 256
"""Topics to which one peer may subscribe."""
OUTBOUND_RPCS_MAX = 256
"""Frames that wait for one slow peer (libp2p's own bound of 32 loses most of a burst)."""
PRUNE_BACKOFF_MAX_S = 600
SEEN_MAX = 65_536
SEEN_TTL_S = 120
SEQNO_SIZE = 8
_ID_PREFIX = bytes.fromhex("002408011220")
"""Of the peer id of an Ed25519 key; the key follows. Source: libp2p specs, peer-ids/peer-ids.md."""


def topic_name(network: NetworkId, topic: str) -> str:
    """Return the name under which `topic` travels. Raises ValueError for one that is empty or too long."""
    if not 0 < len(topic) <= NAME_SIZE_MAX:
        raise ValueError(f"a topic has 1 to {NAME_SIZE_MAX} characters")
    return f"gpunode/1/{network[:16].hex()}/{topic}"


def node_of(peer: Untyped) -> NodeId:
    """Return the public key inside the libp2p ID of a registered connection (no others are registered)."""
    node = node_from_bytes(peer.to_bytes())
    if node is None:
        raise ValueError(f"{peer} is not the id of an Ed25519 key")
    return node


def node_from_bytes(data: bytes) -> NodeId | None:
    """Return the public key inside a peer id's bytes, or None when it is not that of an Ed25519 key."""
    if len(data) != len(_ID_PREFIX) + KEY_SIZE or not data.startswith(_ID_PREFIX):
        return None
    return NodeId(data[len(_ID_PREFIX) :])


def id_bytes(node: NodeId) -> bytes:
    """Return the bytes of the peer id of `node`."""
    return _ID_PREFIX + node


class Gossip:
    """The topics of this node and their handlers; it outlives a restart of the host.

    `fault` holds points against a peer, with a reason.
    """

    def __init__(
        self,
        node: NodeId,
        network: NetworkId,
        limits: SwarmLimits,
        fault: Callable[[NodeId, float, str], None],
        counters: Counter[str],
    ) -> None:
        self._node = node
        self._network = network
        self._limits = limits
        self._fault = fault
        self._counters = counters
        self._handlers: dict[str, GossipHandler] = {}

    @property
    def topics(self) -> tuple[str, ...]:
        """The names, as they travel, of the topics to subscribe to."""
        return tuple(self._handlers)

    def add_topic(self, topic: str, handler: GossipHandler) -> str:
        """Set the handler of `topic` and return the name to subscribe to. Raises ValueError for a second one."""
        name = topic_name(self._network, topic)
        if name in self._handlers:
            raise ValueError(f"topic {topic!r} has a handler already")
        self._handlers[name] = handler
        return name

    def count_duplicate(self) -> None:
        """Count one more copy of a message."""
        self._counters["gossip_duplicate"] += 1

    async def read(self, stream: Untyped, state: PeerState, pubsub: "GuardedPubsub") -> None:
        """Read the frames of one gossip stream of an admitted peer until it ends."""
        timeout_s = self._limits.frame_timeout_ms / 1000
        try:
            while True:
                data = await read_varint_frame_untrusted(stream, WINDOW_MAX, timeout_s)
                if data is None:
                    break
                await self._handle_frame(data, state, stream.muxed_conn.peer_id, pubsub)
        except MalformedRecord as error:
            self._counters["gossip_malformed"] += 1
            self._fault(state.node, FAULT_MALFORMED, f"malformed gossip: {error}")
        except trio.TooSlowError:
            self._fault(state.node, FAULT_SLOW, "a gossip frame that was never finished")
        finally:
            with trio.CancelScope(shield=True):
                await reset_quietly(stream)

    async def _handle_frame(self, data: bytes, state: PeerState, peer: Untyped, pubsub: "GuardedPubsub") -> None:
        rpc = rpc_pb2.RPC()
        try:
            rpc.ParseFromString(data)
        except DecodeError:
            raise MalformedRecord("not a gossipsub frame") from None
        now = trio.current_time()
        if not state.control_bucket.take(now, _control_entries(rpc)):
            self._counters["gossip_flooded"] += 1
            self._fault(state.node, FAULT_FLOOD, "too many gossip control messages")
            return
        clean_rpc(rpc, self._handlers)
        prefix = topic_name(self._network, "-")[:-1]
        for subscription in rpc.subscriptions:
            topic = subscription.topicid
            if not isinstance(topic, str):  # protobuf hands over what is no UTF-8 as bytes
                raise MalformedRecord("a topic that is no text")
            if topic.startswith(prefix) and len(topic) <= len(prefix) + NAME_SIZE_MAX:
                pubsub.handle_subscription(peer, subscription)
        for message in rpc.publish:
            if not state.gossip_bucket.take(now):
                self._counters["gossip_flooded"] += 1
                self._fault(state.node, FAULT_FLOOD_GOSSIP, "too many gossip messages")
                continue
            await pubsub.push_msg(peer, message)
        if rpc.HasField("control"):
            await pubsub.router.handle_rpc(rpc, peer)

    def judge(self, forwarder: NodeId, message: Untyped, mark_seen: Callable[[Untyped], None]) -> bool:
        """Return whether to pass on a message that was not seen before.

        `mark_seen` is called only after the signature was verified: else a copy with a bad one would
        keep the original out.
        """
        handler = self._handlers.get(message.topicIDs[0]) if len(message.topicIDs) == 1 else None
        if handler is None:
            self._counters["gossip_unwanted"] += 1
            return False
        author = node_from_bytes(message.from_id)
        if author == self._node:
            self._counters["gossip_returned"] += 1
            return False
        problem = _problem(message, author)
        if problem:
            self._counters["gossip_malformed"] += 1
            self._fault(forwarder, FAULT_MALFORMED, problem)
            return False
        mark_seen(message)
        return self._ask(handler, forwarder, message.data)

    def _ask(self, handler: GossipHandler, forwarder: NodeId, data: bytes) -> bool:
        try:
            verdict = handler(forwarder, data)
        except Exception as error:
            if is_our_bug(error):
                raise
            # A handler that raises on a peer's bytes is a fault of ours, and the bytes are not to be spread.
            log.exception("swarm.gossip_handler_failed")
            verdict = GossipVerdict.REJECT
        self._counters[f"gossip_{verdict.value}"] += 1
        if verdict is GossipVerdict.REJECT:
            self._fault(forwarder, FAULT_REJECTED, "a gossiped record that was rejected")
        return verdict is GossipVerdict.ACCEPT


def _problem(message: Untyped, author: NodeId | None) -> str:
    """Return what is wrong with a message, or "" after its signature was verified."""
    if author is None:
        return "a gossip message without an Ed25519 author"
    if len(message.data) > GOSSIP_SIZE_MAX:
        return f"a gossip message of {len(message.data)} bytes, where {GOSSIP_SIZE_MAX} are allowed"
    if len(message.seqno) != SEQNO_SIZE:
        return "a gossip message without a sequence number"
    signed = rpc_pb2.Message(
        data=message.data, topicIDs=message.topicIDs, from_id=message.from_id, seqno=message.seqno
    )
    payload = PUBSUB_SIGNING_PREFIX.encode() + signed.SerializeToString()
    if not is_signature_valid(author, payload, message.signature):
        return "a gossip message with a bad signature"
    return ""


def _control_entries(rpc: Untyped) -> int:
    control = rpc.control
    return (
        len(rpc.subscriptions)
        + sum(1 + len(entry.messageIDs) for entry in control.ihave)
        # An answer to IWANT is as dear as a message.
        + sum(1 + 32 * len(entry.messageIDs) for entry in control.iwant)
        + len(control.graft)
        + len(control.prune)
    )


class SeenMessages:
    """Ids of the messages seen in the last two minutes: bounded, and without the original's thread."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def has(self, key: bytes) -> bool:
        """Return whether `key` was added lately."""
        return self._until.get(key, 0.0) > trio.current_time()

    def add(self, key: bytes) -> bool:
        """Add `key`; return whether it was new."""
        now = trio.current_time()
        is_new = not self.has(key)
        self._until[key] = now + SEEN_TTL_S
        self._until.move_to_end(key)
        while self._until and (len(self._until) > SEEN_MAX or next(iter(self._until.values())) <= now):
            self._until.popitem(last=False)
        return is_new


class GuardedRouter(GossipSub):
    """Gossipsub v1.1 without the tables that only grow and without libp2p's scores (we keep our own)."""

    def __init__(self, **kwargs: Untyped) -> None:
        super().__init__(
            spam_protection_enabled=False,
            adaptive_gossip_enabled=False,
            eclipse_protection_enabled=False,
            **kwargs,
        )
        self.scorer = None

    def _periodic_security_cleanup(self) -> None:
        """Clean up at each heartbeat."""
        super()._periodic_security_cleanup()
        self.recent_message_deliveries.clear()
        self.equivocation_detection.clear()
        self._pending_messages.clear()
        now = time.time()
        for topic, until in list(self.back_off.items()):
            left = {peer: end for peer, end in until.items() if end > now}
            if left:
                self.back_off[topic] = left
            else:
                del self.back_off[topic]


class GuardedPubsub(Pubsub):
    """Pubsub that speaks only with admitted peers, and whose reader and judge are `Gossip`'s."""

    seen_messages: Untyped

    def __init__(self, host: GuardedHost, keeper: Gatekeeper, gossip: Gossip) -> None:
        super().__init__(
            host,
            GuardedRouter(
                protocols=[PROTOCOL_ID_V11],
                degree=DEGREE,
                degree_low=DEGREE_LOW,
                degree_high=DEGREE_HIGH,
                heartbeat_interval=HEARTBEAT_S,
            ),
            strict_signing=True,
            max_inbound_rpc_size=WINDOW_MAX,
            max_subscriptions_per_peer=SUBSCRIPTIONS_MAX,
        )
        self.seen_messages.stop()
        self.seen_messages = SeenMessages()
        # From the clock in microseconds: with the original's seconds a restarted node repeats its numbers, and
        # its messages look like duplicates.
        self.counter = time.time_ns() // 1000
        self._keeper = keeper
        self._gossip = gossip
        self._streams: Counter[Untyped] = Counter()
        self._write_locks: WeakKeyDictionary[Untyped, trio.Lock] = WeakKeyDictionary()

    def admit(self, peer: Untyped) -> None:
        """Open our gossip stream to an admitted peer; retried until it is open. Idempotent."""
        if not _is_writable(self.peers.get(peer)):
            # Left from an earlier connection; forgetting it also opens a new one.
            self._handle_dead_peer(peer)

    async def handle_peer_queue(self) -> None:
        """Ignore libp2p's own notices of connections: a peer is registered when it has said hello."""
        async with self.peer_receive_channel:
            self.event_handle_peer_queue_started.set()
            async for _ in self.peer_receive_channel:
                pass

    async def stream_handler(self, stream: Untyped) -> None:
        """Read an inbound gossip stream, once its peer has said hello."""
        peer = stream.muxed_conn.peer_id
        state = await self._keeper.wait_admitted(peer)
        if state is None or self._streams[peer] >= STREAMS_PER_PEER_MAX:
            await reset_quietly(stream)
            return
        self._streams[peer] += 1
        try:
            await self._gossip.read(stream, state, self)
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]
                self._forget_all_subscriptions(peer)

    async def push_msg(self, msg_forwarder: Untyped, msg: Untyped) -> None:
        """Judge a received message, and pass it on or not. Our own are passed on in any case."""
        if msg_forwarder == self.my_id:
            self._mark_msg_seen(msg)
        elif self._is_msg_seen(msg):
            self._gossip.count_duplicate()
            return
        elif not self._gossip.judge(node_of(msg_forwarder), msg, self._mark_msg_seen):
            return
        await self.router.publish(msg_forwarder, msg)

    async def write_msg(self, stream: Untyped, rpc_msg: Untyped) -> bool:
        """Write one frame at a time: the original lets two tasks mix the parts of theirs on one stream."""
        async with self._write_locks.setdefault(stream, trio.Lock()):
            written: bool = await super().write_msg(stream, rpc_msg)
        return written

    def _handle_dead_peer(self, peer_id: Untyped) -> None:
        """Forget our gossip stream to a peer, and open another while it is connected.

        The original is also called for a stream that was replaced long ago, and then forgets the new one; and it
        forgets what the peer subscribed to, which the peer says only once, on a stream of its own.
        """
        if _is_writable(self.peers.get(peer_id)):
            return
        subscribed = [topic for topic, peers in self.peer_topics.items() if peer_id in peers]
        super()._handle_dead_peer(peer_id)
        if self._streams[peer_id]:
            for topic in subscribed:
                self.peer_topics.setdefault(topic, set()).add(peer_id)
            self._peer_subscription_count[peer_id] = len(subscribed)
        else:
            del self._streams[peer_id]

    async def _handle_new_peer(self, peer_id: Untyped) -> None:
        """Register an admitted peer, with a queue long enough for a burst."""
        if not self._keeper.is_admitted(peer_id):
            return
        await super()._handle_new_peer(peer_id)
        queue = self.peer_queues.get(peer_id)
        if queue is not None:
            queue.max_message_size = WINDOW_MAX
            queue._queue.max_size = OUTBOUND_RPCS_MAX


def _is_writable(stream: Untyped) -> bool:
    if stream is None or stream.is_closed or stream.muxed_conn.event_shutting_down.is_set():
        return False
    return not (stream.muxed_stream.closed or stream.muxed_stream.send_closed)


def clean_rpc(rpc: Untyped, topics: Container[str]) -> None:
    """Remove from a received frame what libp2p would believe or keep for ever.

    Signed address records, peer exchange, backoffs of years, and control entries of topics that are not ours.
    """
    rpc.ClearField("senderRecord")
    if not rpc.HasField("control"):
        return
    control = rpc_pb2.ControlMessage()
    control.ihave.extend(entry for entry in rpc.control.ihave if entry.topicID in topics)
    control.iwant.extend(rpc.control.iwant)
    control.graft.extend(entry for entry in rpc.control.graft if entry.topicID in topics)
    for entry in rpc.control.prune:
        if entry.topicID in topics:
            control.prune.add(topicID=entry.topicID, backoff=min(entry.backoff, PRUNE_BACKOFF_MAX_S))
    rpc.control.CopyFrom(control)
