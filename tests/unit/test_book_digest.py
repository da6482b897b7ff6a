"""Anti-entropy: two books tell each other in few bytes what the other lacks."""

import pytest
from support.offers import NOW, sealed_offer, sealed_withdrawal
from support.signers import signer

from protocol import codec
from protocol.book import DIGEST_ITEMS_MAX, ID_PREFIX_SIZE, Digest, DigestItem, OrderBook, Statement, position_of
from protocol.errors import MalformedRecord
from protocol.identity import NodeId


def book_of(*statements: Statement) -> OrderBook:
    book = OrderBook(b"salt")
    for statement in statements:
        book.insert(statement, NOW)
    return book


def whole(book: OrderBook) -> Digest:
    digest = book.digest(b"")
    assert digest.end == b""
    return digest


def test_equal_books_have_nothing_to_say() -> None:
    offers = [sealed_offer(who) for who in range(1, 6)]
    one, other = book_of(*offers), book_of(*reversed(offers))
    assert whole(one) == whole(other)
    comparison = one.compare(whole(other))
    assert (comparison.wanted, comparison.newer) == ((), ())


def test_each_side_learns_what_it_lacks() -> None:
    common, mine, theirs = sealed_offer(1), sealed_offer(2), sealed_offer(3)
    comparison = book_of(common, mine).compare(whole(book_of(common, theirs)))
    assert comparison.wanted == ((signer(3).node, "a100"),)
    assert comparison.newer == (mine,)


def test_the_newer_statement_is_the_one_to_send() -> None:
    old, new = sealed_offer(sequence=1), sealed_withdrawal(sequence=2)
    ahead = book_of(new).compare(whole(book_of(old)))
    assert (ahead.wanted, ahead.newer) == ((), (new,))
    behind = book_of(old).compare(whole(book_of(new)))
    assert (behind.wanted, behind.newer) == (((signer(1).node, "a100"),), ())


def test_of_equal_sequences_the_smaller_id_travels() -> None:
    small, large = sorted((sealed_offer(free=free) for free in (1, 2)), key=lambda each: each.id)
    comparison = book_of(small).compare(whole(book_of(large)))
    assert (comparison.wanted, comparison.newer) == ((), (small,))


def test_what_has_expired_is_told_too() -> None:
    """Else an older offer that lives longer would be sent to who has a newer, expired one, again and again."""
    newer, older = sealed_offer(sequence=2, expires_at=NOW), sealed_offer(sequence=1)
    comparison = book_of(older).compare(whole(book_of(newer)))
    assert (comparison.wanted, comparison.newer) == (((signer(1).node, "a100"),), ())


def test_a_large_book_is_told_in_pages_that_join() -> None:
    statements = [sealed_offer(who, listing=listing) for who in range(1, 8) for listing in ("a", "b", "c")]
    book, first, seen = book_of(*statements), b"", []
    while True:
        page = book.digest(first, limit=4)
        assert len(page.items) <= 4
        seen += [position_of(NodeId(item.provider), item.listing) for item in page.items]
        assert book_of(*statements).compare(page).newer == ()
        first = page.end
        if not first:
            break
    assert seen == sorted(position_of(each.signer, each.record.listing) for each in statements)


def test_a_page_says_nothing_of_what_lies_outside_it() -> None:
    statements = sorted((sealed_offer(who) for who in range(1, 6)), key=lambda each: each.signer)
    page = book_of(*statements).digest(statements[1].signer, limit=2)
    assert [item.provider for item in page.items] == [each.signer for each in statements[1:3]]
    other = book_of(statements[0], statements[4])
    assert [wanted[0] for wanted in other.compare(page).wanted] == [each.signer for each in statements[1:3]]
    assert other.compare(page).newer == ()


def test_a_digest_of_the_longest_names_fits_a_message() -> None:
    items = tuple(
        DigestItem(number.to_bytes(32, "big"), "l" * 64, 2**61, 2**61, bytes(ID_PREFIX_SIZE))
        for number in range(DIGEST_ITEMS_MAX)
    )
    data = codec.encode(Digest(first=b"\0" * 96, end=b"\xff" * 96, items=items))
    assert len(codec.decode_untrusted(data, Digest).items) == DIGEST_ITEMS_MAX


def item(provider: int, listing: str = "a") -> dict[str, object]:
    return {"provider": bytes([provider]) * 32, "listing": listing}


@pytest.mark.parametrize(
    ("first", "end", "slots"),
    [
        (b"", b"", [item(2), item(1)]),
        (b"", b"", [item(1), item(1)]),
        (b"", b"", [item(1, "b"), item(1, "a")]),
        (b"\x02", b"", [item(1)]),
        (b"", b"\x01", [item(1)]),
        (b"\x03", b"\x02", [item(2)]),
    ],
)
def test_a_peers_digest_that_lies_about_its_range_is_malformed(
    first: bytes, end: bytes, slots: list[dict[str, object]]
) -> None:
    tree = {
        "first": first,
        "end": end,
        "items": [[each["provider"], each["listing"], 0, 1, bytes(ID_PREFIX_SIZE)] for each in slots],
    }
    with pytest.raises(MalformedRecord, match="in order, each once, within its range"):
        codec.decode_untrusted(codec.encode(tree), Digest)


def test_an_empty_range_that_is_upside_down_does_no_harm() -> None:
    tree = {"first": b"\x03", "end": b"\x02", "items": []}
    digest = codec.decode_untrusted(codec.encode(tree), Digest)
    comparison = book_of(*(sealed_offer(who) for who in range(1, 20))).compare(digest)
    assert (comparison.wanted, comparison.newer) == ((), ())
