"""Floods: a key that fills the book loses its own statements, not those of others."""

import pytest
from support.offers import NOW, sealed_offer
from support.signers import signer

from protocol.book import (
    ROOM_STEP,
    STATEMENT_OVERHEAD,
    BookLimits,
    Inserted,
    OrderBook,
    RefusalReason,
    Refused,
    Superseded,
)
from protocol.envelope import Sealed
from protocol.identity import hash_bytes
from protocol.records import Offer

CHARGE = len(sealed_offer().data) + STATEMENT_OVERHEAD
HEAVY = {"environments": tuple(f"environment-{number:0>48}" for number in range(60))}


def book_for(offers: int, **limits: int) -> OrderBook:
    return OrderBook(b"salt", BookLimits(bytes_max=CHARGE * offers + CHARGE // 2, **limits))


def providers_in(book: OrderBook) -> set[bytes]:
    return {statement.signer for statement in book.statements()}


def listing(who: int, number: int, **fields: object) -> Sealed[Offer]:
    return sealed_offer(who, listing=f"l{number:0>3}", **fields)


def test_a_provider_has_at_most_so_many_listings() -> None:
    book = book_for(100, listings_per_provider_max=3)
    for number in range(3):
        assert book.insert(listing(1, number), NOW) == Inserted()
    result = book.insert(listing(1, 3), NOW)
    assert isinstance(result, Refused)
    assert result.reason is RefusalReason.PROVIDER_LIMIT
    assert isinstance(book.insert(listing(1, 2, sequence=2), NOW), Superseded)
    assert book.insert(listing(2, 3), NOW) == Inserted()


def test_a_provider_that_takes_much_room_makes_it() -> None:
    many = 2 * ROOM_STEP // CHARGE + 1
    book = book_for(many, listings_per_provider_max=many)
    for number in range(many):
        book.insert(listing(1, number, expires_at=NOW + 1000 + number), NOW)
    for who in (2, 3, 4):
        result = book.insert(sealed_offer(who), NOW)
        assert isinstance(result, Inserted)
        assert [(each.signer, each.record.listing) for each in result.evicted] == [
            (signer(1).node, f"l{who - 2:0>3}")
        ]
    assert providers_in(book) == {signer(who).node for who in (1, 2, 3, 4)}


def test_a_flooder_does_not_evict_others_by_flooding() -> None:
    book = book_for(40)
    for who in range(2, 22):
        book.insert(sealed_offer(who), NOW)
    for number in range(32):
        book.insert(listing(1, number, sequence=number + 1), NOW)
    assert providers_in(book) >= {signer(who).node for who in range(2, 22)}


@pytest.mark.parametrize("size", ["small", "heavy"])
def test_many_keys_hold_no_more_than_their_share(size: str) -> None:
    """Twenty honest offers among two hundred of fresh keys, in a book for a hundred: rank decides, not haste."""
    fields = HEAVY if size == "heavy" else {}
    honest, flood = range(1, 21), range(100, 300)
    last, first = book_for(100), book_for(100)
    for who in (*honest, *flood):
        last.insert(sealed_offer(who, **(fields if who in flood else {})), NOW)
    for who in (*flood, *honest):
        first.insert(sealed_offer(who, **(fields if who in flood else {})), NOW)
    for book in (last, first):
        # Of 220 that want in, 100 small ones fit, or about 40 large ones: 9 and 4 honest ones are their share.
        assert len(providers_in(book) & {signer(who).node for who in honest}) >= (7 if size == "small" else 2)
    assert size == "heavy" or providers_in(last) == providers_in(first)


def test_rank_depends_on_a_secret_salt() -> None:
    def survivors(salt: bytes) -> set[bytes]:
        book = OrderBook(salt, BookLimits(bytes_max=CHARGE * 10))
        for who in range(1, 41):
            book.insert(sealed_offer(who), NOW)
        return providers_in(book)

    ranked = sorted((signer(who).node for who in range(1, 41)), key=lambda node: hash_bytes(b"one" + node))
    assert survivors(b"one") == set(ranked[-len(survivors(b"one")) :])
    assert survivors(b"one") != survivors(b"two")


def test_strangers_never_evict_a_peer_of_standing() -> None:
    book = book_for(3)
    for who in (1, 2, 3):
        assert book.insert(sealed_offer(who), NOW, standing=1) == Inserted()
    for who in range(100, 160):
        result = book.insert(sealed_offer(who), NOW)
        assert isinstance(result, Refused)
        assert result.reason is RefusalReason.FULL


def test_a_peer_of_standing_evicts_strangers() -> None:
    book = book_for(3)
    for who in (100, 101, 102):
        book.insert(sealed_offer(who), NOW)
    for who in (1, 2, 3):
        result = book.insert(sealed_offer(who), NOW, standing=1)
        assert isinstance(result, Inserted)
        assert len(result.evicted) == 1
    assert providers_in(book) == {signer(who).node for who in (1, 2, 3)}


def test_standing_can_be_gained_and_lost() -> None:
    book = book_for(1)
    book.insert(sealed_offer(1), NOW, standing=1)
    assert isinstance(book.insert(sealed_offer(2), NOW, standing=0), Refused)
    book.insert(sealed_offer(1, sequence=2), NOW, standing=0)
    result = book.insert(sealed_offer(2), NOW, standing=1)
    assert isinstance(result, Inserted)
    assert [each.signer for each in result.evicted] == [signer(1).node]


def test_a_reissue_of_the_same_size_needs_no_room() -> None:
    book = book_for(2)
    for who in (1, 2):
        book.insert(sealed_offer(who, sequence=5), NOW)
    for sequence in range(6, 20):
        for who in (1, 2):
            result = book.insert(sealed_offer(who, sequence=sequence), NOW)
            assert isinstance(result, Superseded)
            assert result.evicted == ()
