"""Builds the libp2p stack: TCP, Noise, yamux and nothing else, guarded. Refuses every insecure or idle default."""

from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.transport.upgrader import TransportUpgrader

from node.swarm.guards import Gatekeeper, GuardedMuxer, GuardedSwarm, GuardedTcp, GuardedYamux
from node.swarm.limits import SwarmLimits

CONNECTIONS_PER_PEER_MAX = 4
"""Two nodes that dial each other at the same moment end up with two, while earlier ones may still be ending."""
_NEGOTIATION_S = 10.0


def make_swarm(keys: KeyPair, limits: SwarmLimits, connections_max: int, keeper: Gatekeeper) -> GuardedSwarm:
    """Return a swarm that is not running yet.

    Built by hand rather than by `libp2p.new_host`: that one attaches a resource manager that leaks, and by
    default accepts /plaintext, where one can log in as anybody whose public key one knows.
    """
    node_id = ID.from_pubkey(keys.public_key)
    store = PeerStore()
    store.add_key_pair(node_id, keys)
    noise = NoiseTransport(keys, noise_privkey=create_new_key_pair().private_key)
    muxers = {TProtocol(YAMUX): GuardedYamux}
    upgrader = TransportUpgrader({TProtocol(NOISE): noise}, muxers)
    upgrader.muxer_multistream = GuardedMuxer(muxers, limits)
    config = ConnectionConfig(
        max_connections=connections_max,
        min_connections=0,
        low_watermark=0,
        high_watermark=connections_max,
        max_connections_per_peer=CONNECTIONS_PER_PEER_MAX,
        grace_period=0.0,
        inbound_upgrade_timeout=limits.upgrade_timeout_ms / 1000,
        outbound_upgrade_timeout=limits.dial_timeout_ms / 1000,
        inbound_stream_protocol_negotiation_timeout=_NEGOTIATION_S,
        outbound_stream_protocol_negotiation_timeout=_NEGOTIATION_S,
    )
    return GuardedSwarm(
        node_id,
        store,
        upgrader,
        transports=[GuardedTcp()],
        retry_config=RetryConfig(max_retries=0),
        connection_config=config,
        keeper=keeper,
    )
