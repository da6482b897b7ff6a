"""Payments made outside: they count once both have signed, and on both sides alike."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from support.market_nodes import EPOCH, MarketNode, Town, open_town, until
from trio.abc import Clock

from node.errors import BadArgument, NotFound
from node.market.settlements import PENDING_PER_PEER_MAX, KnownSettlement, SettlementState
from node.market.settling import RECEIPT_KIND, SETTLEMENT_KIND, balance_with
from node.store import EntryRow, PeerRow
from protocol.records import Ack, Receipt, Refusal, Settlement, SettlementAcceptance
from protocol.units import AMOUNT_MAX


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with open_town(tmp_path) as town:
        yield town


async def two_friends(town: Town) -> tuple[MarketNode, MarketNode]:
    """Return a provider, and a renter that owes it 500 nano-credits by both their books."""
    provider, renter = await town.renter(1), await town.renter(2)
    town.hub.connect_all()
    for node, peer, amount in ((provider, renter, 500), (renter, provider, -500)):
        entry = EntryRow(
            id=b"receipt", peer=peer.id, kind=RECEIPT_KIND, amount=amount, lease=None, simulated=False,
            confirmed=True, note="", at=EPOCH,
        )  # fmt: skip
        node.read(lambda tx, entry=entry: tx.entries.put(entry))
    return provider, renter


def balance(node: MarketNode, peer: MarketNode) -> int:
    return node.read(lambda tx: balance_with(tx, peer.id))


async def pending(node: MarketNode) -> KnownSettlement:
    async def found() -> KnownSettlement | None:
        known = await node.market.settlements.known()
        return next((each for each in known if each.state is SettlementState.AWAITING_US), None)

    while (settlement := await found()) is None:
        await trio.sleep(0.05)
    return settlement


@pytest.mark.parametrize("payer_proposes", [True, False])
async def test_a_payment_lowers_the_debt_on_both_sides_once_both_have_signed(
    town: Town, autojump_clock: Clock, payer_proposes: bool
) -> None:
    provider, renter = await two_friends(town)
    proposer, other = (renter, provider) if payer_proposes else (provider, renter)
    known = await proposer.market.settlements.propose(other.id, 300, "wire 7", paid_by_us=payer_proposes)
    assert (known.record.payer, known.record.payee) == (renter.id, provider.id)
    assert known.record.balance_after == 200  # what the payer owes the payee afterwards
    heard = await pending(other)
    assert (heard.record, heard.peer) == (known.record, proposer.id)
    assert (balance(provider, renter), balance(renter, provider)) == (500, -500)
    accepted = await other.market.settlements.accept(heard.id.hex()[:8])
    assert accepted.state is SettlementState.ACCEPTED
    await until(lambda: balance(proposer, other) != (-500 if payer_proposes else 500), "the acceptance")
    assert (balance(provider, renter), balance(renter, provider)) == (200, -200)
    assert [each.state for each in await proposer.market.settlements.known()] == [SettlementState.ACCEPTED]


async def test_a_settlement_waits_for_a_peer_that_is_away(town: Town, autojump_clock: Clock) -> None:
    provider, renter = await two_friends(town)
    town.hub.partition({renter.id})
    await provider.market.settlements.propose(renter.id, 500, "cash", paid_by_us=False)
    await town.restart(provider)
    await trio.sleep(60)
    town.hub.heal()
    heard = await pending(renter)
    await renter.market.settlements.accept(heard.id.hex())
    await until(lambda: balance(provider, renter) == 0)
    assert balance(renter, provider) == 0


async def test_paying_too_much_turns_the_debt_around(town: Town, autojump_clock: Clock) -> None:
    provider, renter = await two_friends(town)
    known = await renter.market.settlements.propose(provider.id, 800, "", paid_by_us=True)
    assert known.record.balance_after == -300
    await provider.market.settlements.accept((await pending(provider)).id.hex())
    await until(lambda: balance(renter, provider) == 300)
    assert balance(provider, renter) == -300


@pytest.mark.parametrize("amount", [0, -1, AMOUNT_MAX + 1])
async def test_nothing_is_settled_for_nothing(town: Town, autojump_clock: Clock, amount: int) -> None:
    provider, renter = await two_friends(town)
    with pytest.raises(BadArgument):
        await provider.market.settlements.propose(renter.id, amount, "", paid_by_us=True)
    with pytest.raises(BadArgument):
        await provider.market.settlements.propose(provider.id, 5, "", paid_by_us=True)


async def test_only_the_other_side_accepts_and_by_an_unambiguous_name(town: Town, autojump_clock: Clock) -> None:
    provider, renter = await two_friends(town)
    for number in range(2):
        await provider.market.settlements.propose(renter.id, 1 + number, "", paid_by_us=False)
    await until(lambda: renter.read(lambda tx: tx.entries.count("kind = ?", SETTLEMENT_KIND)) == 2)
    with pytest.raises(NotFound):
        await renter.market.settlements.accept("zz")
    with pytest.raises(BadArgument, match="2 settlements"):
        await renter.market.settlements.accept("")
    known = (await provider.market.settlements.known())[0]
    with pytest.raises(BadArgument, match="the peer has to accept it"):
        await provider.market.settlements.accept(known.id.hex())
    await renter.market.settlements.accept(known.id.hex())
    again = await renter.market.settlements.accept(known.id.hex())
    assert again.state is SettlementState.ACCEPTED


async def test_a_peer_has_few_settlements_waiting_at_a_time(town: Town, autojump_clock: Clock) -> None:
    provider, renter = await two_friends(town)
    for _ in range(PENDING_PER_PEER_MAX + 3):
        await renter.market.settlements.propose(provider.id, 1, "", paid_by_us=True)
    await until(lambda: renter.read(lambda tx: tx.outbox.count()) == 0)
    waiting = [each for each in await provider.market.settlements.known() if each.peer == renter.id]
    assert len(waiting) == PENDING_PER_PEER_MAX
    assert balance(provider, renter) == 500


def a_settlement(payer: bytes, payee: bytes) -> Settlement:
    return Settlement(
        payer=payer, payee=payee, amount=5, balance_after=0, reference="", nonce=bytes(16), settled_at=EPOCH
    )


async def test_strangers_leave_nothing_in_the_books(town: Town, autojump_clock: Clock) -> None:
    node = await town.renter(1)
    stranger, other = town.by_hand(21), town.by_hand(22)
    me = stranger.signer.node
    answer = await stranger.ask(node, a_settlement(me, node.id))
    assert isinstance(answer, Refusal)
    assert answer.reason == "unknown_peer"
    for payer, payee in ((me, other.signer.node), (other.signer.node, node.id), (me, me), (node.id, node.id)):
        answer = await stranger.ask(node, a_settlement(payer, payee))
        assert isinstance(answer, Refusal)
        assert answer.reason == "not_ours"
    assert node.read(lambda tx: tx.entries.count() + tx.records.count()) == 0
    node.read(lambda tx: tx.peers.put(PeerRow(node=me, label="a friend now")))
    assert isinstance(await stranger.ask(node, a_settlement(me, node.id)), Ack)


async def test_an_acceptance_confirms_nothing_but_our_own_settlement_with_its_signer(
    town: Town, autojump_clock: Clock
) -> None:
    provider, renter = await two_friends(town)
    thief = town.by_hand(21)
    known = await provider.market.settlements.propose(renter.id, 500, "", paid_by_us=False)
    receipt = provider.context.seal(
        Receipt(
            lease=bytes(16), provider=provider.id, renter=thief.signer.node, countersignature_id=bytes(32),
            job_hash=bytes(32), outcome="completed", exit_status=0, started_at=0, ended_at=0, metered_ms=0,
            price=0, quantity=1, amount=0, voucher_amount=0, voucher_number=0, simulated=False,
        )
    )  # fmt: skip
    entry = EntryRow(
        id=receipt.id, peer=thief.signer.node, kind=RECEIPT_KIND, amount=7, lease=None, simulated=False,
        confirmed=False, note="", at=EPOCH,
    )  # fmt: skip
    provider.read(lambda tx: (tx.records.put(provider.context.record_row(receipt)), tx.entries.put(entry)))
    for settlement_id in (known.id, receipt.id, bytes(32)):
        answer = await thief.ask(provider, SettlementAcceptance(settlement_id=settlement_id, accepted_at=EPOCH))
        assert isinstance(answer, Refusal)
        assert answer.reason == "unknown_settlement"
    assert balance(provider, renter) == 500
    unconfirmed = provider.read(lambda tx: tx.entries.get(receipt.id))
    assert unconfirmed is not None
    assert not unconfirmed.confirmed
