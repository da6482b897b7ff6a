"""What members of the network do wrong: the node lives, serves its friends, and cuts who goes too far."""

import random
import secrets
import struct

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils.varint import encode_uvarint
from support.swarm_nodes import (
    GOSSIP_PROTOCOL,
    Stranger,
    is_connected,
    is_dead,
    open_node,
    open_stranger,
    peer_of,
    wait_until,
)

from node.errors import PeerRefused, SwarmError
from node.ports import GossipVerdict
from node.swarm.gossip import id_bytes, topic_name
from node.swarm.guards import BUFFERED_MAX, STREAMS_MAX
from node.swarm.hello import HELLO_PROTOCOL
from node.swarm.network import SwarmNetwork
from node.swarm.peers import FAULT_MALFORMED
from protocol.identity import NodeId, network_id

TOPIC = topic_name(network_id("test"), "offers")


async def echo(_: NodeId, data: bytes) -> bytes:
    return b"re:" + data


def accept(_: NodeId, __: bytes) -> GossipVerdict:
    return GossipVerdict.ACCEPT


async def assert_serves(node: SwarmNetwork) -> None:
    """Fail unless a friend can connect, ask, and be heard, and the host has not been restarted."""
    async with open_node(99) as friend:
        await friend.connect(node.addresses[0])
        assert await friend.request(node.node, "trade/1", b"x") == b"re:x"
        friend.on_gossip("offers", accept)
        accepted = node.counters["gossip_accept"]
        await wait_until(lambda: friend._session is not None and friend._session.pubsub.router.mesh.get(TOPIC))
        await friend.publish("offers", secrets.token_bytes(8))
        await wait_until(lambda: node.counters["gossip_accept"] > accepted)
    assert node.counters["restarts"] == 0


def message(author_seed: bytes, data: bytes = b"x", topic: str = TOPIC, seqno: bytes = b"") -> rpc_pb2.Message:
    """Return a correctly signed gossip message."""
    keys = create_new_key_pair(author_seed)
    signed = rpc_pb2.Message(
        data=data,
        topicIDs=[topic],
        from_id=id_bytes(NodeId(keys.public_key.to_bytes())),
        seqno=seqno or secrets.token_bytes(8),
    )
    signed.signature = keys.private_key.sign(b"libp2p-pubsub:" + signed.SerializeToString())
    return signed


def frame(*messages: rpc_pb2.Message) -> bytes:
    """Return a gossipsub frame of messages."""
    encoded: bytes = rpc_pb2.RPC(publish=messages).SerializeToString()
    return encoded


ORIGINAL = message(b"s" * 32)


def changed(**fields: object) -> rpc_pb2.Message:
    """Return the original with some fields changed after it was signed."""
    altered = rpc_pb2.Message()
    altered.CopyFrom(ORIGINAL)
    for name, value in fields.items():
        setattr(altered, name, value)
    return altered


BAD_MESSAGES = {
    "garbage key of an unknown author": changed(from_id=b"\x12\x20" + b"r" * 32, key=b"\x08\x63\x12\x01x"),
    "empty author": changed(from_id=b"", key=b"\xff" * 5),
    "author that is no key": changed(from_id=b"\x00\x24" + b"z" * 36),
    "another author": changed(from_id=id_bytes(NodeId(create_new_key_pair(b"o" * 32).public_key.to_bytes()))),
    "bad signature": changed(signature=b"s" * 64),
    "no signature": changed(signature=b""),
    "short sequence number": changed(seqno=b"1"),
    "other bytes": changed(data=b"y"),
    "too long": message(b"s" * 32, data=bytes(70_000)),
}


async def test_bad_messages_are_dropped_and_held_against_the_sender():
    async with open_node(1, penalty_max=1000.0) as node, open_stranger() as stranger:
        heard: list[bytes] = []

        def hear(_: NodeId, data: bytes) -> GossipVerdict:
            heard.append(data)
            return GossipVerdict.ACCEPT

        node.on_gossip("offers", hear)
        muxed = await stranger.join(node.addresses[0], node.node)
        stream = await stranger.stream(node.node, GOSSIP_PROTOCOL)
        for count, (name, bad) in enumerate(BAD_MESSAGES.items(), 1):
            await stream.write(encode_uvarint(len(frame(bad))) + frame(bad))
            await wait_until(lambda count=count: node.counters["gossip_malformed"] == count)
            assert node._book._penalties[stranger.node][0] >= count * (FAULT_MALFORMED - 1), name
        # The original of a copy with a bad signature still comes through.
        await stream.write(encode_uvarint(len(frame(ORIGINAL))) + frame(ORIGINAL))
        await wait_until(lambda: heard)
        assert heard == [b"x"]
        assert not is_dead(muxed)


BAD_FRAMES = {
    "no protobuf": encode_uvarint(20) + b"\xff" * 20,
    "4 GiB announced": encode_uvarint(1 << 32) + b"x" * 1000,
    "endless length": b"\xff" * 20,
    "1 MiB announced": encode_uvarint(1 << 20),
}


async def test_malformed_frames_end_one_stream_then_the_peer():
    async with open_node(1) as node, open_stranger() as stranger:
        node.on_request("trade/1", echo)
        node.on_gossip("offers", accept)
        muxed = await stranger.join(node.addresses[0], node.node)
        frames = [*BAD_FRAMES.values(), BAD_FRAMES["no protobuf"]]
        for count, bad in enumerate(frames, 1):
            assert not is_dead(muxed)
            stream = await stranger.stream(node.node, GOSSIP_PROTOCOL)
            await stream.write(bad)
            await wait_until(lambda count=count: node.counters["gossip_malformed"] == count)
        await wait_until(lambda: is_dead(muxed))
        assert node.counters["peers_banned"] == 1
        with pytest.raises(Exception):  # noqa: B017 - libp2p raises what it likes on a closed connection
            await stranger.join(node.addresses[0], node.node)
        await assert_serves(node)


async def test_a_frame_that_is_never_finished_is_given_up():
    async with open_node(1, frame_timeout_ms=200, penalty_max=4.0) as node, open_stranger() as stranger:
        muxed = await stranger.join(node.addresses[0], node.node)
        stream = await stranger.stream(node.node, GOSSIP_PROTOCOL)
        await stream.write(encode_uvarint(1000) + b"x")
        await wait_until(lambda: is_dead(muxed))


async def test_odd_control_messages_do_no_harm():
    async with open_node(1) as node, open_stranger() as stranger:
        node.on_request("trade/1", echo)
        node.on_gossip("offers", accept)
        await stranger.join(node.addresses[0], node.node)
        rpc = rpc_pb2.RPC()
        for topic in (TOPIC, "other", ""):
            rpc.control.ihave.add(topicID=topic, messageIDs=[b"zz", b"", b"\xff" * 200])
            rpc.control.graft.add(topicID=topic)
            rpc.control.prune.add(topicID=topic, backoff=2**63).peers.add(peerID=b"junk", signedPeerRecord=b"x")
        rpc.control.iwant.add(messageIDs=[b"unknown", b""])
        rpc.senderRecord = b"garbage"
        for index in range(300):
            rpc.subscriptions.add(subscribe=True, topicid=f"gpunode/1/elsewhere/{index}")
        rpc.subscriptions.add(subscribe=True, topicid=TOPIC)
        rpc.publish.append(message(b"s" * 32))
        await stranger.gossip_frame(node.node, rpc.SerializeToString())
        await wait_until(lambda: node.counters["gossip_accept"] == 1)
        session = node._session
        assert session is not None
        assert set(session.pubsub.peer_topics) == {TOPIC}
        assert set(session.pubsub.router.back_off) <= {TOPIC}
        await assert_serves(node)


async def test_rejected_records_ban_their_forwarder():
    async with open_node(1) as a, open_node(2) as b:
        a.on_gossip("offers", accept)
        b.on_gossip("offers", lambda _, __: GossipVerdict.REJECT)
        await a.connect(b.addresses[0])
        session = a._session
        assert session is not None
        await wait_until(lambda: session.pubsub.router.mesh[TOPIC])
        for index in range(8):
            await a.publish("offers", b"%d" % index)
        await wait_until(lambda: b.counters["peers_banned"] == 1)
        await wait_until(lambda: not is_connected(a, b.node))
        assert b.counters["gossip_accept"] == 0
        with pytest.raises(SwarmError):
            await a.connect(b.addresses[0])
        with pytest.raises(SwarmError, match="banned"):
            await b.connect(a.addresses[0])


async def test_a_validator_that_raises_rejects():
    async with open_node(1) as node, open_stranger() as stranger:
        node.on_request("trade/1", echo)
        bad = True

        def hear(_: NodeId, __: bytes) -> GossipVerdict:
            if bad:
                raise ValueError("a bug in a validator")
            return GossipVerdict.ACCEPT

        node.on_gossip("offers", hear)
        await stranger.join(node.addresses[0], node.node)
        await stranger.gossip_frame(node.node, frame(message(b"s" * 32)))
        await wait_until(lambda: node.counters["gossip_reject"] == 1)
        bad = False
        await assert_serves(node)


async def test_duplicates_and_unwanted_topics_are_counted_and_dropped():
    async with open_node(1) as node, open_stranger() as stranger:
        heard: list[bytes] = []

        def hear(_: NodeId, data: bytes) -> GossipVerdict:
            heard.append(data)
            return GossipVerdict.ACCEPT

        node.on_gossip("offers", hear)
        await stranger.join(node.addresses[0], node.node)
        one = message(b"s" * 32)
        other_network = message(b"s" * 32, topic=topic_name(network_id("other"), "offers"))
        both = message(b"s" * 32)
        both.topicIDs.append("second")
        await stranger.gossip_frame(node.node, frame(one, one, other_network, both, one))
        await wait_until(lambda: node.counters["gossip_duplicate"] == 2)
        assert (heard, node.counters["gossip_unwanted"]) == ([b"x"], 2)


async def test_a_gossip_flood_is_limited_and_cut_while_others_are_served():
    async with (
        open_node(1, gossip_per_s=1.0, gossip_burst=20) as node,
        open_stranger() as stranger,
        open_node(2) as friend,
    ):
        node.on_request("trade/1", echo)
        heard: list[bytes] = []

        def hear(_: NodeId, data: bytes) -> GossipVerdict:
            heard.append(data)
            return GossipVerdict.ACCEPT

        node.on_gossip("offers", hear)
        await friend.connect(node.addresses[0])
        muxed = await stranger.join(node.addresses[0], node.node)
        stream = await stranger.stream(node.node, GOSSIP_PROTOCOL)
        # Dropped before their signatures are looked at: one valid message, many times renumbered, will do.
        cheap = [changed(seqno=struct.pack(">Q", index)) for index in range(200)]
        flood = frame(*cheap)
        good = frame(*(message(b"s" * 32, b"%d" % index) for index in range(20)))
        await stream.write(encode_uvarint(len(good)) + good)
        await wait_until(lambda: len(heard) == 20)
        with pytest.raises(Exception):  # noqa: B017 - libp2p raises what it likes on a cut connection
            for _ in range(100):
                await stream.write(encode_uvarint(len(flood)) + flood)
                assert await friend.request(node.node, "trade/1", b"x") == b"re:x"
            raise EOFError
        await wait_until(lambda: is_dead(muxed))
        assert node.counters["peers_banned"] == 1
        assert len(heard) < 30
        await assert_serves(node)


async def test_a_request_flood_is_limited_and_cut_while_others_are_served():
    async with (
        open_node(1, requests_per_s=1.0, requests_burst=5, requests_at_once=2, penalty_max=5.0) as node,
        open_node(3) as flooder,
        open_node(2) as friend,
    ):
        running, most = 0, 0

        async def handler(_: NodeId, data: bytes) -> bytes:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await trio.lowlevel.checkpoint()
            running -= 1
            return b"re:" + data

        node.on_request("trade/1", handler)
        node.on_gossip("offers", accept)
        await friend.connect(node.addresses[0])
        await flooder.connect(node.addresses[0])
        outcomes: list[str] = []

        async def ask() -> None:
            try:
                await flooder.request(node.node, "trade/1", b"x")
                outcomes.append("answered")
            except SwarmError as error:
                outcomes.append(type(error).__name__)

        for _ in range(3):
            await ask()
        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(ask)
        assert await friend.request(node.node, "trade/1", b"x") == b"re:x"
        await wait_until(lambda: not is_connected(node, flooder.node))
        assert 3 <= outcomes.count("answered") <= 6
        assert "PeerRefused" in outcomes
        assert most <= 2
        assert node.counters["peers_banned"] == 1


async def test_slow_requests_and_unread_replies_end_by_timeout():
    async with open_node(1, request_timeout_ms=300, penalty_max=9.0) as node, open_stranger() as stranger:
        node.on_request("trade/1", echo)
        node.on_gossip("offers", accept)

        async def long_reply(_: NodeId, __: bytes) -> bytes:
            return bytes(1024 * 1024)

        node.on_request("long/1", long_reply)
        muxed = await stranger.join(node.addresses[0], node.node)
        slow = await stranger.stream(node.node, "/gpunode/trade/1")
        await slow.write(struct.pack(">I", 100) + b"x")
        unread = await stranger.stream(node.node, "/gpunode/long/1")
        await unread.write(struct.pack(">I", 0))
        await wait_until(lambda: node.counters["requests_failed"] == 2)
        await wait_until(lambda: is_dead(muxed))  # five points each
        await assert_serves(node)


async def test_requests_that_announce_too_much_are_refused():
    async with open_node(1) as node, open_stranger() as stranger:
        node.on_request("trade/1", echo)
        node.on_gossip("offers", accept)
        muxed = await stranger.join(node.addresses[0], node.node)
        for count in range(1, 6):
            stream = await stranger.stream(node.node, "/gpunode/trade/1")
            await stream.write(b"\xff\xff\xff\xff" + b"x" * 1000)
            await wait_until(lambda count=count: node.counters["requests_failed"] == count)
        await wait_until(lambda: is_dead(muxed))
        await assert_serves(node)


async def test_garbage_on_every_protocol_leaves_the_node_serving():
    async with open_node(1) as node:
        node.on_request("trade/1", echo)
        node.on_gossip("offers", accept)
        protocols = (GOSSIP_PROTOCOL, "/gpunode/trade/1", IDENTIFY, HELLO_PROTOCOL)
        payloads = (encode_uvarint(30) + b"\xff" * 30, b"\xff" * 12, b"", b"z" * 33, secrets.token_bytes(300))
        for protocol in protocols:
            async with open_stranger() as stranger:
                muxed = await stranger.join(node.addresses[0], node.node)
                for payload in payloads:
                    if is_dead(muxed):
                        break
                    await _throw(stranger, node.node, protocol, payload)
        # And below the protocols: a stream whose negotiation is not text.
        async with open_stranger() as stranger:
            muxed = await stranger.join(node.addresses[0], node.node)
            stream = await stranger.host.get_network().new_stream(peer_of(node.node))
            await stream.write(b"\x13/multistream/1.0.0\n\x06\xff\xfe\xfd\xfc\xfb\n")
            await wait_until(lambda: node.counters["streams_failed"] >= 1)
        await assert_serves(node)


async def _throw(stranger: Stranger, node: NodeId, protocol: str, payload: bytes) -> None:
    try:
        stream = await stranger.stream(node, protocol)
        await stream.write(payload)
        await stream.reset()
    except Exception as error:
        # The node may have cut us by now, which is what it should do.
        assert type(error).__module__.startswith("libp2p"), error


def _yamux(kind: int, flags: int, stream_id: int, length: int) -> bytes:
    return struct.pack("!BBHII", 0, kind, flags, stream_id, length)


async def test_yamux_abuse_ends_the_connection_only():
    async def hang(_: NodeId, __: bytes) -> bytes:
        await trio.sleep_forever()
        return b""

    async with open_node(1) as node:
        node.on_request("trade/1", echo)
        node.on_request("hang/1", hang)
        node.on_gossip("offers", accept)
        async with open_stranger() as stranger:
            muxed = await stranger.join(node.addresses[0], node.node)
            stream = await muxed.open_stream()
            await muxed.secured_conn.write(_yamux(0, 0, stream.stream_id, 1 << 30))
            await wait_until(lambda: is_dead(muxed))
        async with open_stranger() as stranger:
            muxed = await stranger.join(node.addresses[0], node.node)
            await _overrun(muxed, await stranger.stream(node.node, "/gpunode/hang/1"))
            await wait_until(lambda: is_dead(muxed))
        async with open_stranger() as stranger:
            muxed = await stranger.join(node.addresses[0], node.node)
            with pytest.raises(Exception):  # noqa: B017 - the connection breaks under it
                for index in range(STREAMS_MAX + 200):
                    await muxed.secured_conn.write(_yamux(1, 1, 1001 + 2 * index, 0))
                await wait_until(lambda: is_dead(muxed))
                raise EOFError
            await wait_until(lambda: is_dead(muxed))
        await assert_serves(node)


async def _overrun(muxed, stream) -> None:
    """Ignore the window: push bytes into a stream from which nothing more is read."""
    await stream.write(struct.pack(">I", 0))
    chunk = bytes(60_000)
    try:
        for _ in range(2 * BUFFERED_MAX // len(chunk)):
            await muxed.secured_conn.write(_yamux(0, 0, stream.muxed_stream.stream_id, len(chunk)) + chunk)
    except Exception as error:
        assert type(error).__module__.startswith("libp2p"), error


async def test_random_yamux_frames_leave_the_node_serving():
    async with open_node(1, connects_burst=200) as node:
        node.on_request("trade/1", echo)
        node.on_gossip("offers", accept)
        choose = random.Random(7)
        for _ in range(6):
            async with open_stranger() as stranger:
                muxed = await stranger.join(node.addresses[0], node.node)
                try:
                    for _ in range(60):
                        kind = choose.choice([0, 1, 2, 0, 1, 4, 255])
                        length = choose.choice([0, 1, 10, 1000, 50_000])
                        body = bytes(length) if kind == 0 else b""
                        flags = choose.choice([0, 1, 2, 4, 8, 3, 5, 9, 15, 65535])
                        stream_id = choose.choice([0, 1, 2, 3, 5, 101, 1 << 31, (1 << 32) - 1])
                        await muxed.secured_conn.write(_yamux(kind, flags, stream_id, length) + body)
                except Exception as error:
                    assert type(error).__module__.startswith("libp2p"), error
        await assert_serves(node)


async def test_too_many_open_streams_are_refused():
    async with open_node(1, streams_per_peer=4) as node, open_stranger() as stranger:
        node.on_request("trade/1", echo)
        node.on_gossip("offers", accept)
        await stranger.join(node.addresses[0], node.node)
        session = node._session
        assert session is not None
        await wait_until(lambda: not session._streams)
        for _ in range(10):
            # Silent: each waits for its negotiation.
            await stranger.host.get_network().new_stream(peer_of(node.node))
        await wait_until(lambda: node._book._penalties.get(stranger.node))
        assert session._streams == {id_bytes(stranger.node): 4}
        await assert_serves(node)


async def test_a_vanished_peer_is_noticed():
    async with (
        open_node(1, ping_interval_ms=50, ping_timeout_ms=200) as node,
        open_node(2, ping_interval_ms=60_000) as friend,
    ):
        await friend.connect(node.addresses[0])
        await wait_until(lambda: is_connected(node, friend.node))
        session = friend._session
        assert session is not None
        (conn,) = session.swarm.get_connections()
        # Its machine is gone: nothing is read any more, and no packet says so.
        async with conn.muxed_conn._write_lock:
            await wait_until(lambda: not is_connected(node, friend.node))


async def test_a_crash_of_libp2p_restarts_the_host_on_the_same_port():
    async with open_node(1) as node, open_node(2) as friend:
        heard: list[bytes] = []

        def hear(_: NodeId, data: bytes) -> GossipVerdict:
            heard.append(data)
            return GossipVerdict.ACCEPT

        node.on_request("trade/1", echo)
        node.on_gossip("offers", hear)
        friend.on_gossip("offers", accept)
        await friend.connect(node.addresses[0])
        before = node.addresses
        session = node._session
        assert session is not None

        async def crash() -> None:
            raise RuntimeError("libp2p broke")

        session.pubsub.manager.run_task(crash)
        await wait_until(lambda: node.counters["restarts"] == 1)
        await wait_until(lambda: node.addresses)
        assert node.addresses == before
        assert await friend.request(node.node, "trade/1", b"x") == b"re:x"
        await wait_until(lambda: friend._session is not None and friend._session.pubsub.router.mesh[TOPIC])
        await friend.publish("offers", b"after the crash")
        await wait_until(lambda: heard)


async def test_our_own_assertions_are_not_swallowed():
    async def broken(_: NodeId, __: bytes) -> bytes:
        raise AssertionError("our bug")

    with pytest.raises(BaseExceptionGroup) as caught:
        async with open_node(1) as node, open_node(2) as friend:
            node.on_request("broken/1", broken)
            await friend.connect(node.addresses[0])
            with pytest.raises((PeerRefused, SwarmError)):
                await friend.request(node.node, "broken/1", b"x")
            with trio.move_on_after(20):  # the crash ends this block
                await trio.sleep_forever()
    assert caught.group_contains(AssertionError, match="our bug")
