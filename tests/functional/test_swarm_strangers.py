"""Who is not of the network, or does not say so, gets nothing and is cut."""

import socket
import struct
from contextlib import AsyncExitStack

import pytest
import trio
from libp2p.crypto.ed25519 import Ed25519PrivateKey, create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.host.ping import ID as PING
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.pubsub.pb import rpc_pb2
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from multiaddr import Multiaddr
from support.swarm_nodes import (
    GOSSIP_PROTOCOL,
    is_connected,
    is_dead,
    open_node,
    open_stranger,
    peer_of,
    wait_until,
)

from node.errors import SwarmError
from node.ports import GossipVerdict
from node.swarm.hello import (
    HELLO_PROTOCOL,
    HelloConfirm,
    HelloDone,
    HelloFailed,
    HelloOpen,
    HelloProof,
    decode_hello_untrusted,
    dialler_proof,
    encode_hello,
    hello_key,
)
from node.swarm.multiaddrs import parse_multiaddr
from node.swarm.network import SwarmNetwork
from node.swarm.streams import read_frame_untrusted, write_frame
from protocol.identity import NodeId, network_id

KEY = b"k" * 32
SHORT = 300


async def echo(_: NodeId, data: bytes) -> bytes:
    return b"re:" + data


async def assert_serves(node: SwarmNetwork, name: str = "trade/1") -> None:
    """Fail unless a friend can still connect and ask."""
    async with open_node(99) as friend:
        await friend.connect(node.addresses[0])
        assert await friend.request(node.node, name, b"x") == b"re:x"


def raw_connection(node: SwarmNetwork, source: str = "127.0.0.1") -> socket.socket:
    """Open a bare TCP connection to a node."""
    port = parse_multiaddr(node.addresses[0]).port
    return socket.create_connection(("127.0.0.1", port), timeout=5, source_address=(source, 0))


async def test_plaintext_is_refused_in_both_directions():
    async with open_node(1) as node:
        friend = create_new_key_pair(b"f" * 32)

        class Impostor(Ed25519PrivateKey):
            """Signs with its own key and shows the friend's."""

            def get_public_key(self):
                return friend.public_key

        def plaintext(keys):
            fake = KeyPair(Impostor(keys.private_key.impl), friend.public_key)
            return {PLAINTEXT_PROTOCOL_ID: InsecureTransport(fake)}

        async with open_stranger(plaintext) as impostor:
            with pytest.raises(Exception, match="failed to upgrade security"):
                await impostor.dial(node.addresses[0])
        assert node.peers() == ()
        assert node._session is not None
        offered = node._session.swarm.upgrader.security_multistream.transports
        assert list(offered) == ["/noise"]


async def test_members_of_a_private_network_meet():
    async with open_node(1, key=KEY) as a, open_node(2, key=KEY) as b:
        b.on_request("trade/1", echo)
        await a.connect(b.addresses[0])
        assert await a.request(b.node, "trade/1", b"x") == b"re:x"


@pytest.mark.parametrize(("name", "key"), [("test", b"w" * 32), ("test", b""), ("other", KEY)])
async def test_nodes_of_other_networks_are_cut(name: str, key: bytes):
    async with open_node(1, key=KEY) as member, open_node(2, name=name, key=key) as outsider:
        for one, other in ((member, outsider), (outsider, member)):
            with pytest.raises(SwarmError, match="another network"):
                await one.connect(other.addresses[0])
            assert not is_connected(one, other.node)
            assert not is_connected(other, one.node)
        await wait_until(lambda: member.counters["hellos_failed"] == 2)
        await wait_until(lambda: not member._book.connected)


async def test_a_stranger_that_knows_the_network_id_still_lacks_the_key():
    async with open_node(1, key=KEY) as member, open_stranger() as stranger:
        muxed = await stranger.dial(member.addresses[0])
        stream = await stranger.stream(member.node, HELLO_PROTOCOL)
        nonce = bytes(32)
        await write_frame(stream, encode_hello(HelloOpen(network=network_id("test", KEY), nonce=nonce)))
        theirs = decode_hello_untrusted(await read_frame_untrusted(stream, 4096), HelloProof)
        guessed = dialler_proof(
            hello_key(network_id("test", KEY), b"guessed"), stranger.node, member.node, (nonce, theirs.nonce)
        )
        await write_frame(stream, encode_hello(HelloConfirm(proof=guessed, agent="x")))
        with pytest.raises(HelloFailed, match="does not accept our network key"):
            decode_hello_untrusted(await read_frame_untrusted(stream, 4096), HelloDone)
        await wait_until(lambda: is_dead(muxed))
        assert member.peers() == ()


async def test_a_silent_peer_is_cut():
    async with open_node(1, hello_timeout_ms=SHORT) as node, open_stranger() as stranger:
        muxed = await stranger.dial(node.addresses[0])
        await wait_until(lambda: node._book.connected)
        await wait_until(lambda: is_dead(muxed))
        await wait_until(lambda: not node._book.connected)
        assert node.counters["hellos_failed"] == 1
        assert node.peers() == ()


async def test_a_listener_that_never_answers_the_hello_is_given_up():
    async def hang(stream) -> None:
        await trio.sleep_forever()

    async with open_node(1, hello_timeout_ms=SHORT) as node, open_stranger() as stranger:
        stranger.host.set_stream_handler(HELLO_PROTOCOL, hang)
        await stranger.host.get_network().listen(Multiaddr("/ip4/127.0.0.1/tcp/0"))
        with pytest.raises(SwarmError, match="did not say hello in time"):
            await node.connect(str(stranger.host.get_addrs()[0]))
        assert node.peers() == ()


async def test_before_the_hello_nothing_is_answered_heard_or_sent():
    async with open_node(1, hello_timeout_ms=2000) as node, open_stranger() as stranger:
        asked, heard = [], []

        async def handler(_: NodeId, data: bytes) -> bytes:
            asked.append(data)
            return b"secret"

        def gossip(_: NodeId, data: bytes) -> GossipVerdict:
            heard.append(data)
            return GossipVerdict.ACCEPT

        node.on_request("trade/1", handler)
        node.on_gossip("offers", gossip)
        received: list[bytes] = []

        async def on_gossip_stream(stream) -> None:
            received.append(await stream.read(1024))

        stranger.host.set_stream_handler(GOSSIP_PROTOCOL, on_gossip_stream)
        muxed = await stranger.dial(node.addresses[0])
        session = node._session
        assert session is not None
        session.pubsub.admit(peer_of(stranger.node))  # whatever makes libp2p want to register it
        rpc = rpc_pb2.RPC(publish=[rpc_pb2.Message(data=b"x", topicIDs=["offers"])])
        await stranger.gossip_frame(node.node, rpc.SerializeToString())
        streams = [await stranger.stream(node.node, protocol) for protocol in ("/gpunode/trade/1", IDENTIFY)]
        for stream in streams:
            await stream.write(struct.pack(">I", 1) + b"x")
        for stream in streams:
            with pytest.raises(Exception):  # noqa: B017 - libp2p raises what it likes on a dead stream
                assert not await stream.read(64)
                raise EOFError
        assert await session.wait_admitted(peer_of(stranger.node)) is None
        await wait_until(lambda: is_dead(muxed))
        assert (asked, heard, received) == ([], [], [])


async def test_a_stranger_s_early_streams_wait_for_its_hello():
    async with open_node(1) as node, open_stranger() as stranger:
        node.on_request("trade/1", echo)
        await stranger.dial(node.addresses[0])
        stream = await stranger.stream(node.node, "/gpunode/trade/1")
        await stream.write(struct.pack(">I", 1) + b"x")
        await stranger.say_hello(node.node)
        assert await stream.read(64) == struct.pack(">I", 4) + b"re:x"


async def test_malformed_hellos_end_the_connection():
    async with open_node(1) as node:
        node.on_request("trade/1", echo)
        for data in (b"\xff\xff\xff\xff", struct.pack(">I", 3) + b"abc", struct.pack(">I", 1) + b"\xa0", b""):
            async with open_stranger() as stranger:
                muxed = await stranger.dial(node.addresses[0])
                stream = await stranger.stream(node.node, HELLO_PROTOCOL)
                await stream.write(data)
                await stream.close()
                if data:
                    await wait_until(lambda muxed=muxed: is_dead(muxed))
        await assert_serves(node)


async def test_a_wrong_order_of_the_hello_is_refused():
    async with open_node(1) as node, open_stranger() as stranger:
        muxed = await stranger.dial(node.addresses[0])
        stream = await stranger.stream(node.node, HELLO_PROTOCOL)
        await write_frame(stream, encode_hello(HelloDone(agent="x")))
        await wait_until(lambda: is_dead(muxed))
        assert node.peers() == ()


async def test_garbage_and_half_open_connections_leave_the_node_serving():
    async with open_node(1, upgrade_timeout_ms=1500) as node:
        node.on_request("trade/1", echo)
        hello = b"\x13/multistream/1.0.0\n"
        for data in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 100,
            hello,
            hello + b"\x07/noise\n" + b"x" * 300,
            hello + b"\x07/noise\n\xff\xff" + b"A" * 65535,
            hello + b"\xff\xff\xff\x7f" + b"x" * 1000,
            hello + b"\x03ls\n",
            hello + b"\x06\xff\xfe\xfd\xfc\xfb\n",
        ):
            with raw_connection(node, "127.0.0.2") as connection:
                connection.sendall(data)
        # From another address: connections that say nothing at all, more than one address may hold.
        silent = [raw_connection(node, "127.0.0.3") for _ in range(60)]
        try:
            await assert_serves(node)
            assert node.counters["connections_refused"] > 0
            await wait_until(lambda: node._lasting.gate.pending == 0)
        finally:
            for connection in silent:
                connection.close()
        await assert_serves(node)


async def test_one_address_holds_so_many_connections_and_frees_them():
    async with open_node(1, pending_per_address=3, upgrade_timeout_ms=20_000) as node:
        node.on_request("trade/1", echo)
        held = [raw_connection(node, "127.0.0.2") for _ in range(3)]
        await wait_until(lambda: node._lasting.gate.pending == 3)
        with raw_connection(node, "127.0.0.2") as extra:
            await trio.to_thread.run_sync(lambda: _read_to_end(extra))
        assert node.counters["connections_refused"] == 1
        await assert_serves(node)
        for connection in held:
            connection.close()
        await wait_until(lambda: node._lasting.gate.pending == node._lasting.gate.settled == 0)


async def test_more_connections_than_slots_in_a_lifetime():
    async with open_node(1, max_peers=4) as node:
        node.on_request("trade/1", echo)
        async with open_stranger() as stranger:
            for _ in range(5):
                muxed = await stranger.join(node.addresses[0], node.node)
                await wait_until(lambda: node._lasting.gate.settled == 1)
                await muxed.close()
                await wait_until(lambda: node._lasting.gate.settled == 0)
            await wait_until(lambda: node._lasting.gate.pending == node._lasting.gate.settled == 0)
        await assert_serves(node)


async def test_inbound_peers_leave_room_for_those_that_we_dial():
    async with open_node(1, max_peers=4) as node:
        node.on_request("trade/1", echo)
        async with AsyncExitStack() as stack:
            for _ in range(3):
                stranger = await stack.enter_async_context(open_stranger())
                await stranger.join(node.addresses[0], node.node)
            late = await stack.enter_async_context(open_node(2))
            with pytest.raises(SwarmError, match="no room for more peers"):
                await late.connect(node.addresses[0])
            await node.connect(late.addresses[0])
            assert await late.request(node.node, "trade/1", b"x") == b"re:x"


def _read_to_end(connection: socket.socket) -> None:
    try:
        while connection.recv(1024):
            pass
    except ConnectionError:
        pass


async def test_libp2p_ping_is_not_spoken():
    async with open_node(1) as node, open_stranger() as stranger:
        await stranger.join(node.addresses[0], node.node)
        with pytest.raises(Exception, match="failed to open a stream"):
            await stranger.stream(node.node, PING)
