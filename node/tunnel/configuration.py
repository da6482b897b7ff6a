"""How aioquic is configured: one protocol name, one version of QUIC, one cipher.

Refuses choices: each alternative is another path that a stranger can steer us into before it is known.
"""

import ssl
from typing import Any

from aioquic import tls
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import QuicProtocolVersion

from node.tunnel.identity import TunnelIdentity
from node.tunnel.limits import CID_SIZE, DATAGRAM_SIZE_MIN, TunnelLimits

ALPN = "gpunode/1"
"""The protocol's name in the TLS handshake; a peer of another one is refused."""


def configure_quic(identity: TunnelIdentity, limits: TunnelLimits, *, is_client: bool) -> Any:  # noqa: ANN401 - aioquic's
    """Return the QuicConfiguration of one side."""
    return QuicConfiguration(
        is_client=is_client,
        alpn_protocols=[ALPN],
        certificate=identity.certificate,
        private_key=identity.private_key,
        cipher_suites=[tls.CipherSuite.AES_128_GCM_SHA256],
        connection_id_length=CID_SIZE,
        idle_timeout=limits.idle_ms / 1000,
        max_data=limits.connection_window,
        max_datagram_size=DATAGRAM_SIZE_MIN,
        max_stream_data=limits.stream_window,
        supported_versions=[QuicProtocolVersion.VERSION_1],
        # Certificates are judged by the key in them alone (`mutual`), never by names or authorities.
        verify_mode=ssl.CERT_NONE,
    )
