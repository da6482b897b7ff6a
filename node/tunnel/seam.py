"""What a QUIC engine is to the rest of the tunnel: bytes and the time in, datagrams and events out.

`connection`, `stream` and `endpoint` know only this, so another engine (one that handles packets in batches, say)
can take aioquic's place on the same wire. Refuses all IO, clocks and waiting.
"""

import enum
from typing import Protocol

import msgspec

from node.tunnel.limits import REASON_SIZE_MAX

Address = tuple[str, int] | tuple[str, int, int, int]
"""A UDP address as the socket gives it: (host, port), or with flow and scope for IPv6."""
Datagram = tuple[bytes, Address]


class StreamData(msgspec.Struct, frozen=True, gc=False):
    """The next bytes of a stream, in order; `end` is the peer's end of file. A new stream's first event."""

    stream: int
    data: bytes
    end: bool


class StreamReset(msgspec.Struct, frozen=True, gc=False):
    """The peer gave up sending on a stream."""

    stream: int


class StreamStopped(msgspec.Struct, frozen=True, gc=False):
    """The peer no longer reads a stream."""

    stream: int


class CidIssued(msgspec.Struct, frozen=True, gc=False):
    """Datagrams to this connection id belong to the engine from now on."""

    cid: bytes


class CidRetired(msgspec.Struct, frozen=True, gc=False):
    """Datagrams to this connection id no longer come."""

    cid: bytes


Event = StreamData | StreamReset | StreamStopped | CidIssued | CidRetired


class EndedBy(enum.Enum):
    """Who ended a connection."""

    US = "us"
    PEER = "peer"
    SILENCE = "silence"
    FAULT = "fault"
    """We did, because of something the peer sent."""


class Ending(msgspec.Struct, frozen=True):
    """Why a connection is ending."""

    by: EndedBy
    reason: str
    """One line for people; bounded, printable, and in part the peer's words when `by` is PEER."""
    refused: bool = False
    """The peer said that our key, or our proof of it, will not do."""


def bounded_words(text: str) -> str:
    """Return one printable line of at most REASON_SIZE_MAX bytes; a peer's words may hold anything."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[:REASON_SIZE_MAX])
    return line.encode()[:REASON_SIZE_MAX].decode(errors="ignore").strip()


class Engine(Protocol):
    """One QUIC connection without IO. Times are seconds on the caller's clock."""

    host_cid: bytes
    """The first connection id that leads here."""

    @property
    def peer_key(self) -> bytes | None:
        """The peer's proven Ed25519 key; None until the connection is open."""

    @property
    def peer_address(self) -> Address | None:
        """The address at which the peer is known to receive; None before one is validated."""

    @property
    def is_open(self) -> bool:
        """Whether both sides have proven themselves and know it of each other. Stays true when it ends."""

    @property
    def was_heard(self) -> bool:
        """Whether any datagram of the peer could be decrypted."""

    @property
    def ending(self) -> Ending | None:
        """Why the connection is ending or has ended; None while it lives."""

    @property
    def is_over(self) -> bool:
        """Whether the engine has nothing more to send or to absorb."""

    def receive_datagram(self, data: bytes, address: Address, now: float) -> None:
        """Take one UDP payload."""

    def datagrams_to_send(self, now: float) -> list[Datagram]:
        """Return what must leave now."""

    def get_timer(self) -> float | None:
        """Return when `handle_timer` must be called, or None."""

    def handle_timer(self, now: float) -> None:
        """Do what time demands; then ask for datagrams and events."""

    def next_event(self) -> Event | None:
        """Return the next event, or None."""

    def open_stream(self) -> int | None:
        """Open a bidirectional stream; None while the peer allows no more."""

    def send_stream_data(self, stream: int, data: bytes | memoryview, end: bool = False) -> None:
        """Queue data, and the end of file, of a stream that is neither ended nor reset."""

    def buffered(self, stream: int) -> int:
        """Return how many bytes of the stream wait here unacknowledged."""

    def buffered_total(self) -> int:
        """Return the same over all streams."""

    def consume(self, stream: int, size: int) -> bool:
        """Note that the application has taken `size` bytes; return whether the peer should be told now."""

    def reset_stream(self, stream: int) -> None:
        """Give up sending: the peer's reader fails, and what is buffered is dropped."""

    def stop_stream(self, stream: int) -> None:
        """Ask the peer to send no more on the stream."""

    def is_discarded(self, stream: int) -> bool:
        """Whether both directions of the stream are finished and acknowledged; no event of it follows."""

    def shut(self, reason: str) -> None:
        """End the connection, telling the peer. Idempotent."""
