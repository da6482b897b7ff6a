"""What becomes of datagrams that belong to no connection."""

import random

import pytest
from aioquic.buffer import Buffer
from aioquic.quic.packet import QuicPacketType, pull_quic_header

from node.tunnel.engine import QuicEngine
from node.tunnel.gate import (
    Admitted,
    Gate,
    HalfOpen,
    Ignored,
    Retried,
    destination_cid_untrusted,
    place_of,
)
from node.tunnel.identity import TunnelIdentity
from node.tunnel.limits import TOKENS_USED_MAX, TunnelLimits
from node.tunnel.seam import Address

LIMITS = TunnelLimits(connections_max=2, unproven_max=3, half_open_max=5, half_open_per_address_max=2)
HERE: Address = ("192.0.2.9", 4000)


def dial() -> tuple[QuicEngine, bytes]:
    engine = QuicEngine.dialling(TunnelIdentity(bytes(32)), bytes(32), ("192.0.2.1", 1), 0.0)
    return engine, engine.datagrams_to_send(0.0)[0][0]


def strangers(count: int, *, is_proven: bool = False) -> list[HalfOpen]:
    return [HalfOpen(f"198.51.100.{number}", is_proven) for number in range(count)]


def retried() -> tuple[Gate, bytes, bytes]:
    """Return a gate that asked for a token, the first packet, and the one with the token."""
    gate = Gate(LIMITS)
    engine, first = dial()
    decision = gate.judge_untrusted(first, HERE, strangers(3), 0, 100.0)
    assert isinstance(decision, Retried)
    engine.receive_datagram(decision.datagram, ("192.0.2.1", 1), 0.1)
    return gate, first, engine.datagrams_to_send(0.1)[0][0]


def test_a_first_packet_is_admitted() -> None:
    _, first = dial()
    decision = Gate(LIMITS).judge_untrusted(first, HERE, [], 0, 100.0)
    assert decision == Admitted(destination_cid_untrusted(first) or b"", None, HalfOpen("192.0.2.9", False))


def test_a_stranger_is_asked_for_a_token_when_many_handshakes_are_under_way() -> None:
    gate, first, second = retried()
    decision = gate.judge_untrusted(second, HERE, strangers(3), 0, 101.0)
    assert isinstance(decision, Admitted)
    assert decision.original_cid == destination_cid_untrusted(first)
    assert decision.retry_cid == destination_cid_untrusted(second)
    assert decision.half_open == HalfOpen("192.0.2.9", is_proven=True)


def test_a_token_is_smaller_than_what_it_answers() -> None:
    _, first = dial()
    decision = Gate(LIMITS).judge_untrusted(first, HERE, strangers(3), 0, 100.0)
    assert isinstance(decision, Retried)
    assert len(decision.datagram) < len(first) // 3
    header = pull_quic_header(Buffer(data=decision.datagram), host_cid_length=8)
    assert header.packet_type is QuicPacketType.RETRY


def test_a_token_is_looked_at_even_when_few_handshakes_are_under_way() -> None:
    gate, first, second = retried()
    decision = gate.judge_untrusted(second, HERE, [], 0, 101.0)
    assert isinstance(decision, Admitted)
    assert decision.original_cid == destination_cid_untrusted(first)


@pytest.mark.parametrize(
    ("address", "now"), [(("192.0.2.10", 4000), 101.0), (("192.0.2.9", 4001), 101.0), (HERE, 140.0)]
)
def test_a_token_is_good_for_one_address_and_a_short_time(address: Address, now: float) -> None:
    gate, _, second = retried()
    assert isinstance(gate.judge_untrusted(second, address, [], 0, now), Ignored)


def test_another_gates_token_is_ignored() -> None:
    _, _, second = retried()
    assert isinstance(Gate(LIMITS).judge_untrusted(second, HERE, [], 0, 101.0), Ignored)


def test_one_address_is_asked_for_a_token_before_others_are() -> None:
    _, first = dial()
    mine = [HalfOpen("192.0.2.9", False), HalfOpen("192.0.2.9", False)]
    gate = Gate(LIMITS)
    assert isinstance(gate.judge_untrusted(first, HERE, mine, 0, 100.0), Retried)
    assert isinstance(gate.judge_untrusted(first, ("192.0.2.8", 1), mine, 0, 100.0), Admitted)


def test_a_forger_does_not_use_up_the_place_of_its_victim() -> None:
    gate, _, second = retried()
    forged = [HalfOpen("192.0.2.9", False)] * 3
    assert isinstance(gate.judge_untrusted(second, HERE, forged, 0, 101.0), Admitted)


def test_a_token_is_good_once() -> None:
    gate, _, second = retried()
    assert isinstance(gate.judge_untrusted(second, HERE, [], 0, 101.0), Admitted)
    assert gate.judge_untrusted(second, HERE, [], 0, 101.0) == Ignored("a token that was used")


def test_used_tokens_are_not_remembered_without_bound() -> None:
    gate, _, second = retried()
    for number in range(TOKENS_USED_MAX):
        gate._used[number.to_bytes(8, "big")] = None
    assert isinstance(gate.judge_untrusted(second, HERE, [], 0, 101.0), Admitted)
    assert len(gate._used) == TOKENS_USED_MAX


def test_a_burst_of_forged_first_packets_is_asked_for_tokens_even_when_none_of_them_lasts() -> None:
    gate = Gate(TunnelLimits(unproven_max=3, unproven_per_s=10))
    _, first = dial()
    decisions = [gate.judge_untrusted(first, HERE, [], 0, 100.0) for _ in range(10)]
    assert [type(decision) for decision in decisions] == [Admitted] * 3 + [Retried] * 7
    assert isinstance(gate.judge_untrusted(first, HERE, [], 0, 100.05), Retried)
    assert isinstance(gate.judge_untrusted(first, HERE, [], 0, 100.15), Admitted)
    assert [type(gate.judge_untrusted(first, HERE, [], 0, 200.0)) for _ in range(4)] == [Admitted] * 3 + [Retried]


def test_one_address_has_a_bounded_number_of_handshakes() -> None:
    gate, _, second = retried()
    mine = [HalfOpen("192.0.2.9", True)] * 2
    assert isinstance(gate.judge_untrusted(second, HERE, mine, 0, 101.0), Ignored)


def test_handshakes_and_connections_are_bounded() -> None:
    gate, first, second = retried()
    for packet in (first, second):
        assert isinstance(gate.judge_untrusted(packet, HERE, strangers(5, is_proven=True), 0, 101.0), Ignored)
        assert isinstance(gate.judge_untrusted(packet, HERE, [], 2, 101.0), Ignored)


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("192.0.2.9", "192.0.2.9"),
        ("::ffff:192.0.2.9", "192.0.2.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_place(host: str, place: str) -> None:
    assert place_of(host) == place


def test_connection_ids_of_both_kinds_of_header() -> None:
    short = b"\x40" + b"12345678" + bytes(30)
    assert destination_cid_untrusted(short) == b"12345678"
    _, first = dial()
    assert (
        destination_cid_untrusted(first) == pull_quic_header(Buffer(data=first), host_cid_length=8).destination_cid
    )


@pytest.mark.parametrize(
    "data", [b"", b"\x40", b"\x00" * 1200, b"\xc0" + b"\0\0\0\2" + bytes(1200), b"\xc0\0\0\0\1\xff" + bytes(1200)]
)
def test_what_is_not_quic_version_1_has_no_connection_id(data: bytes) -> None:
    assert destination_cid_untrusted(data) is None


def test_no_garbage_is_admitted_or_raises() -> None:
    chance = random.Random(7)
    gate = Gate(TunnelLimits(unproven_max=100, unproven_per_s=0))
    _, first = dial()
    for _ in range(2000):
        data = bytearray(first)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(40)] = chance.randrange(256)
        del data[chance.randrange(1, 1400) :]
        destination_cid_untrusted(bytes(data))
        if not data:
            continue
        decision = gate.judge_untrusted(bytes(data), HERE, [], 0, 100.0)
        if isinstance(decision, Retried):
            assert len(data) == 1200
        if isinstance(decision, Admitted):
            assert len(data) == 1200
            assert 8 <= len(decision.original_cid) <= 20
    for size in (0, 1, 20, 25, 1199, 1200, 1500):
        for _ in range(50):
            data = bytearray(chance.randbytes(size))
            if destination_cid_untrusted(bytes(data)) is not None:
                assert isinstance(gate.judge_untrusted(bytes(data), HERE, [], 0, 100.0), Ignored)
