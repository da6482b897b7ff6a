"""The tunnel of a lease: one mutually authenticated QUIC connection between a provider and a renter.

`open_endpoint` gives an endpoint (`node.ports.TunnelEndpoint`) that accepts and dials; a connection
(`node.ports.TunnelConnection`) carries many streams. Refuses anyone whose Ed25519 tunnel key is not the one that
the lease's signed records name, and to know what the streams carry. aioquic is known to this package alone.
"""

from node.tunnel.connection import Connection
from node.tunnel.endpoint import Admit, Endpoint, EndpointCounts, open_endpoint
from node.tunnel.identity import TunnelIdentity
from node.tunnel.limits import LIMITS, TunnelLimits
from node.tunnel.stream import TunnelStream

__all__ = [
    "LIMITS",
    "Admit",
    "Connection",
    "Endpoint",
    "EndpointCounts",
    "TunnelIdentity",
    "TunnelLimits",
    "TunnelStream",
    "open_endpoint",
]
