"""Daemons that are killed in the middle of a trade: it goes on or begins anew soon, and holds nothing for long."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import trio
import trio.lowlevel
from support.market_nodes import MarketNode, Town, open_town, until
from support.memory_network import Faults
from support.signers import NETWORK
from trio.abc import Clock

from node.lease.files import write_status
from node.market.leases import LeaseState
from node.market.live_job import LiveJob
from protocol.envelope import Sealed, seal
from protocol.machines.auction_types import HOLD_MS, free_units
from protocol.machines.lease import COMPLETED, FailReason, LeasePhase
from protocol.machines.purchase import Phase
from protocol.records import (
    Ack,
    Award,
    Bid,
    BidAck,
    BidRejected,
    Countersignature,
    GrantDelivery,
    Receipt,
    ReceiptAcceptance,
    Refusal,
    RejectReason,
)

SOON_S = 3.0
"""Virtual: what a restart may cost a purchase at the most, the time away not counted."""


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    # Letters travel long enough for a daemon to die meanwhile.
    async with open_town(tmp_path, faults=Faults(delay_min_ms=60, delay_max_ms=60)) as town:
        yield town


async def granted_soon(job: LiveJob) -> None:
    with trio.move_on_after(SOON_S):
        await until(lambda: job.purchase.phase is Phase.GRANTED)
    assert job.purchase.phase is Phase.GRANTED, job.history


def job_of(renter: MarketNode) -> LiveJob:
    (job,) = renter.market.jobs.by_id.values()
    return job


async def pair(town: Town) -> tuple[MarketNode, MarketNode]:
    provider, renter = await town.provider(), await town.renter()
    town.hub.connect_all()
    await until(lambda: list(renter.market.book.live_offers(renter.clock.now())), "the offer")
    return provider, renter


async def away(town: Town, node: MarketNode, seconds: float) -> None:
    """Cut a node's power, and start it again after a while."""
    friends = sorted(node.network.connected)
    node.stop()
    await trio.sleep(seconds)
    node.load()
    await town.start(node)
    for friend in friends:
        town.hub.connect(node.id, friend)


@pytest.mark.parametrize("seconds", [0.5, 2.5, 6, 12, 40])
async def test_a_bid_that_was_acknowledged_survives_its_providers_absence(
    town: Town, autojump_clock: Clock, seconds: float
) -> None:
    provider, renter = await pair(town)
    job = await renter.submit()
    await until(lambda: job.purchase.phase is Phase.WAITING)
    await away(town, provider, seconds)
    await granted_soon(job)


@pytest.mark.parametrize("seconds", [0.5, 2.5, 6, 12, 19])
async def test_a_countersigned_award_survives_its_providers_absence(
    town: Town, autojump_clock: Clock, seconds: float
) -> None:
    provider, renter = await pair(town)
    job = await renter.submit()
    await until(lambda: job.purchase.phase is Phase.COUNTERSIGNED)
    assert provider.desk().auction.holds
    await away(town, provider, seconds)
    await granted_soon(job)


@pytest.mark.parametrize("seconds", [0.5, 2.5, 6, 12, 40])
async def test_a_renter_that_was_away_bids_again(town: Town, autojump_clock: Clock, seconds: float) -> None:
    _, renter = await pair(town)
    job = await renter.submit()
    await until(lambda: job.purchase.phase is Phase.WAITING)
    await away(town, renter, seconds)
    await granted_soon(job_of(renter))


async def test_a_provider_that_could_not_be_reached_is_bid_on_when_it_is_back(
    town: Town, autojump_clock: Clock
) -> None:
    provider, renter = await pair(town)
    friends = sorted(provider.network.connected)
    provider.stop()
    job = await renter.submit()
    await until(lambda: job.purchase.rests, "the bid to be given up")
    await trio.sleep(1)
    assert job.purchase.phase is Phase.SEEKING
    provider.load()
    await town.start(provider)
    for friend in friends:
        town.hub.connect(provider.id, friend)
    await granted_soon(job)


@pytest.mark.parametrize("phase", [Phase.BIDDING, Phase.WAITING, Phase.COUNTERSIGNED])
async def test_a_renter_that_was_restarted_dials_the_provider_that_it_deals_with(
    town: Town, autojump_clock: Clock, phase: Phase
) -> None:
    provider, renter = await pair(town)
    job = await renter.submit()
    await until(lambda: job.purchase.phase is phase)
    renter.stop()
    provider.network.forget(renter.id)  # which is behind a NAT, say
    renter.load()
    await town.start(renter)  # its friends are not connected
    await granted_soon(job_of(renter))


async def test_a_renter_that_was_restarted_hears_of_the_receipt(town: Town, autojump_clock: Clock) -> None:
    provider, renter = await pair(town)
    job = await renter.submit()
    await until(lambda: job.purchase.phase is Phase.GRANTED)
    lease = provider.lease_rows()[0].lease
    renter.context.lease_directory(lease).mkdir(parents=True, exist_ok=True)
    renter.stop()
    provider.network.forget(renter.id)
    await provider.leases.say(lease, phase=LeasePhase.COLLECTED, outcome=COMPLETED)
    await trio.sleep(5)
    renter.load()
    await town.start(renter)
    await renter.leases.say(lease, phase=LeasePhase.COLLECTED, outcome=COMPLETED)
    with trio.move_on_after(SOON_S):
        await until(lambda: renter.lease_rows()[0].state == LeaseState.SETTLED)
    assert renter.lease_rows()[0].state == LeaseState.SETTLED


async def test_providers_with_whom_nothing_is_open_are_not_dialled(town: Town, autojump_clock: Clock) -> None:
    provider, renter = await pair(town)
    job = await renter.submit()
    await until(lambda: job.purchase.phase is Phase.GRANTED)
    await renter.market.renter.cancel(job)
    lease = provider.lease_rows()[0].lease
    for side in (renter, provider):
        await side.leases.say(lease, phase=LeasePhase.FAILED, outcome=FailReason.CANCELLED)
    await until(lambda: renter.lease_rows()[0].state == LeaseState.SETTLED and not renter.market.jobs.by_id)
    renter.stop()
    provider.network.forget(renter.id)
    renter.load()
    await town.start(renter)
    await trio.sleep(60)
    assert not renter.network.connected


async def test_a_lapsed_award_is_told_to_its_renter(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    renter = town.by_hand()
    award = await renter.win(provider)
    (told,) = await until(lambda: renter.of(BidRejected), "the rejection")
    assert (told.record.bid_id, told.record.reason) == (award.record.bid_id, RejectReason.HOLD_LAPSED)
    assert told.record.retry_at == provider.desk().auction.lapses[0].blocked_until


async def test_a_restarted_provider_blames_nobody_for_what_it_missed(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    renter = town.by_hand()
    await renter.win(provider)
    await away(town, provider, HOLD_MS / 1000 + 1)
    await until(lambda: renter.of(BidRejected), "the rejection")
    assert not provider.desk().auction.lapses
    answer = await renter.send(provider, renter.bid(provider))
    assert isinstance(answer.record, BidAck)


# --- leases that nobody wants -------------------------------------------------------------------------------


async def test_a_refused_grant_frees_the_devices(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    renter = town.by_hand()
    award = await renter.win(provider)
    renter.answers[GrantDelivery] = lambda letter: Refusal(of=letter.id, reason="not_wanted")
    await renter.send(provider, renter.countersignature(award))
    lease = award.record.lease
    await until(lambda: provider.leases.cancelled == [(lease, FailReason.CANCELLED)], "the lease to be cancelled")
    await provider.leases.say(lease, phase=LeasePhase.FAILED, outcome=FailReason.CANCELLED)
    await until(lambda: free_units(provider.desk().auction), "the device to be free")


async def test_a_grant_that_is_taken_ends_nothing(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    renter = town.by_hand()
    await renter.buy(provider)
    await trio.sleep(1)
    assert not provider.leases.cancelled


async def test_the_receipt_of_a_lease_that_was_given_up_is_accepted_when_it_costs_nothing(
    town: Town, autojump_clock: Clock
) -> None:
    renter = await town.renter()
    provider = town.seller_by_hand()
    await trio.sleep(0.1)
    offer = await provider.publish()
    job = await renter.submit()
    bid = (await until(lambda: provider.of(Bid), "the bid"))[0]
    award = provider.award(bid, offer)
    assert isinstance(await provider.tell(renter, award), Ack)
    signed = (await until(lambda: provider.of(Countersignature), "the countersignature"))[0]
    free, costly = (seal(a_receipt(award, bid, signed, amount), provider.signer, NETWORK) for amount in (0, 1))
    assert (await provider.tell(renter, free)).reason == "not_yet"
    await until(lambda: job.purchase.phase is not Phase.COUNTERSIGNED, "the purchase to give up")
    assert (await provider.tell(renter, costly)).reason == "disputed"
    assert isinstance(await provider.tell(renter, free), ReceiptAcceptance)
    assert [row.state for row in renter.lease_rows() if row.lease == award.record.lease] == [LeaseState.SETTLED]


def a_receipt(award: Sealed[Award], bid: Sealed[Bid], signed: Sealed[Countersignature], amount: int) -> Receipt:
    return Receipt(
        lease=award.record.lease,
        provider=award.signer,
        renter=bid.signer,
        countersignature_id=signed.id,
        job_hash=bid.record.job_hash,
        outcome=FailReason.CANCELLED,
        exit_status=-1,
        started_at=0,
        ended_at=award.record.holds_until,
        metered_ms=0,
        price=award.record.price,
        quantity=award.record.quantity,
        amount=amount,
        voucher_amount=amount,
        voucher_number=0,
        simulated=award.record.simulated,
    )


# --- keepers that were not told -----------------------------------------------------------------------------


async def settled_lease(town: Town, role: str) -> tuple[MarketNode, Path]:
    """Let a lease be settled; return the node of that role, and the lease's directory, which is still there."""
    provider, renter = await pair(town)
    job = await renter.submit()
    await until(lambda: job.purchase.phase is Phase.GRANTED)
    lease = provider.lease_rows()[0].lease
    for side in (renter, provider):
        await side.leases.say(lease, phase=LeasePhase.COLLECTED, outcome=COMPLETED)
    both = (provider, renter)
    await until(
        lambda: {side.lease_rows()[0].state for side in both} == {LeaseState.SETTLED},
        "the receipt's two signatures",
    )
    await until(lambda: provider.lease_rows()[0].released_at and not renter.market.jobs.by_id, "the job's end")
    node = provider if role == "provider" else renter
    directory = node.context.lease_directory(lease)
    directory.mkdir(parents=True, exist_ok=True)
    return node, directory


@pytest.mark.parametrize("role", ["provider", "renter"])
async def test_a_daemon_that_died_before_its_keeper_had_settled_tells_it_so(
    town: Town, autojump_clock: Clock, role: str
) -> None:
    node, directory = await settled_lease(town, role)
    await town.restart(node)
    await until(lambda: bytes.fromhex(directory.name) in node.leases.settled, "the keeper to be told")


async def test_a_provider_follows_no_lease_that_is_cleared_away(town: Town, autojump_clock: Clock) -> None:
    node, directory = await settled_lease(town, "provider")
    directory.rmdir()
    await town.restart(node)
    assert not node.leases.live


async def test_a_renter_follows_no_keeper_that_has_settled(town: Town, autojump_clock: Clock) -> None:
    node, directory = await settled_lease(town, "renter")
    status = node.leases.live[bytes.fromhex(directory.name)].status
    assert status is not None
    write_status(directory, msgspec.structs.replace(status, phase=LeasePhase.SETTLED))
    await town.restart(node)
    assert not node.leases.live
