"""Books: the order of arrival does not matter, anti-entropy makes two equal, and bounds always hold."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.offers import NOW, sealed_offer, sealed_withdrawal

from protocol.book import (
    CLOCK_SKEW_MAX_MS,
    STATEMENT_OVERHEAD,
    BookLimits,
    Inserted,
    OrderBook,
    Statement,
    Superseded,
    mark_of,
    position_of,
)
from protocol.units import MINUTE_MS, Millis

CHARGE = len(sealed_offer().data) + STATEMENT_OVERHEAD


def statement(who: int, listing: str, sequence: int, free: int, is_withdrawal: bool, ends_in_ms: int) -> Statement:
    dates = {"expires_at": NOW + ends_in_ms, "issued_at": NOW + ends_in_ms - 5 * MINUTE_MS}
    if is_withdrawal:
        return sealed_withdrawal(who, listing=listing, sequence=sequence, **dates)
    return sealed_offer(who, listing=listing, sequence=sequence, free=free, **dates)


STATEMENTS = st.builds(
    statement,
    who=st.integers(1, 4),
    listing=st.sampled_from(["a", "b"]),
    sequence=st.integers(1, 3),
    free=st.integers(0, 2),
    is_withdrawal=st.booleans(),
    ends_in_ms=st.sampled_from([-MINUTE_MS, 1, MINUTE_MS, 2 * MINUTE_MS]),
)


def contents(book: OrderBook) -> list[bytes]:
    return [each.id for each in book.statements()]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), statements=st.lists(STATEMENTS, max_size=12))
def test_the_order_of_arrival_does_not_matter(data: st.DataObject, statements: list[Statement]) -> None:
    one, other = OrderBook(b"one"), OrderBook(b"other")
    for each in statements:
        one.insert(each, NOW)
    for each in data.draw(st.permutations(statements * 2)):
        other.insert(each, NOW)
    assert contents(one) == contents(other)
    assert (one.size, list(one.live(NOW))) == (other.size, list(other.live(NOW)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mine=st.lists(STATEMENTS, max_size=8), theirs=st.lists(STATEMENTS, max_size=8), page=st.integers(1, 4))
def test_one_round_of_digests_makes_two_books_equal(
    mine: list[Statement], theirs: list[Statement], page: int
) -> None:
    one, other = OrderBook(b"one"), OrderBook(b"other")
    for each in mine:
        one.insert(each, NOW)
    for each in theirs:
        other.insert(each, NOW)
    first = b""
    while True:
        digest = one.digest(first, page)
        comparison = other.compare(digest)
        for provider, listing in comparison.wanted:
            held = one.newest_of(provider, listing)
            assert held is not None
            assert isinstance(other.insert(held, NOW), Inserted | Superseded)
        for each in comparison.newer:
            assert isinstance(one.insert(each, NOW), Inserted | Superseded)
        first = digest.end
        if not first:
            break
    assert contents(one) == contents(other)


class BoundedBook(RuleBasedStateMachine):
    """A small book under any traffic: its accounts are right and its bounds hold after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = BookLimits(bytes_max=4 * CHARGE, listings_per_provider_max=2)
        self.book = OrderBook(b"salt", self.limits)
        self.now = Millis(NOW)

    @rule(
        who=st.integers(1, 5), listing=st.sampled_from(["a", "b", "c"]), sequence=st.integers(1, 4),
        free=st.integers(0, 1), withdraw=st.booleans(), ends=st.sampled_from([1, MINUTE_MS]),
        standing=st.integers(0, 1),
    )  # fmt: skip
    def insert(
        self, who: int, listing: str, sequence: int, free: int, withdraw: bool, ends: int, standing: int
    ) -> None:
        incoming = statement(who, listing, sequence, free, withdraw, self.now - NOW + ends)
        before = {each.id: each for each in self.book.statements()}
        result = self.book.insert(incoming, self.now, standing=standing)
        after = {each.id for each in self.book.statements()}
        if isinstance(result, Inserted | Superseded):
            gone = {each.id for each in result.evicted} | (
                {result.old.id} if isinstance(result, Superseded) else set()
            )
            assert after == (before.keys() - gone) | {incoming.id}
            assert all(each.signer != incoming.signer for each in result.evicted)
        assert len(after) == len(self.book)

    @precondition(lambda self: len(self.book) > 0)
    @rule(ms=st.sampled_from([1, MINUTE_MS, CLOCK_SKEW_MAX_MS]))
    def expire(self, ms: int) -> None:
        self.now = Millis(self.now + ms)
        dropped = self.book.expire(self.now)
        assert all(each.record.expires_at + CLOCK_SKEW_MAX_MS <= self.now for each in dropped)
        assert all(each.record.expires_at + CLOCK_SKEW_MAX_MS > self.now for each in self.book.statements())

    @invariant()
    def accounts_are_right(self) -> None:
        held = list(self.book.statements())
        assert self.book.size == sum(len(each.data) + STATEMENT_OVERHEAD for each in held) <= self.limits.bytes_max
        positions = [position_of(each.signer, each.record.listing) for each in held]
        assert positions == sorted(set(positions))
        for each in held:
            assert self.book.newest_of(each.signer, each.record.listing) is each
            assert sum(other.signer == each.signer for other in held) <= self.limits.listings_per_provider_max
        assert all(mark_of(each, self.now) is None for each in self.book.live(self.now))


BoundedBook.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_a_bounded_book = BoundedBook.TestCase
