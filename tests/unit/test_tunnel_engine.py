"""The engine on a virtual link: identities, back-pressure, bounds, time, loss."""

import hashlib
import random
from typing import Any

import pytest
from support.quiclink import CLIENT, QuicLink

from node.tunnel.configuration import ALPN
from node.tunnel.engine import QuicEngine
from node.tunnel.identity import TunnelIdentity
from node.tunnel.limits import LIMITS, TunnelLimits
from node.tunnel.seam import Address, EndedBy, bounded_words

RENTER, PROVIDER, STRANGER = (TunnelIdentity(bytes([number]) * 32) for number in (1, 2, 3))
SMALL = TunnelLimits(stream_window=16 << 10, streams_max=4)


def is_renter(key: bytes) -> bool:
    return key == RENTER.public_key


def make_link(
    *,
    client: TunnelIdentity = RENTER,
    limits: TunnelLimits = LIMITS,
    pin: bytes = PROVIDER.public_key,
    **link: Any,
) -> QuicLink:
    return QuicLink(
        lambda address, now: QuicEngine.dialling(client, pin, address, now, limits),
        lambda cid: QuicEngine.answering(PROVIDER, is_renter, limits, original_cid=cid),
        **link,
    )


def opened(link: QuicLink) -> QuicLink:
    link.run(lambda: link.has_server and link.client.engine.is_open and link.server.engine.is_open)
    return link


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def open_stream(link: QuicLink) -> int:
    stream = link.client.engine.open_stream()
    assert stream is not None
    return stream


def test_both_sides_know_the_others_proven_key() -> None:
    link = opened(make_link())
    assert link.client.engine.peer_key == PROVIDER.public_key
    assert link.server.engine.peer_key == RENTER.public_key
    assert link.server.engine.peer_address == CLIENT
    assert link.client.engine.ending is None


def test_no_tickets_and_no_early_data_are_offered() -> None:
    link = opened(make_link())
    for side in (link.client, link.server):
        assert not side.engine.tls.session_resumed
        assert not side.engine.tls.early_data_accepted
        assert side.engine.tls.new_session_ticket_cb is None
        assert side.engine.tls.get_session_ticket_cb is None


def test_a_server_knows_no_key_before_the_proof_has_arrived() -> None:
    link = make_link()
    keys: list[bytes | None] = []

    def until() -> bool:
        if link.has_server:
            engine = link.server.engine
            keys.append(engine.peer_key)
            assert (engine.peer_key is not None) == engine.is_open
            return bool(engine.is_open)
        return False

    link.run(until)
    assert keys[0] is None


def test_a_client_is_not_open_before_the_server_has_judged_it() -> None:
    link = make_link()
    # Whatever the server says once it has the client's proof is lost, HANDSHAKE_DONE included.
    link.tamper = lambda name, data: (
        [] if name == "server" and link.has_server and link.server.engine.is_open else [data]
    )
    link.run(lambda: link.has_server and link.server.engine.is_open)
    link.run_for(2)
    assert link.client.engine._handshake_complete
    assert not link.client.engine.is_open
    assert link.client.engine.peer_key is None
    link.tamper = None
    opened(link)


def test_a_client_refuses_a_server_with_another_key() -> None:
    link = make_link(pin=STRANGER.public_key)
    link.run(lambda: link.client.engine.ending is not None)
    assert link.client.engine.ending.by is EndedBy.FAULT
    assert "not the one that the lease names" in link.client.engine.ending.reason
    assert not link.client.engine.is_open
    link.run(lambda: link.server.engine.ending is not None)
    assert link.server.engine.ending.refused
    assert not link.server.engine.is_open


def test_a_key_that_is_not_admitted_is_refused_and_told_so() -> None:
    link = make_link(client=STRANGER)
    link.run(lambda: link.client.engine.ending is not None)
    ending = link.client.engine.ending
    assert (ending.by, ending.refused) == (EndedBy.PEER, True)
    assert "not the one that the lease names" in ending.reason
    assert not link.client.engine.is_open
    assert not link.server.engine.is_open
    assert link.server.engine.peer_key is None


# --- peers that do not keep the rules: aioquic's own client and server, and doctored ones ----------------------


def stock(*, is_client: bool, identity: Any, cid: bytes | None = None, chain: tuple[Any, ...] = ()) -> Any:
    import ssl

    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.connection import QuicConnection

    configuration = QuicConfiguration(is_client=is_client, alpn_protocols=[ALPN], verify_mode=ssl.CERT_NONE)
    if identity is not None:
        configuration.certificate, configuration.private_key = identity.certificate, identity.private_key
        configuration.certificate_chain = list(chain)
    return QuicConnection(
        configuration=configuration, **({} if is_client else {"original_destination_connection_id": cid})
    )


def stock_client_link(identity: Any, **options: Any) -> QuicLink:
    def dial(address: Address, now: float) -> Any:
        engine = stock(is_client=True, identity=identity, **options)
        engine.connect(address, now)
        return engine

    return QuicLink(dial, lambda cid: QuicEngine.answering(PROVIDER, is_renter, original_cid=cid))


class Stolen:
    """The renter's certificate, without its key."""

    certificate = RENTER.certificate
    private_key = STRANGER.private_key


class Elliptic:
    """A certificate of a P-256 key, signed for with an Ed25519 one."""

    private_key = RENTER.private_key

    def __init__(self) -> None:
        import datetime

        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = RENTER.certificate.subject
        when = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        builder = builder.serial_number(1).not_valid_before(when).not_valid_after(when.replace(year=2200))
        self.certificate = builder.sign(key, hashes.SHA256())


@pytest.mark.parametrize(
    ("identity", "chain", "reason"),
    [
        (None, (), "a certificate is required"),
        (RENTER, (RENTER.certificate,), "exactly one certificate"),
        (Elliptic(), (), "not Ed25519"),
        (Stolen, (), "decrypt_error"),
    ],
    ids=["no certificate", "two certificates", "another kind of key", "stolen certificate"],
)
def test_a_server_refuses_a_client_that_does_not_prove_an_ed25519_key(
    identity: Any, chain: Any, reason: str
) -> None:
    link = stock_client_link(identity, chain=chain)
    link.run(lambda: link.has_server and link.server.engine.ending is not None)
    assert link.server.engine.ending.by is EndedBy.FAULT
    assert reason in link.server.engine.ending.reason
    assert not link.server.engine.is_open
    assert link.server.engine.peer_key is None


def test_a_stock_client_with_the_right_key_is_admitted() -> None:
    """The refusals above are for their reasons, not because the peer is another implementation."""
    link = stock_client_link(RENTER)
    link.run(lambda: link.has_server and link.server.engine.is_open)
    assert link.server.engine.peer_key == RENTER.public_key


def test_a_client_refuses_a_server_that_does_not_ask_for_its_certificate() -> None:
    link = QuicLink(
        lambda address, now: QuicEngine.dialling(RENTER, PROVIDER.public_key, address, now),
        lambda cid: stock(is_client=False, identity=PROVIDER, cid=cid),
    )
    link.run(lambda: link.client.engine.ending is not None)
    assert link.client.engine.ending.by is EndedBy.FAULT
    assert "did not ask" in link.client.engine.ending.reason
    assert not link.client.engine.is_open


def test_a_unidirectional_stream_ends_the_connection() -> None:
    link = stock_client_link(RENTER)
    link.run(lambda: link.has_server and link.server.engine.is_open)
    link.client.engine._remote_max_streams_uni = 1
    link.client.engine._remote_max_stream_data_uni = 100
    link.client.engine.send_stream_data(2, b"x")
    link.run(lambda: link.server.engine.ending is not None)
    assert "Too many streams" in link.server.engine.ending.reason


def test_more_streams_than_allowed_end_the_connection() -> None:
    link = stock_client_link(RENTER)
    link.run(lambda: link.has_server and link.server.engine.is_open)
    link.client.engine._remote_max_streams_bidi = 1 << 20
    link.client.engine.send_stream_data(4 * LIMITS.streams_max, b"x")
    link.run(lambda: link.server.engine.ending is not None)
    assert "Too many streams" in link.server.engine.ending.reason


def crypto_frames(pieces: list[tuple[int, bytes]]) -> bytes:
    from aioquic.buffer import Buffer

    buf = Buffer(capacity=4096)
    for offset, data in pieces:
        buf.push_uint_var(6)
        buf.push_uint_var(offset)
        buf.push_uint_var(len(data))
        buf.push_bytes(data)
    return bytes(buf.data)


@pytest.mark.parametrize(
    "pieces", [[(500_000, b"x")], [(10 + 2 * gap, b"x") for gap in range(100)]], ids=["far ahead", "holes"]
)
def test_tls_bytes_that_would_pile_up_end_the_connection(pieces: list[tuple[int, bytes]]) -> None:
    from aioquic.quic.connection import QuicConnectionError
    from aioquic.tls import Epoch

    link = make_link()
    link.run(lambda: link.has_server)
    engine = link.server.engine

    class Context:
        epoch = Epoch.HANDSHAKE
        quic_logger_frames = None

    with pytest.raises(QuicConnectionError, match="too many TLS bytes"):
        engine._payload_received(Context, crypto_frames(pieces))
    assert len(engine._crypto_streams[Epoch.HANDSHAKE].receiver._buffer) < LIMITS.stream_window


def test_a_stream_full_of_holes_ends_the_connection() -> None:
    link = opened(make_link())
    stream = open_stream(link)
    link.client.send(stream, b"x", end=False)
    link.run(lambda: stream in link.server.received)
    receiver = link.server.engine._streams[stream].receiver
    for offset in range(10, 10 + 2 * 3000, 2):
        receiver._ranges.add(offset, offset + 1)
    link.client.send(stream, b"y", end=False)
    link.run(lambda: link.server.engine.ending is not None)
    assert "too many holes" in link.server.engine.ending.reason


# --- flow control --------------------------------------------------------------------------------------------


def test_a_reader_that_stops_stops_the_sender() -> None:
    link = opened(make_link(limits=SMALL))
    link.server.reads = False
    stream = open_stream(link)
    link.client.send(stream, noise(500_000))
    link.run_for(20)
    assert len(link.server.received[stream]) == SMALL.stream_window
    assert link.client.engine.buffered(stream) == 64 << 10
    assert link.client.unsent() == 500_000 - SMALL.stream_window - (64 << 10)
    link.server.reads = True
    link.run(lambda: stream in link.server.ended)
    assert bytes(link.server.received[stream]) == noise(500_000)


def test_unread_streams_do_not_starve_another_one() -> None:
    link = opened(make_link(limits=SMALL))
    link.server.reads = False
    stalled = [open_stream(link) for _ in range(SMALL.streams_max - 1)]
    for stream in stalled:
        link.client.send(stream, noise(100_000))
    link.run_for(10)
    assert all(len(link.server.received[stream]) == SMALL.stream_window for stream in stalled)
    assert link.server.engine._local_max_data.value == SMALL.connection_window  # no credit for what is unread
    control = open_stream(link)
    link.client.send(control, b"still here")
    link.run(lambda: control in link.server.ended)


def test_streams_that_were_reset_unread_give_their_window_back() -> None:
    link = opened(make_link(limits=SMALL))
    link.server.reads = False
    for _ in range(3 * SMALL.connection_window // SMALL.stream_window):
        stream = open_stream(link)
        link.client.send(stream, noise(SMALL.stream_window), end=False)
        link.run(lambda stream=stream: len(link.server.received.get(stream, b"")) == SMALL.stream_window)
        link.client.engine.reset_stream(stream)
        link.run(lambda stream=stream: stream in link.server.resets)
        link.server.engine.reset_stream(stream)
        link.run(lambda stream=stream: link.client.engine.is_discarded(stream))
    link.server.reads = True
    stream = open_stream(link)
    link.client.send(stream, noise(200_000))
    link.run(lambda: stream in link.server.ended)


def test_finished_streams_make_room_for_new_ones_and_are_forgotten() -> None:
    link = opened(make_link(limits=SMALL))
    for number in range(40):
        link.run(lambda: link.client.engine.open_stream is not None)
        stream = open_stream(link)
        link.client.send(stream, noise(3000, number))
        link.run(lambda stream=stream: stream in link.server.ended)
        link.server.send(stream, noise(10, number))
        link.run(
            lambda stream=stream: (
                link.client.engine.is_discarded(stream) and link.server.engine.is_discarded(stream)
            )
        )
        link.run_for(0.2)
    assert len(link.server.engine._consumed) <= 1
    assert len(link.client.engine._consumed) <= 1


def test_no_more_streams_are_opened_than_the_peer_allows() -> None:
    link = opened(make_link(limits=SMALL))
    streams = [link.client.engine.open_stream() for _ in range(SMALL.streams_max + 1)]
    assert streams == [0, 4, 8, 12, None]


def test_stop_stream_stops_the_sender() -> None:
    link = opened(make_link())
    stream = open_stream(link)
    link.client.send(stream, noise(1000), end=False)
    link.run(lambda: stream in link.server.received)
    link.server.engine.stop_stream(stream)
    link.run(lambda: stream in link.client.stopped)
    assert link.client.engine.buffered(stream) == 0


# --- loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_both_directions_survive_loss_duplication_and_reordering(seed: int) -> None:
    link = opened(make_link(seed=seed, loss=0.08, duplicate=0.05, jitter_s=0.02))
    up, down = noise(150_000, seed), noise(150_000, seed + 100)
    stream = open_stream(link)
    link.client.send(stream, up)
    link.run(lambda: stream in link.server.received)
    link.server.send(stream, down)
    link.run(lambda: stream in link.server.ended and stream in link.client.ended)
    assert hashlib.sha256(link.server.received[stream]).digest() == hashlib.sha256(up).digest()
    assert hashlib.sha256(link.client.received[stream]).digest() == hashlib.sha256(down).digest()


@pytest.mark.parametrize("seed", range(3))
def test_a_refusal_arrives_over_a_lossy_link(seed: int) -> None:
    link = make_link(client=STRANGER, seed=seed, loss=0.2, duplicate=0.1, jitter_s=0.02)
    link.run(lambda: link.client.engine.ending is not None)
    assert link.client.engine.ending.by is EndedBy.PEER
    assert link.client.engine.ending.refused


def test_keys_are_updated_while_data_flows() -> None:
    limits = TunnelLimits(key_packets_max=60)
    link = opened(make_link(limits=limits, seed=5, loss=0.02, jitter_s=0.005))
    phases: list[int] = []

    def until() -> bool:
        phase = link.server.engine._cryptos[_one_rtt()].recv.key_phase
        if not phases or phases[-1] != phase:
            phases.append(phase)
        return stream in link.server.ended

    stream = open_stream(link)
    link.client.send(stream, noise(600_000))
    link.run(until)
    assert bytes(link.server.received[stream]) == noise(600_000)
    packets = link.client.engine._packet_number + link.server.engine._packet_number
    assert 4 < len(phases) <= packets // limits.key_packets_max + 1


def test_keys_are_not_updated_twice_while_the_peer_may_not_know_of_the_first() -> None:
    link = opened(make_link(limits=TunnelLimits(key_packets_max=10)))
    stream = open_stream(link)
    link.client.send(stream, noise(600_000))
    link.run(lambda: len(link.server.received.get(stream, b"")) > 100_000)
    link.tamper = lambda name, data: [data] if name == "server" else []  # nothing arrives for a while
    link.run_for(0.2)
    link.tamper = None
    link.run(lambda: stream in link.server.ended, limit_s=25)
    assert bytes(link.server.received[stream]) == noise(600_000)


def _one_rtt() -> Any:
    from aioquic.tls import Epoch

    return Epoch.ONE_RTT


# --- time ----------------------------------------------------------------------------------------------------


def test_an_idle_connection_is_kept_alive() -> None:
    link = opened(make_link())
    start = len(link.sent_at)
    link.run_for(600)
    assert link.client.engine.ending is None
    assert link.server.engine.ending is None
    pauses = [
        after - before for before, after in zip(link.sent_at[start:], link.sent_at[start + 1 :], strict=False)
    ]
    assert 2 < max(pauses) <= LIMITS.keepalive_ms / 1000 + 0.1


def test_a_peer_that_vanishes_is_noticed_on_both_sides() -> None:
    link = opened(make_link())
    link.tamper = lambda _name, _data: []
    link.run(lambda: link.client.engine.is_over and link.server.engine.is_over, limit_s=40)
    for side in (link.client, link.server):
        assert side.engine.ending.by is EndedBy.SILENCE
        assert side.engine.ending.reason == "nothing was heard from the peer for 30 s"


def test_a_handshake_that_is_never_finished_is_given_up() -> None:
    link = make_link()
    link.tamper = lambda name, data: [data] if not link.has_server or name == "server" else []
    link.run(lambda: link.has_server)
    began = link.now
    link.run(lambda: link.server.engine.ending is not None)
    assert link.now - began == pytest.approx(LIMITS.handshake_ms / 1000, abs=0.1)
    assert "took too long" in link.server.engine.ending.reason
    link.run(lambda: link.server.engine.is_over)


def test_a_lost_close_is_repeated_when_the_peer_goes_on() -> None:
    link = opened(make_link())
    stream = open_stream(link)
    link.client.send(stream, noise(2_000_000))
    link.run(lambda: stream in link.server.received)
    link.tamper = lambda name, data: [] if name == "server" else [data]
    link.server.engine.shut("gone\nfishing" + "!" * 500)
    link.run_for(0.001)
    link.tamper = None
    link.run(lambda: link.client.engine.ending is not None, limit_s=5)
    ending = link.client.engine.ending
    assert ending.by is EndedBy.PEER
    assert ending.reason.startswith("gone fishing!")
    assert len(ending.reason) <= 200
    assert link.server.engine.ending.by is EndedBy.US


def test_the_first_end_of_a_connection_stands() -> None:
    link = opened(make_link())
    link.client.engine.shut("first")
    link.client.engine.shut("second")
    assert link.client.engine.ending.reason == "first"
    link.run(lambda: link.client.engine.is_over and link.server.engine.is_over, limit_s=5)
    assert link.client.engine.ending.reason == "first"
    assert link.server.engine.ending.reason == "first"
    assert link.client.engine.get_timer() is None


# --- addresses -------------------------------------------------------------------------------------------------


def test_a_client_whose_address_changes_goes_on() -> None:
    link = opened(make_link(seed=3, loss=0.02))
    stream = open_stream(link)
    link.client.send(stream, noise(600_000))
    link.run(lambda: len(link.server.received.get(stream, b"")) > 100_000)
    moved: Address = ("198.51.100.7", 4321)
    link.rebind(moved)
    link.run(lambda: stream in link.server.ended)
    link.run(lambda: link.server.engine.peer_address == moved, limit_s=5)
    assert bytes(link.server.received[stream]) == noise(600_000)
    link.server.send(stream, noise(100_000, 9))
    link.run(lambda: stream in link.client.ended)
    assert bytes(link.client.received[stream]) == noise(100_000, 9)


@pytest.mark.parametrize(("delay_s", "copies"), [(0.02, 10_000), (0.0, 5)], ids=["too late", "overtaking"])
def test_datagrams_copied_from_elsewhere_do_not_move_the_connection(delay_s: float, copies: int) -> None:
    link = opened(make_link())
    stream = open_stream(link)
    thief: Address = ("203.0.113.66", 66)
    copied: list[bytes] = []

    def copy_to_thief(name: str, data: bytes) -> list[bytes]:
        if name == "client" and len(copied) < copies:
            copied.append(data)
            link.inject("server", data, thief, delay_s=delay_s)
        return [data]

    link.tamper = copy_to_thief
    link.client.send(stream, noise(200_000))
    link.run(lambda: stream in link.server.ended)
    link.server.send(stream, noise(50_000))
    link.run(lambda: stream in link.client.ended)
    assert len(copied) >= 5
    assert link.server.engine.peer_address == CLIENT


def test_an_address_that_was_not_validated_is_not_the_peers() -> None:
    link = opened(make_link())
    stream = open_stream(link)
    link.rebind(("198.51.100.7", 4321))
    link.tamper = lambda name, data: [data] if name == "client" else []  # it cannot receive there
    link.client.send(stream, noise(1000))
    link.run(lambda: stream in link.server.ended)
    assert link.server.engine.peer_address == CLIENT


def test_words_of_a_peer_are_cut_and_made_printable() -> None:
    assert bounded_words("  a\x1b[31m\n\u202eb ") == "a [31m  b"
    assert bounded_words("é" * 500) == "é" * 100
