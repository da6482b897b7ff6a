"""The QUIC engine: aioquic's connection, with mutual identity, bounds and real back-pressure.

What is added, and why:

- identity: `mutual.MutualContext` replaces the TLS context (aioquic has no public API for clients' certificates);
- flow control: aioquic doubles its limits with the bytes *received*; here they follow what the application
  *consumed*, so a reader that stops stops the sender;
- bounds on what a peer makes us keep: TLS bytes, holes in streams, streams, time to its proof of identity;
- keepalive, key updates, and repeating our CONNECTION_CLOSE when the peer has missed it.

Private attributes of aioquic are used here and in `mutual` only; `tests/unit/test_tunnel_contract.py` names each.
Refuses all IO and clocks. An exception out of any method is a fault of this connection alone: the caller drops it.
"""

from collections.abc import Callable
from typing import Any

from aioquic import tls
from aioquic.quic import events
from aioquic.quic.connection import (
    MAX_STREAM_DATA_FRAME_CAPACITY,
    QuicConnection,
    QuicConnectionError,
    QuicConnectionState,
)
from aioquic.quic.packet import QuicErrorCode, QuicFrameType

from node.tunnel.configuration import configure_quic
from node.tunnel.identity import TunnelIdentity
from node.tunnel.limits import (
    CRYPTO_GAPS_MAX,
    CRYPTO_STREAM_SIZE_MAX,
    FAREWELL_MS,
    FAREWELLS_FREE,
    LIMITS,
    STREAM_GAPS_MAX,
    TunnelLimits,
)
from node.tunnel.mutual import REFUSED_ALERTS, MutualContext
from node.tunnel.seam import (
    Address,
    CidIssued,
    CidRetired,
    Datagram,
    EndedBy,
    Ending,
    Event,
    StreamData,
    StreamReset,
    StreamStopped,
    bounded_words,
)


class QuicEngine(QuicConnection):
    """One side of a tunnel. Implements `seam.Engine`; made by `dialling` and `answering`."""

    _close_at: float | None

    def __init__(
        self,
        identity: TunnelIdentity,
        admits: Callable[[bytes], bool],
        limits: TunnelLimits,
        *,
        is_client: bool,
        original_cid: bytes | None = None,
        retry_cid: bytes | None = None,
    ) -> None:
        super().__init__(
            configuration=configure_quic(identity, limits, is_client=is_client),
            original_destination_connection_id=original_cid,
            retry_source_connection_id=retry_cid,
        )
        self._admits = admits
        self._limits = limits
        self._local_max_streams_bidi.value = self._local_max_streams_bidi.sent = limits.streams_max
        self._local_max_streams_uni.value = self._local_max_streams_uni.sent = 0
        self._consumed_total = 0
        self._consumed: dict[int, int] = {}
        self._key_phase = 0
        self._key_first_packet = 0
        self._was_heard = False
        self._heard_at: float | None = None
        self._ping_at: float | None = None
        self._pings_sent = 0
        self._open_by: float | None = None
        self._ended_by: EndedBy | None = None
        self._farewell: list[Datagram] = []
        self._farewell_due = False
        self._farewell_until: float | None = None
        self._datagrams_after_farewell = 0

    @classmethod
    def dialling(
        cls,
        identity: TunnelIdentity,
        peer_key: bytes,
        address: Address,
        now: float,
        limits: TunnelLimits = LIMITS,
    ) -> "QuicEngine":
        """Return a client that dials `address` and speaks to the holder of `peer_key` only."""
        engine = cls(identity, lambda key: key == peer_key, limits, is_client=True)
        engine.connect(address, now=now)
        return engine

    @classmethod
    def answering(
        cls,
        identity: TunnelIdentity,
        admits: Callable[[bytes], bool],
        limits: TunnelLimits = LIMITS,
        *,
        original_cid: bytes,
        retry_cid: bytes | None = None,
    ) -> "QuicEngine":
        """Return a server that speaks to holders of keys that `admits` accepts.

        The client's first packet went to `original_cid` and, after a Retry, its second one to `retry_cid`.
        """
        return cls(identity, admits, limits, is_client=False, original_cid=original_cid, retry_cid=retry_cid)

    # --- state ----------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """See `seam.Engine`. A client learns by HANDSHAKE_DONE that the server has judged it."""
        return self._handshake_confirmed and self.tls.peer_key is not None

    @property
    def peer_key(self) -> bytes | None:
        """See `seam.Engine`."""
        return self.tls.peer_key if self._handshake_confirmed else None

    @property
    def peer_address(self) -> Address | None:
        """See `seam.Engine`."""
        return next((path.addr for path in self._network_paths if path.is_validated), None)

    @property
    def was_heard(self) -> bool:
        """See `seam.Engine`."""
        return self._was_heard

    @property
    def is_over(self) -> bool:
        """See `seam.Engine`."""
        return self._state is QuicConnectionState.TERMINATED and self._farewell_until is None

    @property
    def ending(self) -> Ending | None:
        """See `seam.Engine`. Known as soon as it is decided, some round trips before aioquic's own event."""
        event = self._close_event
        if event is None:
            return None
        by = self._ended_by or EndedBy.FAULT
        if by is EndedBy.SILENCE:
            return Ending(by, f"nothing was heard from the peer for {self._limits.idle_ms / 1000:g} s")
        alert = event.error_code - int(QuicErrorCode.CRYPTO_ERROR)
        reason = bounded_words(event.reason_phrase)
        if not reason and event.error_code:
            names = {int(known): known.name for known in tls.AlertDescription}
            reason = names.get(alert, f"QUIC error {event.error_code}")
        return Ending(by, reason, refused=by is EndedBy.PEER and alert in REFUSED_ALERTS)

    # --- datagrams and time ---------------------------------------------------------------------------------

    def receive_datagram(self, data: bytes, address: Address, now: float) -> None:
        """See `seam.Engine`."""
        if self._farewell_until is not None:
            # The peer may have missed our close: repeat it, at a falling rate (RFC 9000, section 10.2.1).
            self._datagrams_after_farewell += 1
            count = self._datagrams_after_farewell
            self._farewell_due = count <= FAREWELLS_FREE or count.bit_count() == 1
            return
        if self._open_by is None and not self._is_client:
            self._open_by = now + self._limits.handshake_ms / 1000
        idle_at = self._close_at
        super().receive_datagram(data, address, now=now)
        self._was_heard |= self._state is not QuicConnectionState.FIRSTFLIGHT
        if self._close_at != idle_at:  # something valid was heard
            self._heard_at = now
            self._ping_at = now + self._limits.keepalive_ms / 1000
        if self._state is QuicConnectionState.DRAINING and self._ended_by is None:
            self._ended_by = EndedBy.PEER

    def datagrams_to_send(self, now: float) -> list[Datagram]:
        """See `seam.Engine`."""
        if not self._network_paths:
            return []
        if self._farewell_due:
            self._farewell_due = False
            return self._farewell
        is_closing = self._close_pending
        datagrams: list[Datagram] = super().datagrams_to_send(now=now)
        if is_closing:
            self._farewell = datagrams
            if self._was_heard:
                self._farewell_until = now + FAREWELL_MS / 1000
        elif self._handshake_confirmed:
            self._update_key_if_due()
        if len(self._consumed) > len(self._streams):
            self._consumed = {stream: size for stream, size in self._consumed.items() if stream in self._streams}
        return datagrams

    def get_timer(self) -> float | None:
        """See `seam.Engine`."""
        if self._close_at is None:  # before the first datagram, or ended
            return self._farewell_until
        timer: float = super().get_timer()
        return timer if self._close_event is not None else min((timer, *self._own_timers()))

    def _own_timers(self) -> tuple[float, ...]:
        if not self._handshake_confirmed:
            return () if self._open_by is None else (self._open_by,)
        if self._heard_at is None or self._ping_at is None:
            return ()
        # aioquic's own idle timer starts again when we send, so a PING without an answer would prolong it.
        return (self._ping_at, self._heard_at + self._limits.idle_ms / 1000)

    def handle_timer(self, now: float) -> None:
        """See `seam.Engine`."""
        if self._farewell_until is not None and now >= self._farewell_until:
            self._farewell_until = None
        if self._close_at is None:
            return
        if self._handshake_confirmed and self._heard_at is not None and self._close_event is None:
            self._close_at = min(self._close_at, self._heard_at + self._limits.idle_ms / 1000)
        if now >= self._close_at and self._close_event is None:
            self._ended_by = EndedBy.SILENCE
        super().handle_timer(now=now)
        if self._close_event is not None:
            return
        if self._handshake_confirmed and self._ping_at is not None and now >= self._ping_at:
            self._pings_sent += 1
            self.send_ping(self._pings_sent)
            self._ping_at = now + self._limits.keepalive_ms / 1000
        elif not self._handshake_confirmed and self._open_by is not None and now >= self._open_by:
            self.close(
                error_code=QuicErrorCode.CONNECTION_REFUSED,
                frame_type=QuicFrameType.PADDING,
                reason_phrase="the handshake took too long",
            )

    def shut(self, reason: str) -> None:
        """See `seam.Engine`."""
        if self._close_event is None:
            self._ended_by = EndedBy.US
            self.close(reason_phrase=bounded_words(reason))

    def next_event(self) -> Event | None:
        """See `seam.Engine`."""
        while (event := super().next_event()) is not None:
            match event:
                case events.StreamDataReceived():
                    return StreamData(event.stream_id, event.data, event.end_stream)
                case events.StreamReset():
                    self._forgive_unread(event.stream_id)
                    return StreamReset(event.stream_id)
                case events.StopSendingReceived():
                    return StreamStopped(event.stream_id)
                case events.ConnectionIdIssued():
                    return CidIssued(event.connection_id)
                case events.ConnectionIdRetired():
                    return CidRetired(event.connection_id)
        return None

    # --- streams --------------------------------------------------------------------------------------------

    def open_stream(self) -> int | None:
        """See `seam.Engine`."""
        stream: int = self.get_next_available_stream_id()
        ours = sum(1 for known in self._streams if known & 1 == stream & 1)
        if stream // 4 >= self._remote_max_streams_bidi or ours >= self._limits.streams_max:
            return None
        self.send_stream_data(stream, b"")  # claims the id; nothing is sent
        return stream

    def send_stream_data(self, stream: int, data: bytes | memoryview, end: bool = False) -> None:
        """See `seam.Engine`."""
        super().send_stream_data(stream, data, end_stream=end)

    def buffered(self, stream: int) -> int:
        """See `seam.Engine`."""
        known = self._streams.get(stream)
        if known is None or known.sender._reset_error_code is not None:
            return 0
        size: int = known.sender._buffer_stop - known.sender._buffer_start
        return size

    def buffered_total(self) -> int:
        """See `seam.Engine`."""
        return sum(self.buffered(stream) for stream in self._streams)

    def consume(self, stream: int, size: int) -> bool:
        """See `seam.Engine`. Limits are raised a quarter of a window at a time."""
        self._consumed_total += size
        limits = self._limits
        wanted = self._consumed_total + limits.connection_window
        is_due: bool = wanted - self._local_max_data.value >= limits.connection_window // 4
        known = self._streams.get(stream)
        if known is not None:
            consumed = self._consumed[stream] = self._consumed.get(stream, 0) + size
            if not known.receiver.is_finished:
                is_due |= (
                    consumed + limits.stream_window - known.max_stream_data_local >= limits.stream_window // 4
                )
        return is_due

    def reset_stream(self, stream: int, error_code: int = 0) -> None:
        """See `seam.Engine`."""
        super().reset_stream(stream, error_code)

    def stop_stream(self, stream: int, error_code: int = 0) -> None:
        """See `seam.Engine`."""
        known = self._streams.get(stream)
        if known is not None and not known.receiver.is_finished:
            super().stop_stream(stream, error_code)

    def is_discarded(self, stream: int) -> bool:
        """See `seam.Engine`."""
        return stream not in self._streams

    def _forgive_unread(self, stream: int) -> None:
        """Count all of a stream that the peer reset as consumed, else the connection's window would leak."""
        known = self._streams.get(stream)
        if known is not None:
            self.consume(stream, known.receiver.highest_offset - self._consumed.get(stream, 0))

    # --- what aioquic does otherwise ------------------------------------------------------------------------

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls.__class__ = MutualContext
        self.tls.arm(self._admits)

    def _update_key_if_due(self) -> None:
        phase = self._cryptos[tls.Epoch.ONE_RTT].send.key_phase
        if phase != self._key_phase:  # the peer's update, or ours at last
            self._key_phase = phase
            self._key_first_packet = self._packet_number
        elif (
            self._packet_number - self._key_first_packet >= self._limits.key_packets_max
            # Two updates in a row would lose a peer that has not seen the first (RFC 9001, section 6.1).
            and self._spaces[tls.Epoch.ONE_RTT].largest_acked_packet >= self._key_first_packet
        ):
            self.request_key_update()

    def _handle_crypto_frame(self, context: Any, frame_type: int, buf: Any) -> None:  # noqa: ANN401 - aioquic's
        start = buf.tell()
        end = buf.pull_uint_var() + buf.pull_uint_var()
        buf.seek(start)
        gaps = len(self._crypto_streams[context.epoch].receiver._ranges)
        if end > CRYPTO_STREAM_SIZE_MAX or gaps > CRYPTO_GAPS_MAX:
            raise QuicConnectionError(
                error_code=QuicErrorCode.CRYPTO_BUFFER_EXCEEDED,
                frame_type=frame_type,
                reason_phrase="too many TLS bytes",
            )
        super()._handle_crypto_frame(context, frame_type, buf)

    def _get_or_create_stream(self, frame_type: int, stream_id: int) -> Any:  # noqa: ANN401 - aioquic's stream
        stream = super()._get_or_create_stream(frame_type, stream_id)
        if len(stream.receiver._ranges) > STREAM_GAPS_MAX:
            raise QuicConnectionError(
                error_code=QuicErrorCode.PROTOCOL_VIOLATION,
                frame_type=frame_type,
                reason_phrase="too many holes in a stream",
            )
        return stream

    def _write_connection_limits(self, builder: Any, space: Any) -> None:  # noqa: ANN401 - types of aioquic's
        limit = self._local_max_data
        window = self._limits.connection_window
        if self._consumed_total + window - limit.value >= window // 4:
            limit.value = self._consumed_total + window
        # aioquic would double the limit once half of it is used; it is checked against what arrives all the same.
        used, limit.used = limit.used, 0
        try:
            super()._write_connection_limits(builder, space)
        finally:
            limit.used = used

    def _write_stream_limits(self, builder: Any, space: Any, stream: Any) -> None:  # noqa: ANN401 - aioquic's
        window = self._limits.stream_window
        wanted = self._consumed.get(stream.stream_id, 0) + window
        if wanted - stream.max_stream_data_local >= window // 4 and not stream.receiver.is_finished:
            stream.max_stream_data_local = wanted
        if stream.max_stream_data_local_sent == stream.max_stream_data_local:
            return
        frame = builder.start_frame(
            QuicFrameType.MAX_STREAM_DATA,
            capacity=MAX_STREAM_DATA_FRAME_CAPACITY,
            handler=self._on_max_stream_data_delivery,
            handler_args=(stream,),
        )
        frame.push_uint_var(stream.stream_id)
        frame.push_uint_var(stream.max_stream_data_local)
        stream.max_stream_data_local_sent = stream.max_stream_data_local
