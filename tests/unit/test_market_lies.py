"""What peers cannot do to each other's books with well-formed records, in the whole market, by hand."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from support.market_nodes import HandRenter, MarketNode, Town, open_town, until
from support.signers import NETWORK
from trio.abc import Clock

from node.market.leases import LeaseState
from protocol.envelope import open_untrusted, seal
from protocol.identity import NodeId
from protocol.machines.lease import FailReason, LeasePhase
from protocol.records import (
    Award,
    Bid,
    BidAck,
    BidRejected,
    Countersignature,
    Receipt,
    ReceiptAcceptance,
    RejectReason,
)


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with open_town(tmp_path) as town:
        yield town


async def test_a_nonce_makes_one_lease_and_no_second_one_in_its_place(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider(devices=2)
    renter, other = town.by_hand(), town.by_hand(22)
    award = await renter.buy(provider, nonce=bytes(16))
    before = provider.lease_rows()
    second = await renter.send(provider, renter.bid(provider, nonce=bytes(16), max_spend=10**7))
    assert isinstance(second.record, BidRejected)
    assert second.record.reason is RejectReason.DUPLICATE
    await trio.sleep(5)
    assert provider.lease_rows() == before
    assert provider.lease_rows()[0].state == LeaseState.GRANTED
    # The nonces of others are their own.
    assert (await other.buy(provider, nonce=bytes(16))).record.lease != award.record.lease


async def test_two_bids_that_wait_have_two_nonces(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider(devices=2)
    provider.source.change(1, model="Tesla T4", memory_mib=15_360)
    listings = await until(
        lambda: sorted(provider.market.seller.auctions) if len(provider.market.seller.auctions) > 1 else []
    )
    renter = town.by_hand()
    first = await renter.send(provider, renter.bid(provider, listing=listings[0], nonce=bytes(16)))
    second = await renter.send(provider, renter.bid(provider, listing=listings[1], nonce=bytes(16)))
    assert isinstance(first.record, BidAck)
    assert isinstance(second.record, BidRejected)
    assert second.record.reason is RejectReason.DUPLICATE
    await until(lambda: renter.of(Award))


class Forger(HandRenter):
    """Accepts its receipts in the name of another lease."""

    named = bytes(16)

    async def _on_letter(self, caller: NodeId, data: bytes) -> bytes:
        letter = open_untrusted(data, NETWORK)
        if not isinstance(letter.record, Receipt):
            return await super()._on_letter(caller, data)
        self.letters.append(letter)
        return seal(
            ReceiptAcceptance(receipt_id=letter.id, lease=self.named, accepted_at=1), self.signer, NETWORK
        ).data


@pytest.mark.parametrize("of", ["another lease", "no lease"])
async def test_an_acceptance_settles_no_lease_but_its_receipts(town: Town, autojump_clock: Clock, of: str) -> None:
    provider = await town.provider(devices=2)
    honest, forger = town.by_hand(), Forger(town.hub, 22)
    town.hub.connect(forger.signer.node, provider.id)
    theirs = (await honest.buy(provider)).record.lease
    mine = (await forger.buy(provider)).record.lease
    forger.named = theirs if of == "another lease" else bytes(16)
    await provider.leases.say(mine, phase=LeasePhase.FAILED, outcome=FailReason.CANCELLED.value)
    await until(lambda: forger.of(Receipt))
    await trio.sleep(5)
    states = {row.lease: row.state for row in provider.lease_rows()}
    assert states == {theirs: LeaseState.GRANTED, mine: LeaseState.OVER}
    assert [entry.confirmed for entry in _entries(provider)] == [False]


def _entries(node: MarketNode) -> list:
    return node.read(lambda tx: list(tx.entries.all()))


async def test_of_two_awards_at_once_the_lease_is_the_countersigned_one(town: Town, autojump_clock: Clock) -> None:
    renter, provider = await town.renter(), town.seller_by_hand()
    await trio.sleep(0.1)
    offer = await provider.publish(quantity=1, free=1)
    dear_ids = set()
    for _ in range(8):
        job = await renter.submit()
        bid = await until(lambda job=job: next((one for one in provider.of(Bid) if job.has_bid(one.id)), None))
        dear, right = provider.award(bid, offer, price=bid.record.price + 1), provider.award(bid, offer)
        dear_ids.add(dear.id)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(provider.tell, renter, dear)
            nursery.start_soon(provider.tell, renter, right)
        await renter.market.renter.cancel(job)
    await trio.sleep(1)
    signed = {letter.record.award_id for letter in provider.of(Countersignature)}
    assert {row.award_id for row in renter.lease_rows()} == signed
    assert not dear_ids & signed
