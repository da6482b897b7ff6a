"""The tables about peers stay bounded, penalties decay and ban, and addresses are limited."""

import pytest

from node.swarm.limits import SwarmLimits, TokenBucket
from node.swarm.multiaddrs import Address
from node.swarm.peers import (
    ADDRESS_BOOK_MAX,
    ADDRESSES_PER_NODE_MAX,
    FAULTY_MAX,
    LATELY_MAX,
    MISDEEDS_MAX,
    AddressGate,
    PeerBook,
)
from protocol.identity import NodeId


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def node(number: int) -> NodeId:
    return NodeId(number.to_bytes(32, "big"))


def address(number: int) -> Address:
    return Address("ip4", "192.0.2.1", number, None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_bucket_gives_its_burst_then_its_rate():
    bucket = TokenBucket(2.0, 3, 0.0)
    assert [bucket.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(0.4)
    assert bucket.take(0.5)
    assert not bucket.take(0.5)
    assert not bucket.take(0.5, 0.1)
    assert bucket.take(1000.0, 3)
    assert not bucket.take(1000.0)


def test_a_bucket_s_debt_is_told_and_bounded():
    bucket = TokenBucket(10.0, 20, 0.0)
    assert bucket.charge(0.0, 20) == 0.0
    assert bucket.charge(0.0, 5) == pytest.approx(0.5)
    assert bucket.charge(0.5, 0) == pytest.approx(0.0)
    assert bucket.charge(0.5, 1_000_000) == pytest.approx(2.0)


def test_a_clock_that_stands_still_gives_no_tokens():
    bucket = TokenBucket(10.0, 1, 5.0)
    assert bucket.take(5.0)
    assert not bucket.take(4.0)
    assert not bucket.take(5.0)


def test_penalties_decay_and_ban_for_a_time(clock: Clock):
    book = PeerBook(SwarmLimits(penalty_max=10.0, penalty_decay_per_s=1.0, ban_ms=5_000), clock)
    assert not book.penalise(node(1), 10.0)
    clock.now += 4
    assert not book.penalise(node(1), 4.0)
    assert not book.is_banned(node(1))
    assert book.penalise(node(1), 0.5)
    assert book.is_banned(node(1))
    assert not book.is_banned(node(2))
    clock.now += 5
    assert not book.is_banned(node(1))
    assert not book.penalise(node(1), 10.0)


def test_penalties_decay_to_nothing_not_below(clock: Clock):
    book = PeerBook(SwarmLimits(penalty_max=10.0, penalty_decay_per_s=1.0), clock)
    book.penalise(node(1), 1.0)
    clock.now += 1000
    assert not book.penalise(node(1), 10.0)
    assert book.penalise(node(1), 0.5)


def test_misdeeds_are_told_in_words_the_newest_first_and_a_few_of_them(clock: Clock):
    book = PeerBook(SwarmLimits(), clock)
    assert book.misdeeds(node(1)) == ()
    for reason in ("too many requests", "a bad frame", "too many requests"):
        book.note_misdeed(node(1), reason)
    assert book.misdeeds(node(1)) == ("too many requests (2 times)", "a bad frame")
    for number in range(MISDEEDS_MAX):
        book.note_misdeed(node(1), f"a frame of {number} bytes")
    assert len(book.misdeeds(node(1))) == MISDEEDS_MAX
    assert book.misdeeds(node(1))[0] == f"a frame of {MISDEEDS_MAX - 1} bytes"
    for number in range(FAULTY_MAX + 10):
        book.note_misdeed(node(number), "x")
    assert len(book._misdeeds) == FAULTY_MAX


def test_tables_that_strangers_fill_stay_bounded(clock: Clock):
    book = PeerBook(SwarmLimits(), clock)
    for number in range(FAULTY_MAX + 10):
        book.penalise(node(number), 1.0)
        book.penalise(node(10**6 + number), 1000.0)
        book.remember(node(number), [address(1)])
    for number in range(LATELY_MAX + 10):
        state = book.add(node(number), "192.0.2.1", inbound=True)
        book.admit(state, "x")
        book.remove(node(number))
    assert len(book._penalties) == len(book._banned_until) == FAULTY_MAX
    assert len(book._addresses) == ADDRESS_BOOK_MAX
    assert len(book.shown()) == LATELY_MAX
    assert not book.connected


def test_the_newest_addresses_are_kept_first(clock: Clock):
    book = PeerBook(SwarmLimits(), clock)
    book.remember(node(1), [address(1), address(2)])
    book.remember(node(1), [address(3), address(1)])
    assert book.addresses_of(node(1)) == (address(3), address(1), address(2))
    book.remember(node(1), map(address, range(100, 200)))
    assert len(book.addresses_of(node(1))) == ADDRESSES_PER_NODE_MAX
    assert book.addresses_of(node(2)) == ()


def test_peers_are_shown_once_they_said_hello_and_after_they_left(clock: Clock):
    book = PeerBook(SwarmLimits(), clock)
    silent = book.add(node(1), "192.0.2.1", inbound=True)
    state = book.add(node(2), "192.0.2.2", inbound=False)
    assert book.add(node(2), "192.0.2.9", inbound=True) is state
    book.admit(state, "gpunode/1")
    assert [(peer.node, peer.connected) for peer in book.shown()] == [(node(2), True)]
    book.remove(node(1))
    book.remove(node(2))
    book.remove(node(2))
    assert silent.gone.is_set()
    assert [(peer.node, peer.connected) for peer in book.shown()] == [(node(2), False)]


def test_one_address_is_limited_in_number_pending_and_rate(clock: Clock):
    limits = SwarmLimits(
        connections_per_address=4, pending_per_address=2, pending_max=5, connects_per_s=1.0, connects_burst=6
    )
    gate = AddressGate(limits, clock)
    first, second = gate.open("192.0.2.1"), gate.open("192.0.2.1")
    assert first is not None
    assert second is not None
    assert gate.open("192.0.2.1") is None
    for slot in (first, second):
        gate.settle(slot)
        gate.settle(slot)
    assert (gate.settled, gate.pending) == (2, 0)
    third, fourth = gate.open("192.0.2.1"), gate.open("192.0.2.1")
    assert third is not None
    assert fourth is not None
    gate.settle(third)
    assert gate.open("192.0.2.1") is None  # it holds four
    for slot in (first, third, fourth):
        gate.close(slot)
    assert (gate.settled, gate.pending) == (1, 0)
    assert gate.open("192.0.2.1") is not None
    assert gate.open("192.0.2.1") is not None
    assert gate.open("192.0.2.1") is None
    others = [gate.open(f"192.0.2.{number}") for number in range(2, 7)]
    assert [slot is not None for slot in others] == [True] * 3 + [False] * 2  # pending in all


def test_the_rate_of_an_address_recovers_and_can_be_charged(clock: Clock):
    limits = SwarmLimits(connects_per_s=1.0, connects_burst=3)
    gate = AddressGate(limits, clock)

    def try_connect(remote: str) -> bool:
        slot = gate.open(remote)
        if slot is not None:
            gate.close(slot)
        return slot is not None

    assert [try_connect("192.0.2.1") for _ in range(4)] == [True, True, True, False]
    clock.now += 1
    assert try_connect("192.0.2.1")
    gate.charge("192.0.2.2", 5.0)
    assert not try_connect("192.0.2.2")
    clock.now += 2
    assert not try_connect("192.0.2.2")
    clock.now += 2
    assert try_connect("192.0.2.2")
    assert not gate._open
    assert not gate._pending


def test_an_ipv6_prefix_is_one_address(clock: Clock):
    gate = AddressGate(SwarmLimits(pending_per_address=1), clock)
    assert gate.open("2001:db8::1") is not None
    assert gate.open("2001:db8::ffff:1") is None
    assert gate.open("2001:db8:0:1::1") is not None
    assert gate.open("::ffff:192.0.2.1") is not None
    assert gate.open("192.0.2.1") is None
    assert gate.open("fe80::1%eth0") is not None
