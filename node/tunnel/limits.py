"""Every bound of the tunnel, in one place.

A provider's keeper parses a stranger's bytes, so each table, buffer and time here has a size. Refuses to be
tuned per peer: both sides of a lease run with these, and a test that needs smaller ones passes its own.
"""

import msgspec

DATAGRAM_SIZE_MIN = 1200
"""Smallest datagram that may carry a first packet, and the size we start at (RFC 9000, section 14)."""
CID_SIZE = 8
"""Length of the connection ids that we choose, bytes."""
CID_SIZE_MAX = 20
"""Longest connection id of QUIC version 1 (RFC 9000, section 17.2)."""
CRYPTO_STREAM_SIZE_MAX = 16 << 10
"""Most TLS bytes a peer may send at one encryption level. A mutual handshake here needs under 1 KiB."""
CRYPTO_GAPS_MAX = 16
"""Most holes in a peer's TLS bytes: without a bound, filling 1-byte holes costs quadratic time."""
TOKENS_USED_MAX = 1024
"""How many Retry tokens are remembered as used, so that one token cannot begin many handshakes."""
STREAM_GAPS_MAX = 2048
"""Most holes in one stream. A 1 MiB window of full packets with every second one lost has 450."""
FAREWELL_MS = 3_000
"""How long a closed connection still answers with its close, for a peer that has missed it."""
FAREWELLS_FREE = 8
"""How many datagrams of such a peer are answered each; after that only the 16th, 32nd, 64th ..."""
REASON_SIZE_MAX = 200
"""Longest reason, in bytes, that we send or show."""


class TunnelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one endpoint and its connections. Times are ms, sizes bytes."""

    idle_ms: int = 30_000
    """A connection on which nothing valid was heard for this long is over."""
    keepalive_ms: int = 15_000
    """Send a PING after this long without hearing anything: it keeps a NAT's mapping, and the idle timer."""
    handshake_ms: int = 10_000
    """How long a peer may take from its first datagram to its proven identity."""
    stream_window: int = 1 << 20
    """How much of one stream may wait here unread."""
    streams_max: int = 128
    """How many streams the peer may have open at once. The connection's window is `stream_window * streams_max`,
    so that no number of streams left unread can starve another one (such as the control stream)."""
    send_buffer: int = 2 << 20
    """How much of one stream may wait here unacknowledged before `send_all` blocks."""
    send_buffer_total: int = 16 << 20
    """The same over all streams; a stream may always have `send_buffer_floor` waiting."""
    send_buffer_floor: int = 64 << 10
    """What a stream may buffer even while others fill the total: a stalled one must not block the rest."""
    connections_max: int = 32
    """Most connections that are open or closing at one endpoint."""
    unproven_max: int = 16
    """Above this many handshakes from addresses that have not proven themselves, a first packet is answered with
    a Retry token and nothing is remembered (RFC 9000, section 8.1.2)."""
    unproven_per_s: int = 16
    """How many handshakes a second may begin without a token, after a burst of `unproven_max`. Measured: a forged
    first packet costs us 0.5 ms, a genuine one 2 ms, a Retry 0.07 ms."""
    half_open_max: int = 64
    """Most handshakes under way at once, all told; beyond it first packets are ignored."""
    half_open_per_address_max: int = 8
    """Most handshakes under way from one address (IPv4) or one /64 (IPv6)."""
    key_packets_max: int = (1 << 22) - (1 << 16)
    """Packets sent under one key before it is updated: half of the 2^23 that AES-GCM allows (RFC 9001, section
    6.6), with room for what one flush may still send."""

    @property
    def connection_window(self) -> int:
        """How much of all streams may wait here unread."""
        return self.stream_window * self.streams_max

    @property
    def send_chunk(self) -> int:
        """How much room a blocked sender waits for, so that it does not wake for every packet acknowledged."""
        return max(1, min(self.send_buffer, self.send_buffer_floor) // 4)


LIMITS = TunnelLimits()
"""The bounds that the product runs with."""
