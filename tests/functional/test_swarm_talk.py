"""Nodes of one network find, hear and ask each other over real connections on loopback."""

import ipaddress
import socket

import pytest
import trio
from support.swarm_nodes import is_connected, open_node, wait_until

from node.errors import PeerRefused, SwarmError
from node.ports import GossipVerdict
from node.swarm.multiaddrs import parse_multiaddr
from node.swarm.network import SwarmNetwork
from protocol.identity import NodeId, peer_id


class Heard:
    """A gossip handler that keeps what it hears."""

    def __init__(self, verdict: GossipVerdict = GossipVerdict.ACCEPT) -> None:
        self.data: list[bytes] = []
        self.forwarders: list[NodeId] = []
        self.verdict = verdict

    def __call__(self, forwarder: NodeId, data: bytes) -> GossipVerdict:
        self.forwarders.append(forwarder)
        self.data.append(data)
        return self.verdict


async def echo(_: NodeId, data: bytes) -> bytes:
    return b"re:" + data


def topic_peers(node: SwarmNetwork) -> int:
    """How many peers a node's gossip would send to."""
    session = node._session
    assert session is not None
    return sum(len(peers) for peers in session.pubsub.router.mesh.values())


async def test_gossip_over_two_hops_arrives_once():
    async with open_node(1) as a, open_node(2) as b, open_node(3) as c:
        heard = {node: Heard() for node in (a, b, c)}
        for node, handler in heard.items():
            node.on_gossip("offers", handler)
        await a.connect(b.addresses[0])
        await c.connect(b.addresses[0])
        await wait_until(lambda: topic_peers(a) == 1 and topic_peers(b) == 2 and topic_peers(c) == 1)
        await a.publish("offers", b"one")
        await wait_until(lambda: heard[c].data)
        await c.publish("offers", b"two")
        await wait_until(lambda: heard[a].data)
        assert heard[c].data == [b"one"]
        assert heard[c].forwarders == [b.node]
        assert heard[b].data == [b"one", b"two"]
        assert heard[a].data == [b"two"]


async def test_a_burst_of_gossip_is_delivered_whole():
    async with open_node(1) as a, open_node(2) as b:
        heard = Heard()
        a.on_gossip("offers", Heard())
        b.on_gossip("offers", heard)
        await a.connect(b.addresses[0])
        await wait_until(lambda: topic_peers(a) == 1 and topic_peers(b) == 1)
        sent = [b"%03d" % index for index in range(200)]
        for data in sent:
            await a.publish("offers", data)
        await wait_until(lambda: len(heard.data) == len(sent))
        assert heard.data == sent


async def test_ignored_gossip_is_not_passed_on_and_harms_nobody():
    async with open_node(1) as a, open_node(2) as b, open_node(3) as c:
        ignoring, last = Heard(GossipVerdict.IGNORE), Heard()
        b.on_gossip("offers", ignoring)
        c.on_gossip("offers", last)
        await a.connect(b.addresses[0])
        await c.connect(b.addresses[0])
        await wait_until(lambda: topic_peers(b) == 1)
        for index in range(20):
            await a.publish("offers", b"%d" % index)
        await wait_until(lambda: len(ignoring.data) == 20)
        assert is_connected(b, a.node)
        ignoring.verdict = GossipVerdict.ACCEPT
        await a.publish("offers", b"wanted")
        await wait_until(lambda: last.data)
        assert last.data == [b"wanted"]


async def test_gossip_survives_its_streams():
    """A broken gossip stream on a live connection is opened again, and subscriptions are not forgotten."""
    async with open_node(1) as a, open_node(2) as b:
        heard = {node: Heard() for node in (a, b)}
        for node, handler in heard.items():
            node.on_gossip("offers", handler)
        await a.connect(b.addresses[0])
        await wait_until(lambda: topic_peers(a) == 1 and topic_peers(b) == 1)
        for round_number in range(3):
            for node in (a, b):
                assert node._session is not None
                (stream,) = node._session.pubsub.peers.values()
                await stream.reset()
                await node.publish("offers", b"lost with its stream")
            for node, other in ((a, b), (b, a)):
                marker = b"%d" % round_number

                async def heard_by_other(node=node, other=other, marker=marker) -> None:
                    while marker + other.node not in heard[other].data:
                        await node.publish("offers", marker + other.node)
                        await trio.sleep(0.02)

                with trio.fail_after(20):
                    await heard_by_other()


async def test_requests_go_both_ways_and_may_be_long():
    async with open_node(1) as a, open_node(2) as b:
        a.on_request("trade/1", echo)
        b.on_request("trade/1", echo)
        assert await a.connect(b.addresses[0]) == b.node
        long = bytes(1024 * 1024 - 3)
        assert await a.request(b.node, "trade/1", long) == b"re:" + long
        assert await b.request(a.node, "trade/1", b"") == b"re:"
        with pytest.raises(ValueError, match="too many for a request"):
            await a.request(b.node, "trade/1", bytes(1024 * 1024 + 1))


async def test_failed_requests_say_why():
    async with open_node(1) as a, open_node(2) as b:
        hung = trio.Event()

        async def fail(_: NodeId, __: bytes) -> bytes:
            raise ValueError("no")

        async def hang(_: NodeId, __: bytes) -> bytes:
            hung.set()
            await trio.sleep_forever()
            return b""

        async def too_long(_: NodeId, __: bytes) -> bytes:
            return bytes(1024 * 1024 + 1)

        b.on_request("fail/1", fail)
        b.on_request("hang/1", hang)
        b.on_request("long/1", too_long)
        stranger = NodeId(bytes(32))
        with pytest.raises(SwarmError, match=f"no address known for {peer_id(stranger)}"):
            await a.request(stranger, "fail/1", b"")
        await a.connect(b.addresses[0])
        with pytest.raises(PeerRefused, match="does not answer"):
            await a.request(b.node, "unknown/1", b"")
        for name in ("fail/1", "long/1"):
            with pytest.raises(PeerRefused, match="refused"):
                await a.request(b.node, name, b"")
        with pytest.raises(SwarmError, match=r"hang/1: timed out after 0\.05 s"):
            await a.request(b.node, "hang/1", b"", timeout_ms=50)
        await wait_until(hung.is_set)
        with pytest.raises(SwarmError, match="does not ask itself"):
            await a.request(a.node, "fail/1", b"")


async def test_dials_that_fail_say_why():
    async with open_node(1) as a, open_node(2) as b:
        address = parse_multiaddr(b.addresses[0])
        with socket.create_server(("127.0.0.1", 0)) as unused:
            free_port = unused.getsockname()[1]
        other = peer_id(bytes(32))
        for text, reason in (
            (f"/ip4/127.0.0.1/tcp/{free_port}/p2p/{other}", "connection refused"),
            (f"{address.transport}/p2p/{other}", "another node answers there"),
            (address.transport, "which node it leads to"),
            (f"/ip4/127.0.0.1/udp/4001/p2p/{other}", "not 'udp'"),
            (f"/dns4/does-not-exist.invalid/tcp/4001/p2p/{other}", "cannot be resolved"),
            (a.addresses[0], "own address"),
        ):
            with pytest.raises(SwarmError, match=reason):
                await a.connect(text)


async def test_a_request_dials_a_remembered_address_and_names_resolve():
    async with open_node(1) as a, open_node(2) as b:
        met: list[NodeId] = []

        async def meet(node: NodeId) -> None:
            met.append(node)

        a.on_connect(meet)
        b.on_connect(meet)
        b.on_request("trade/1", echo)
        address = parse_multiaddr(b.addresses[0])
        a.add_address(b.node, ("nonsense", "/ip4/127.0.0.1/tcp/1", f"/dns4/localhost/tcp/{address.port}"))
        assert await a.request(b.node, "trade/1", b"x") == b"re:x"
        await wait_until(lambda: len(met) == 2)
        assert set(met) == {a.node, b.node}
        (peer,) = a.peers()
        assert (peer.node, peer.connected, peer.agent, peer.inbound) == (b.node, True, "gpunode/test", False)
        await wait_until(lambda: a.peers()[0].latency_ms)
        assert b.peers()[0].inbound


async def test_many_requests_at_once_share_one_dial():
    async with open_node(1) as a, open_node(2) as b:
        b.on_request("trade/1", echo)
        a.add_address(b.node, b.addresses)
        replies: list[bytes] = []

        async def ask() -> None:
            replies.append(await a.request(b.node, "trade/1", b"x"))

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(ask)
        assert replies == [b"re:x"] * 6
        assert len(a.peers()) == len(b.peers()) == 1


async def test_a_peer_that_restarts_is_found_again():
    async with open_node(1) as a:
        heard = Heard()
        a.on_gossip("offers", Heard())
        async with open_node(2) as b:
            listen = parse_multiaddr(b.addresses[0]).transport
            await a.connect(b.addresses[0])
        await wait_until(lambda: not is_connected(a, b.node))
        assert [peer.connected for peer in a.peers()] == [False]
        async with open_node(2, listen=(listen,)) as again:
            again.on_gossip("offers", heard)
            again.on_request("trade/1", echo)
            await wait_until(lambda: is_connected(a, again.node))
            assert await a.request(again.node, "trade/1", b"x") == b"re:x"
            await wait_until(lambda: topic_peers(a) == 1)
            await a.publish("offers", b"hello again")
            await wait_until(lambda: heard.data)


async def test_bootstrap_peers_are_dialled_until_they_answer():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    async with open_node(2) as first:
        node = first.node
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id(node)}"
    async with open_node(1, bootstrap=(address,)) as a:
        async with open_node(2, listen=(f"/ip4/127.0.0.1/tcp/{port}",)):
            await wait_until(lambda: is_connected(a, node))
        await wait_until(lambda: not is_connected(a, node))
        async with open_node(2, listen=(f"/ip4/127.0.0.1/tcp/{port}",)):
            await wait_until(lambda: is_connected(a, node))


async def test_addresses_are_real_and_taken_ports_are_refused():
    async with open_node(1, listen=("/ip4/0.0.0.0/tcp/0",)) as a:
        parsed = [parse_multiaddr(text) for text in a.addresses]
        assert parsed[-1].host == "127.0.0.1"
        assert all(address.node == a.node and address.port for address in parsed)
        assert not any(ipaddress.ip_address(address.host).is_unspecified for address in parsed)
        with pytest.raises(SwarmError, match=r"cannot listen on .*: Address already in use"):
            async with open_node(2, listen=(parsed[-1].transport,)):
                pytest.fail("two nodes share a port")
        async with open_node(3) as c:
            assert await c.connect(a.addresses[-1]) == a.node


@pytest.mark.parametrize("bad", ["/ip4/127.0.0.1/udp/1/quic-v1", "127.0.0.1:4001", "/ip4/300.0.0.1/tcp/1"])
async def test_malformed_addresses_are_refused_at_the_start(bad: str):
    with pytest.raises(SwarmError):
        async with open_node(1, listen=(bad,)):
            pytest.fail("started")
    with pytest.raises(SwarmError):
        async with open_node(1, bootstrap=(bad,)):
            pytest.fail("started")


async def test_errors_inside_the_context_are_not_wrapped():
    with pytest.raises(ValueError, match="mine"):
        async with open_node(1):
            raise ValueError("mine")
