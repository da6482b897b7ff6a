"""Nodes and strangers for the swarm's functional tests: real hosts on loopback, port 0.

`open_node` is the product; `open_stranger` is a plain libp2p host that can be made to say hello, or anything else.
"""

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.host.basic_host import BasicHost
from libp2p.network.config import ConnectionConfig
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.tools.anyio_service import background_trio_service
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from libp2p.utils.varint import encode_uvarint
from multiaddr import Multiaddr

from node.swarm import SwarmLimits, open_swarm
from node.swarm.gossip import node_of
from node.swarm.greeting import Greeter
from node.swarm.guards import _NoAutoConnector
from node.swarm.hello import HELLO_PROTOCOL
from node.swarm.network import SwarmNetwork
from protocol.identity import NetworkId, NodeId, network_id

NAME = "test"
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
GOSSIP_PROTOCOL = "/meshsub/1.1.0"

LIMITS = SwarmLimits(backoff_initial_ms=20, backoff_max_ms=100, restart_backoff_initial_ms=10)


@asynccontextmanager
async def open_node(
    seed: int,
    *,
    key: bytes = b"",
    name: str = NAME,
    listen: tuple[str, ...] = LISTEN,
    bootstrap: tuple[str, ...] = (),
    max_peers: int = 16,
    **limits: Any,
) -> AsyncIterator[SwarmNetwork]:
    """Run a node; `limits` change some of `LIMITS`."""
    async with open_swarm(
        bytes([seed]) * 32,
        listen=listen,
        network=network_id(name, key),
        network_key=key,
        bootstrap=bootstrap,
        max_peers=max_peers,
        agent="gpunode/test",
        limits=msgspec.structs.replace(LIMITS, **limits),
    ) as node:
        yield node


async def wait_until(holds: Callable[[], object], timeout_s: float = 20) -> None:
    """Return when `holds()` is true; the timeout only ends a test that has failed."""
    with trio.fail_after(timeout_s):
        while not holds():
            await trio.sleep(0.005)


def is_connected(node: SwarmNetwork, other: NodeId) -> bool:
    """Return whether `node` shows `other` as connected."""
    return any(peer.node == other and peer.connected for peer in node.peers())


class Stranger:
    """A libp2p host without any of our guards."""

    def __init__(self, host: Any, node: NodeId) -> None:
        self.host = host
        self.node = node

    async def dial(self, address: str) -> Any:
        """Connect, and return the muxed connection."""
        info = info_from_p2p_addr(Multiaddr(address))
        conn = await self.host.get_network().dial_addr(Multiaddr(address), info.peer_id)
        return conn.muxed_conn

    async def stream(self, target: NodeId, protocol: str) -> Any:
        """Open a stream."""
        return await self.host.new_stream(peer_of(target), [protocol])

    async def say_hello(self, target: NodeId, *, name: str = NAME, key: bytes = b"") -> None:
        """Say hello as a member of the network would."""
        network: NetworkId = network_id(name, key)
        stream = await self.stream(target, HELLO_PROTOCOL)
        await Greeter(self.node, network, key, "stranger").greet(stream, target, ())
        await stream.close()

    async def join(self, address: str, target: NodeId) -> Any:
        """Connect and say hello; return the muxed connection."""
        muxed = await self.dial(address)
        await self.say_hello(target)
        return muxed

    async def gossip_frame(self, target: NodeId, frame: bytes) -> None:
        """Send one frame, with its length, on a gossip stream of its own."""
        stream = await self.stream(target, GOSSIP_PROTOCOL)
        await stream.write(encode_uvarint(len(frame)) + frame)


@asynccontextmanager
async def open_stranger(security: Callable[[Any], dict[str, Any]] | None = None) -> AsyncIterator[Stranger]:
    """Run a plain host with a fresh key that listens nowhere; `security` makes another security than Noise."""
    keys = create_new_key_pair(secrets.token_bytes(32))
    node_id = ID.from_pubkey(keys.public_key)
    store = PeerStore()
    store.add_key_pair(node_id, keys)
    noise = NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)
    upgrader = TransportUpgrader(security(keys) if security else {NOISE: noise}, {YAMUX: Yamux})
    config = ConnectionConfig(min_connections=0, low_watermark=0)
    swarm = Swarm(node_id, store, upgrader, transports=[TCP()], connection_config=config)
    swarm.auto_connector = _NoAutoConnector()  # the original would dial again on its own what a test has cut
    host = BasicHost(swarm)
    host._schedule_identify = lambda *_, **__: None  # nobody is asked for identify, which would outlive the test
    async with background_trio_service(swarm):
        try:
            yield Stranger(host, node_of(node_id))
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(2):
                await host.close()


def peer_of(node: NodeId) -> Any:
    """Return the libp2p ID of a node."""
    return ID(bytes.fromhex("002408011220") + node)


def is_dead(muxed: Any) -> bool:
    """Return whether a stranger's connection has been ended."""
    return muxed.event_shutting_down.is_set() or muxed.is_closed
