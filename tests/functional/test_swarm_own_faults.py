"""What goes wrong on our own machine is not held against who asks."""

import pytest
import trio
from support.swarm_nodes import is_connected, open_node

from node.errors import PeerRefused, StoreError
from protocol.identity import NodeId


async def test_a_full_disk_of_ours_bans_nobody() -> None:
    is_full = True

    async def store(_: NodeId, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        if is_full:
            raise StoreError("cannot write the database: the disk is full")
        return data

    async with open_node(1) as node, open_node(2) as peer:
        node.on_request("trade/1", store)
        await peer.connect(node.addresses[0])
        for _ in range(20):
            with pytest.raises(PeerRefused):
                await peer.request(node.node, "trade/1", b"x")
        assert node.counters["requests_failed"] == 20
        assert not node.counters["peers_banned"]
        assert is_connected(node, peer.node)
        is_full = False
        assert await peer.request(node.node, "trade/1", b"x") == b"x"
