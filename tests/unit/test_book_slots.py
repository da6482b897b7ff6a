"""One slot a listing: what stands against what, for how long, and what is never bid on."""

import pytest
from support.offers import NOW, sealed_offer, sealed_withdrawal
from support.signers import signer

from protocol.book import (
    CLOCK_SKEW_MAX_MS,
    CLOCK_TOLERANCE_MS,
    BookLimits,
    Duplicate,
    Inserted,
    Mark,
    OrderBook,
    RefusalReason,
    Refused,
    Stale,
    Statement,
    Superseded,
    is_newer,
    mark_of,
)
from protocol.units import MINUTE_MS, Millis

NODE = signer(1).node
FAR, LONG_AGO = NOW + CLOCK_SKEW_MAX_MS, NOW - CLOCK_SKEW_MAX_MS


def new_book(**limits: int) -> OrderBook:
    return OrderBook(b"salt", BookLimits(**limits))


def test_the_first_offer_of_a_listing_is_inserted() -> None:
    book, offer = new_book(), sealed_offer()
    assert book.insert(offer, NOW) == Inserted()
    assert book.newest_of(NODE, "a100") == offer
    assert list(book.live(NOW)) == [offer]
    assert len(book) == 1


def test_the_same_record_again_is_a_duplicate() -> None:
    book, offer = new_book(), sealed_offer()
    book.insert(offer, NOW)
    assert book.insert(offer, NOW) == Duplicate()
    assert book.insert(offer, Millis(NOW + CLOCK_SKEW_MAX_MS * 10)) == Duplicate()


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"sequence": 5}, {"sequence": 6}),
        ({"sequence": 9, "epoch": 1}, {"sequence": 2, "epoch": 2}),
        ({"sequence": 5, "expires_at": NOW + MINUTE_MS * 9}, {"sequence": 6, "expires_at": NOW + 1}),
    ],
)
def test_the_higher_epoch_and_sequence_stands(older: dict[str, int], newer: dict[str, int]) -> None:
    old, new = sealed_offer(**older), sealed_offer(**newer)
    assert is_newer(new, old)
    assert not is_newer(old, new)
    rising, falling = new_book(), new_book()
    rising.insert(old, NOW)
    assert rising.insert(new, NOW) == Superseded(old)
    falling.insert(new, NOW)
    assert falling.insert(old, NOW) == Stale(new)
    assert rising.newest_of(NODE, "a100") == falling.newest_of(NODE, "a100") == new


def test_of_equal_sequences_the_smaller_id_stands() -> None:
    twins: list[Statement] = sorted((sealed_offer(free=free) for free in range(4)), key=lambda each: each.id)
    book = new_book()
    for offer in reversed(twins):
        book.insert(offer, NOW)
    assert book.newest_of(NODE, "a100") == twins[0]
    assert book.insert(twins[1], NOW) == Stale(twins[0])


def test_listings_and_providers_have_slots_of_their_own() -> None:
    book = new_book()
    offers = [sealed_offer(who, listing=listing) for who in (1, 2) for listing in ("a", "b")]
    for offer in offers:
        assert book.insert(offer, NOW) == Inserted()
    assert book.offers_of(NODE) == tuple(offers[:2])
    assert book.offers_of(signer(9).node) == ()
    assert book.newest_of(NODE, "c") is None


def test_a_withdrawal_takes_the_listing_off_the_market() -> None:
    book, offer, withdrawal = new_book(), sealed_offer(), sealed_withdrawal()
    book.insert(offer, NOW)
    assert book.insert(withdrawal, NOW) == Superseded(offer)
    assert list(book.live(NOW)) == []
    assert book.offers_of(NODE) == ()
    assert mark_of(withdrawal, NOW) is Mark.WITHDRAWN
    assert book.insert(offer, NOW) == Stale(withdrawal)


def test_a_withdrawal_that_comes_first_stops_the_offer_that_comes_late() -> None:
    book, withdrawal = new_book(), sealed_withdrawal()
    assert book.insert(withdrawal, NOW) == Inserted()
    assert book.insert(sealed_offer(), NOW) == Stale(withdrawal)
    newer = sealed_offer(sequence=3)
    assert book.insert(newer, NOW) == Superseded(withdrawal)
    assert list(book.live(NOW)) == [newer]


def test_a_tombstone_stands_until_it_expires_and_clocks_may_differ() -> None:
    book, withdrawal = new_book(), sealed_withdrawal(expires_at=NOW + 1000)
    book.insert(withdrawal, NOW)
    assert book.expire(Millis(NOW + 1000 + CLOCK_SKEW_MAX_MS - 1)) == ()
    assert book.expire(Millis(NOW + 1000 + CLOCK_SKEW_MAX_MS)) == (withdrawal,)
    assert book.insert(sealed_offer(), NOW) == Inserted()


def test_an_offer_of_a_fast_clock_is_kept_and_not_bid_on() -> None:
    book = new_book()
    ahead = sealed_offer(issued_at=NOW + CLOCK_SKEW_MAX_MS, expires_at=NOW + CLOCK_SKEW_MAX_MS + 1000)
    assert book.insert(ahead, NOW) == Inserted()
    assert mark_of(ahead, NOW) is Mark.CLOCK
    assert list(book.live(NOW)) == []
    assert list(book.live(Millis(NOW + CLOCK_SKEW_MAX_MS - CLOCK_TOLERANCE_MS - 1))) == []
    assert list(book.live(Millis(NOW + CLOCK_SKEW_MAX_MS - CLOCK_TOLERANCE_MS))) == [ahead]


def test_an_expired_offer_is_kept_for_a_while_and_not_bid_on() -> None:
    book, offer = new_book(), sealed_offer(expires_at=NOW)
    assert book.insert(offer, NOW) == Inserted()
    assert list(book.live(Millis(NOW - 1))) == [offer]
    assert list(book.live(NOW)) == []
    assert list(book.statements()) == [offer]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"issued_at": FAR + 1, "expires_at": FAR + 2}, RefusalReason.CLOCK_AHEAD),
        ({"issued_at": LONG_AGO - 9, "expires_at": LONG_AGO}, RefusalReason.EXPIRED),
    ],
)
def test_clocks_that_differ_by_more_are_refused(fields: dict[str, int], reason: RefusalReason) -> None:
    book = new_book()
    for statement in (sealed_offer(**fields), sealed_withdrawal(**fields)):
        result = book.insert(statement, NOW)
        assert isinstance(result, Refused)
        assert result.reason is reason
    assert len(book) == 0


def test_expiry_follows_the_statement_that_stands() -> None:
    book = new_book()
    book.insert(sealed_offer(sequence=1, expires_at=NOW + 1000), NOW)
    longer = sealed_offer(sequence=2, expires_at=NOW + 2000)
    book.insert(longer, NOW)
    assert book.expire(Millis(NOW + 1500 + CLOCK_SKEW_MAX_MS)) == ()
    assert book.expire(Millis(NOW + 2000 + CLOCK_SKEW_MAX_MS)) == (longer,)
    assert (len(book), book.size) == (0, 0)


def test_a_book_with_no_room_for_one_offer_refuses_it() -> None:
    result = new_book(bytes_max=1000).insert(sealed_offer(), NOW)
    assert isinstance(result, Refused)
    assert result.reason is RefusalReason.FULL


def test_an_offer_beyond_use_is_refused() -> None:
    offer = sealed_offer()
    result = new_book(statement_size_max=len(offer.data) - 1).insert(offer, NOW)
    assert isinstance(result, Refused)
    assert result.reason is RefusalReason.TOO_LARGE
    assert new_book(statement_size_max=len(offer.data)).insert(offer, NOW) == Inserted()
