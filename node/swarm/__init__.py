"""The swarm: how nodes find, greet, hear and ask each other, over libp2p.

Everything that touches libp2p is in this package, and importing it costs nothing: libp2p (0.6 s, 87 MB) is
loaded only when `open_swarm` is called. Refuses to know what the bytes mean that it carries.
"""

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from node.swarm.limits import DEFAULT_LIMITS, SwarmLimits
from protocol.identity import NetworkId

if TYPE_CHECKING:
    from node.swarm.network import SwarmNetwork

__all__ = ["DEFAULT_LIMITS", "SwarmLimits", "open_swarm"]


def open_swarm(
    seed: bytes,
    *,
    listen: tuple[str, ...],
    network: NetworkId,
    network_key: bytes,
    bootstrap: tuple[str, ...],
    max_peers: int,
    agent: str,
    limits: SwarmLimits = DEFAULT_LIMITS,
) -> "AbstractAsyncContextManager[SwarmNetwork]":
    """Return a context manager that runs a node's swarm and yields its `node.ports.Network`.

    `seed` is the node key's 32-byte Ed25519 seed; `listen` are multiaddrs such as "/ip4/0.0.0.0/tcp/4001" (port 0:
    any free one); `network_key` is the network's shared key, empty for an open network; `bootstrap` are
    addresses with /p2p/ that are dialled again and again until they answer; at most `max_peers` connections
    are held. Entering raises SwarmError when an address is malformed or cannot be listened on; afterwards a
    crash inside libp2p restarts the host on the same ports, and never reaches the caller.
    """
    from node.swarm.network import run_swarm  # noqa: PLC0415 - importing libp2p is slow; `gpunode --help` must not

    return run_swarm(
        seed,
        listen=listen,
        network=network,
        network_key=network_key,
        bootstrap=bootstrap,
        max_peers=max_peers,
        agent=agent,
        limits=limits,
    )
