"""What a node believes of what it hears: verified, in time, bounded; and what it passes on."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from support.market_nodes import MarketNode, Town, open_town, until
from support.offers import an_offer
from support.signers import NETWORK, OTHER_NETWORK, signer
from trio.abc import Clock

from node.market import bookkeeping
from node.market.auctions import OFFERS_TOPIC
from node.market.bookkeeping import BOOK_PROTOCOL, BookPage
from node.ports import GossipVerdict
from protocol import codec
from protocol.envelope import ENVELOPE_SIZE_MAX, Envelope, Sealed, seal
from protocol.records import Ack, Offer, Withdrawal
from protocol.units import MINUTE_MS


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with open_town(tmp_path) as town:
        yield town


def statement(node: MarketNode, person: int = 31, network: Any = NETWORK, **fields: Any) -> Sealed[Offer]:
    now = node.clock.now()
    usual = {"sequence": now, "issued_at": now, "expires_at": now + 5 * MINUTE_MS}
    return seal(an_offer(**(usual | fields)), signer(person), network)


def withdrawal(node: MarketNode, person: int = 31) -> Sealed[Withdrawal]:
    now = node.clock.now()
    record = Withdrawal(listing="a100", sequence=now + 1, issued_at=now, expires_at=now + 5 * MINUTE_MS)
    return seal(record, signer(person), NETWORK)


def hear(node: MarketNode, data: bytes) -> GossipVerdict:
    return node.market.book._on_gossip(signer(99).node, data)


def live(node: MarketNode) -> list[Sealed[Offer]]:
    return list(node.market.book.live_offers(node.clock.now()))


def forged(sealed: Sealed[Any]) -> bytes:
    envelope = codec.decode_untrusted(sealed.data, Envelope, ENVELOPE_SIZE_MAX)
    return codec.encode(msgspec.structs.replace(envelope, signature=bytes(64)))


async def test_a_copy_with_a_bad_signature_does_not_shadow_the_original(town: Town, autojump_clock: Clock) -> None:
    node = await town.renter()
    offer = statement(node)
    assert hear(node, forged(offer)) is GossipVerdict.REJECT
    assert live(node) == []
    assert hear(node, offer.data) is GossipVerdict.ACCEPT
    assert live(node) == [offer]


async def test_what_was_heard_before_is_dropped_before_it_is_verified(
    town: Town, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await town.renter()
    offer = statement(node)
    hear(node, offer.data)
    monkeypatch.setattr(bookkeeping, "open_untrusted", lambda *_: pytest.fail("verified again"))
    assert hear(node, offer.data) is GossipVerdict.IGNORE


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 100, b"\x00" * (ENVELOPE_SIZE_MAX + 1), seal(Ack(of=bytes(32)), signer(31), NETWORK).data],
    ids=["empty", "garbage", "huge", "another kind"],
)
async def test_what_is_no_statement_is_held_against_its_sender(
    town: Town, autojump_clock: Clock, data: bytes
) -> None:
    node = await town.renter()
    assert hear(node, data) is GossipVerdict.REJECT


async def test_another_networks_offers_and_simulated_ones_are_refused(town: Town, autojump_clock: Clock) -> None:
    node = await town.renter()
    assert hear(node, statement(node, network=OTHER_NETWORK).data) is GossipVerdict.REJECT
    assert hear(node, statement(node, simulated=True).data) is GossipVerdict.REJECT
    assert live(node) == []


async def test_our_own_offers_and_older_ones_are_not_taken_from_others(town: Town, autojump_clock: Clock) -> None:
    node = await town.renter(11)
    assert hear(node, statement(node, person=11).data) is GossipVerdict.IGNORE
    newer, older = statement(node, sequence=7), statement(node, sequence=6)
    assert hear(node, newer.data) is GossipVerdict.ACCEPT
    assert hear(node, older.data) is GossipVerdict.IGNORE
    assert live(node) == [newer]


async def test_a_withdrawal_takes_an_offer_off_the_market(town: Town, autojump_clock: Clock) -> None:
    node = await town.renter()
    hear(node, statement(node).data)
    assert hear(node, withdrawal(node).data) is GossipVerdict.ACCEPT
    assert live(node) == []


async def test_an_offer_from_a_clock_far_ahead_may_come_again_when_its_time_has_come(
    town: Town, autojump_clock: Clock
) -> None:
    node = await town.renter()
    ahead = node.clock.now() + 20 * MINUTE_MS
    offer = statement(node, issued_at=ahead, expires_at=ahead + 5 * MINUTE_MS)
    assert hear(node, offer.data) is GossipVerdict.IGNORE
    node.clock.offset_ms = 21 * MINUTE_MS
    assert hear(node, offer.data) is GossipVerdict.ACCEPT
    assert live(node) == [offer]


async def test_expired_offers_leave_the_book(town: Town, autojump_clock: Clock) -> None:
    node = await town.renter()
    hear(node, statement(node).data)
    node.clock.offset_ms = 6 * MINUTE_MS
    assert live(node) == []
    node.clock.offset_ms = 30 * MINUTE_MS
    await until(lambda: len(node.market.book.book) == 0)


async def test_a_flood_of_names_is_forgotten_and_not_piled_up(
    town: Town, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await town.renter()
    monkeypatch.setattr(bookkeeping, "SEEN_MAX", 10)
    offers = [statement(node, sequence=number) for number in range(30)]
    for offer in offers:
        hear(node, offer.data)
    assert len(node.market.book._seen) == 10
    assert len(node.market.book.book) == 1
    for number in range(100):
        hear(node, forged(offers[number % 30]))
    assert hear(node, offers[29].data) is GossipVerdict.IGNORE
    assert live(node) == [offers[29]]


async def test_waiting_for_the_book_ends_with_its_next_change(town: Town, autojump_clock: Clock) -> None:
    node = await town.renter()
    changes: list[int] = []

    async def watch() -> None:
        while True:
            await node.market.book.changed()
            changes.append(len(node.market.book.book))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        for number in range(3):
            await trio.sleep(0.1)
            hear(node, statement(node, person=31 + number).data)
            hear(node, forged(statement(node, person=41)))
        await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    assert changes == [1, 2, 3]


# --- pages --------------------------------------------------------------------------------------------------


async def test_a_newcomer_gets_what_its_peer_sells_and_knows(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider(1)
    other = statement(provider, person=32)
    hear(provider, other.data)
    newcomer = await town.renter(11)
    town.hub.connect(newcomer.id, provider.id)
    await until(lambda: len(live(newcomer)) == 2)
    assert {offer.signer for offer in live(newcomer)} == {provider.id, signer(32).node}


async def test_a_page_is_bounded(town: Town, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await town.renter()
    asker = town.by_hand()
    offers = [statement(node, person=31 + number) for number in range(6)]
    for offer in offers:
        hear(node, offer.data)
    monkeypatch.setattr(bookkeeping, "PAGE_STATEMENTS_MAX", 4)
    page = codec.decode_untrusted(await asker.network.request(node.id, BOOK_PROTOCOL, b""), BookPage, 2**20)
    assert len(page.statements) == 4
    monkeypatch.setattr(bookkeeping, "PAGE_SIZE_MAX", 2 * len(offers[0].data) + 100)
    page = codec.decode_untrusted(await asker.network.request(node.id, BOOK_PROTOCOL, b""), BookPage, 2**20)
    assert len(page.statements) == 2


async def test_a_page_of_lies_teaches_nothing_and_ends_nothing(town: Town, autojump_clock: Clock) -> None:
    node = await town.renter()
    liar = town.seller_by_hand(41)
    await trio.sleep(1)  # it was asked when it connected, and did not answer
    good = statement(node, person=41)
    other_kind = seal(Ack(of=bytes(32)), signer(41), NETWORK).data
    replies = [
        b"\xff" * 10,
        codec.encode(BookPage((b"", b"\x00" * 500, forged(good), other_kind))),
        codec.encode(BookPage((good.data,) * 3)),
    ]

    async def answer(_: Any, __: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return replies.pop(0)

    liar.network.on_request(BOOK_PROTOCOL, answer)
    for _ in range(2):
        await node.market.book.fetch_page(liar.signer.node)
        assert live(node) == []
    await node.market.book.fetch_page(liar.signer.node)
    assert live(node) == [good]
    await node.market.book.fetch_page(signer(77).node)  # whom nobody knows


async def test_gossip_is_passed_on_only_when_it_is_news(town: Town, autojump_clock: Clock) -> None:
    one, two = await town.renter(11), await town.renter(12)
    source = town.seller_by_hand(31)
    town.hub.connect(one.id, two.id)
    await trio.sleep(1)
    source.network.connected.discard(two.id)
    two.network.connected.discard(source.signer.node)
    offer = await source.publish()
    await until(lambda: live(two) == [offer])
    await source.network.publish(OFFERS_TOPIC, forged(statement(one, person=32)))
    await trio.sleep(1)
    assert two.network.verdicts[GossipVerdict.REJECT] == 0
    assert one.network.verdicts[GossipVerdict.REJECT] == 1
