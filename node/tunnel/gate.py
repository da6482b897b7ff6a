"""What to do with a datagram that belongs to no connection: ignore it, ask for a token, or begin a handshake.

Anyone can send these, from any forged address, so garbage costs a few comparisons and is not remembered.
Handshakes under way are counted, and once there are many, a stranger must first show that it receives at the
address that it claims (a Retry token, RFC 9000, section 8.1.2). Whoever's address a forger uses is not shut out by
that: with a token it has a count of its own. Refuses IO, clocks, and to judge identities: `mutual` does.
"""

import ipaddress
import os
from collections.abc import Sequence

import msgspec
from aioquic.buffer import Buffer
from aioquic.quic.packet import QuicPacketType, QuicProtocolVersion, encode_quic_retry, pull_quic_header
from aioquic.quic.retry import QuicRetryTokenHandler

from node.tunnel.limits import CID_SIZE, CID_SIZE_MAX, DATAGRAM_SIZE_MIN, TOKENS_USED_MAX, TunnelLimits
from node.tunnel.seam import Address

_LONG_HEADER = 0x80
_FIXED_BIT = 0x40
_LONG_TYPE = 0x30
_VERSION_1 = int(QuicProtocolVersion.VERSION_1).to_bytes(4, "big")


class HalfOpen(msgspec.Struct, frozen=True):
    """A handshake under way."""

    place: str
    """See `place_of`."""
    is_proven: bool
    """Whether its address came with a valid token."""


class Ignored(msgspec.Struct, frozen=True):
    """Nothing is to be done."""

    reason: str


class Retried(msgspec.Struct, frozen=True):
    """The datagram is to be sent back; nothing is remembered."""

    datagram: bytes


class Admitted(msgspec.Struct, frozen=True):
    """A handshake may begin."""

    original_cid: bytes
    retry_cid: bytes | None
    half_open: HalfOpen


Decision = Ignored | Retried | Admitted

_NOT_A_FIRST_PACKET = Ignored("not a first packet")


def destination_cid_untrusted(data: bytes) -> bytes | None:
    """Return the connection id that a datagram is sent to, or None for what cannot be QUIC version 1."""
    if len(data) < 1 + CID_SIZE + 16 or not data[0] & _FIXED_BIT:
        return None
    if not data[0] & _LONG_HEADER:
        return data[1 : 1 + CID_SIZE]
    size = data[5]
    if data[1:5] != _VERSION_1 or size > CID_SIZE_MAX:
        return None
    return data[6 : 6 + size]


def place_of(host: str) -> str:
    """Return what one party can be assumed to hold: an IPv4 address, or the /64 of an IPv6 one."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
        address = address.ipv4_mapped
    return str(address)


class Gate:
    """Judges first packets for one endpoint."""

    def __init__(self, limits: TunnelLimits) -> None:
        self._limits = limits
        self._tokens = QuicRetryTokenHandler()
        self._used: dict[bytes, None] = {}
        self._credit = float(limits.unproven_max)
        self._credit_at = 0.0

    def judge_untrusted(
        self, data: bytes, address: Address, half_open: Sequence[HalfOpen], open_count: int, now: float
    ) -> Decision:
        """Decide about `data`, which belongs to no connection.

        `open_count` is the number of connections beyond their handshake, ending ones too; `now` is in seconds.
        """
        if (
            len(data) < DATAGRAM_SIZE_MIN
            or data[0] & (_LONG_HEADER | _FIXED_BIT | _LONG_TYPE) != _LONG_HEADER | _FIXED_BIT
            or data[1:5] != _VERSION_1
        ):
            return _NOT_A_FIRST_PACKET
        if open_count >= self._limits.connections_max:
            return Ignored("as many connections as we take are open")
        if len(half_open) >= self._limits.half_open_max:
            return Ignored("as many handshakes as we take are under way")
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=CID_SIZE)
        except ValueError:
            return _NOT_A_FIRST_PACKET
        if header.packet_type is not QuicPacketType.INITIAL or len(header.destination_cid) < CID_SIZE:
            return _NOT_A_FIRST_PACKET
        place = place_of(address[0])
        if header.token:
            proven = sum(known.is_proven and known.place == place for known in half_open)
            return self._judge_token(header.token, header.destination_cid, address, proven, now)
        unproven = [known.place for known in half_open if not known.is_proven]
        if (
            len(unproven) >= self._limits.unproven_max
            or unproven.count(place) >= self._limits.half_open_per_address_max
            or not self._spend_credit(now)
        ):
            return self._ask_for_token(header.destination_cid, header.source_cid, address, now)
        return Admitted(header.destination_cid, None, HalfOpen(place, is_proven=False))

    def _judge_token(self, token: bytes, cid: bytes, address: Address, proven: int, now: float) -> Decision:
        """Decide about a packet with a token; `proven` handshakes from its place came with a valid one."""
        try:
            original = self._tokens.validate_token(address=address, destination_cid=cid, token=token, now=now)
        except ValueError:
            return Ignored("not a token of ours, or too old")
        if proven >= self._limits.half_open_per_address_max:
            return Ignored("as many handshakes as we take from one address are under way")
        if cid in self._used:
            return Ignored("a token that was used")
        self._used[cid] = None
        if len(self._used) > TOKENS_USED_MAX:
            del self._used[next(iter(self._used))]
        return Admitted(original, cid, HalfOpen(place_of(address[0]), is_proven=True))

    def _spend_credit(self, now: float) -> bool:
        """Return whether one more handshake may begin now without a token."""
        earned = max(0.0, now - self._credit_at) * self._limits.unproven_per_s
        self._credit = min(float(self._limits.unproven_max), self._credit + earned)
        self._credit_at = now
        if self._credit < 1:
            return False
        self._credit -= 1
        return True

    def _ask_for_token(self, original: bytes, source: bytes, address: Address, now: float) -> Retried:
        cid = os.urandom(CID_SIZE)
        token = self._tokens.create_token(
            address=address, original_destination_connection_id=original, retry_source_connection_id=cid, now=now
        )
        return Retried(
            encode_quic_retry(
                version=QuicProtocolVersion.VERSION_1,
                source_cid=cid,
                destination_cid=source,
                original_destination_cid=original,
                retry_token=token,
            )
        )
