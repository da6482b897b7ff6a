"""The in-memory network that market tests run on behaves like a network, and the same from the same seed."""

import pytest
import trio
from support.memory_network import Faults, MemoryHub, deterministic_trio, open_hub

from node.errors import PeerRefused, SwarmError
from node.ports import GossipVerdict, Network
from protocol.identity import NodeId

A, B, C = (NodeId(bytes([index]) * 32) for index in (1, 2, 3))


def _accept(heard: list[bytes]):
    def handler(_: NodeId, data: bytes) -> GossipVerdict:
        heard.append(data)
        return GossipVerdict.ACCEPT

    return handler


async def _echo(_: NodeId, data: bytes) -> bytes:
    return b"re:" + data


async def test_gossip_goes_only_past_nodes_that_accept_it(autojump_clock):
    async with open_hub(seed=1) as hub:
        a, b, c = (hub.join(node) for node in (A, B, C))
        hub.connect(A, B)
        hub.connect(B, C)
        heard: list[bytes] = []
        verdict = GossipVerdict.ACCEPT
        b.on_gossip("offers", lambda _, __: verdict)
        c.on_gossip("offers", _accept(heard))
        await a.publish("offers", b"one")
        await trio.sleep(1)
        verdict = GossipVerdict.IGNORE
        await a.publish("offers", b"two")
        await trio.sleep(1)
    assert heard == [b"one"]
    assert b.verdicts == {GossipVerdict.ACCEPT: 1, GossipVerdict.IGNORE: 1}


async def test_requests_reply_refuse_and_need_an_address(autojump_clock):
    async with open_hub(seed=1) as hub:
        a, b = hub.join(A), hub.join(B)
        met: list[NodeId] = []

        async def meet(node: NodeId) -> None:
            met.append(node)

        async def fail(_: NodeId, __: bytes) -> bytes:
            raise ValueError("no")

        b.on_request("echo/1", _echo)
        b.on_request("fail/1", fail)
        a.on_connect(meet)
        with pytest.raises(SwarmError, match="no address known"):
            await a.request(B, "echo/1", b"x")
        a.add_address(B, b.addresses)
        assert await a.request(B, "echo/1", b"x") == b"re:x"
        for name in ("fail/1", "unknown/1"):
            with pytest.raises(PeerRefused):
                await a.request(B, name, b"x")
        assert met == [B]
        assert [peer.node for peer in a.peers()] == [B]


async def test_partition_and_crash_time_out(autojump_clock):
    async with open_hub(seed=1) as hub:
        a, b = hub.join(A), hub.join(B)
        b.on_request("echo/1", _echo)
        hub.connect_all()
        hub.partition({A}, {B})
        with pytest.raises(SwarmError, match="timed out"):
            await a.request(B, "echo/1", b"x")
        hub.heal()
        assert await a.request(B, "echo/1", b"x") == b"re:x"
        hub.crash(B)
        with pytest.raises(SwarmError, match="cannot be reached"):
            await a.request(B, "echo/1", b"x")
        hub.join(B).on_request("echo/1", _echo)
        assert await a.request(B, "echo/1", b"x") == b"re:x"


async def test_duplicated_requests_reach_the_handler_twice(autojump_clock):
    async with open_hub(seed=1, faults=Faults(duplicate=1.0)) as hub:
        a, b = hub.join(A), hub.join(B)
        calls: list[bytes] = []

        async def count(_: NodeId, data: bytes) -> bytes:
            calls.append(data)
            return data

        b.on_request("count/1", count)
        hub.connect_all()
        assert await a.request(B, "count/1", b"x") == b"x"
        await trio.sleep(1)
    assert calls == [b"x", b"x"]


async def test_a_crash_cancels_handlers(autojump_clock):
    async with open_hub(seed=1) as hub:
        a, b = hub.join(A), hub.join(B)
        entered, left = trio.Event(), []

        async def hang(_: NodeId, __: bytes) -> bytes:
            entered.set()
            try:
                await trio.sleep_forever()
            finally:
                left.append(True)
            return b""

        b.on_request("hang/1", hang)
        hub.connect_all()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_ask_in_vain, a)
            await entered.wait()
            hub.crash(B)
    assert left == [True]


async def _ask_in_vain(network: Network) -> None:
    with pytest.raises(SwarmError, match="was lost"):
        await network.request(B, "hang/1", b"")


def test_the_same_seed_gives_the_same_trace():
    assert _trace(5) == _trace(5)
    assert _trace(5) != _trace(6)


def _trace(seed: int) -> list[str]:
    async def main() -> list[str]:
        async with open_hub(seed=seed, faults=Faults(loss=0.2, duplicate=0.2)) as hub:
            return await _talk(hub)

    with deterministic_trio(seed):
        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def _talk(hub: MemoryHub) -> list[str]:
    networks = [hub.join(NodeId(bytes([index]) * 32)) for index in range(1, 9)]
    for network in networks:
        network.on_gossip("offers", _accept([]))
        network.on_request("echo/1", _echo)
    hub.connect_all()

    async def ask(index: int) -> None:
        try:
            await networks[index].request(networks[(index + 1) % 8].node, "echo/1", b"x", timeout_ms=200)
        except SwarmError:
            hub.trace.append(f"timeout {index}")

    async with trio.open_nursery() as nursery:
        for index in range(8):
            nursery.start_soon(ask, index)
            await networks[index].publish("offers", bytes([index]))
    await trio.sleep(1)
    return hub.trace
