"""A renter's purchases against providers that keep their word, break it, or fall silent; and through restarts."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from support.market_nodes import (
    UID,
    HandProvider,
    MarketNode,
    Town,
    a_spec,
    open_town,
    until,
)
from support.signers import NETWORK, signer
from trio.abc import Clock

from node.errors import BadArgument
from node.market.jobspec import SpecOutput
from node.market.leases import LeaseState
from node.market.live_job import ENDED, LEASED, LiveJob
from node.store import LeaseSecretRow, Transaction
from protocol.envelope import Sealed, open_untrusted, seal
from protocol.machines.lease import COMPLETED, FailReason, LeasePhase
from protocol.machines.purchase import GRANT_MS, Phase
from protocol.records import (
    Ack,
    Award,
    Bid,
    BidRejected,
    Countersignature,
    Offer,
    Refusal,
    RejectReason,
    Terms,
)


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with open_town(tmp_path) as town:
        yield town


class Deal:
    """A job whose bid has just reached a provider that the test plays."""

    def __init__(
        self, provider: HandProvider, renter: MarketNode, job: LiveJob, bid: Sealed[Bid], offer: Sealed[Offer]
    ) -> None:
        self.provider = provider
        self.renter = renter
        self.job = job
        self.bid = bid
        self.offer = offer

    async def tell(self, letter: Sealed[Any]) -> Any:
        return await self.provider.tell(self.renter, letter)

    def award(self, **fields: Any) -> Sealed[Award]:
        return self.provider.award(self.bid, self.offer, **fields)

    async def countersigned(self, award: Sealed[Award]) -> Sealed[Countersignature]:
        assert isinstance(await self.tell(award), Ack)
        return (await until(lambda: self.provider.of(Countersignature), "the countersignature"))[-1]


async def open_deal(town: Town, **job: Any) -> Deal:
    renter = await town.renter()
    provider = town.seller_by_hand()
    await trio.sleep(0.1)
    offer = await provider.publish()
    submitted = await renter.submit(**job)
    bid = (await until(lambda: provider.of(Bid), "the bid"))[0]
    return Deal(provider, renter, submitted, bid, offer)


# --- bids ---------------------------------------------------------------------------------------------------


async def test_a_bid_says_what_the_job_needs_and_no_more_than_its_caps(town: Town, autojump_clock: Clock) -> None:
    deal = await open_deal(town, max_spend=10**8)
    bid = deal.bid.record
    assert bid.offer_id == deal.offer.id
    assert bid.provider == deal.provider.signer.node
    assert bid.price <= deal.job.spec.max_price
    assert bid.max_spend == 10**8
    assert bid.expires_at - bid.signed_at == 10_000
    secret = deal.renter.read(lambda tx: next(tx.lease_secrets.all()))
    assert secret.voucher is not None
    assert len({bid.tunnel_key, bid.voucher_key, deal.renter.id}) == 3


async def test_a_provider_that_falls_silent_loses_the_deal_to_another(town: Town, autojump_clock: Clock) -> None:
    deal = await open_deal(town)
    other = await town.provider(1)
    town.hub.connect(other.id, deal.renter.id)
    await until(lambda: deal.job.purchase.phase is Phase.GRANTED, "the lease of the other one")
    assert deal.job.purchase.bid is not None
    assert deal.job.purchase.bid.provider == other.id
    late = deal.award()
    answer = await deal.tell(late)
    assert isinstance(answer, Refusal)
    assert answer.reason == "not_wanted"
    assert len(deal.renter.leases.begun) == 1


async def test_a_stale_offer_is_replaced_by_asking_its_provider(town: Town, autojump_clock: Clock) -> None:
    provider, renter = await town.provider(), await town.renter()
    town.hub.connect_all()
    await until(lambda: list(renter.market.book.live_offers(renter.clock.now())), "the offer")
    town.hub.partition({provider.id})
    for _ in range(20):
        await provider.market.seller.refresh_offers()
    await trio.sleep(1)
    town.hub.heal()
    job = await renter.submit()
    await until(lambda: job.purchase.phase is Phase.GRANTED, "the lease")
    assert job.purchase.attempts == 2


async def test_a_rejection_of_somebody_else_changes_nothing(town: Town, autojump_clock: Clock) -> None:
    deal = await open_deal(town)
    stranger = town.seller_by_hand(32)
    rejection = BidRejected(bid_id=deal.bid.id, reason=RejectReason.TERMS, price_now=0)
    await until(lambda: deal.job.purchase.phase is Phase.WAITING)
    await stranger.tell(deal.renter, sealed_by(32, rejection))
    assert deal.job.purchase.phase is Phase.WAITING
    await deal.tell(sealed_by(31, rejection))
    assert deal.job.purchase.phase is not Phase.WAITING


def sealed_by(person: int, record: Any) -> Sealed[Any]:
    return seal(record, signer(person), NETWORK)


# --- awards -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason", "detail"),
    [
        ({"price": 10**9}, "price", ""),
        ({"terms": Terms(notice_ms=1)}, "terms", "the award's terms are not the offer's"),
        ({"quantity": 2}, "terms", "the award is for another number of devices"),
        ({"lease": bytes(16)}, "terms", "the award is for another lease"),
        ({"simulated": True}, "terms", "the devices are simulated"),
        ({"until": 1_790_000_060_000}, "terms", "the lease would end before its time"),
    ],
)
async def test_an_award_that_is_not_what_was_bid_for_is_not_countersigned(
    town: Town, autojump_clock: Clock, fields: dict[str, Any], reason: str, detail: str
) -> None:
    deal = await open_deal(town)
    answer = await deal.tell(deal.award(**fields))
    assert isinstance(answer, Refusal)
    assert (answer.reason, answer.detail) == (reason, detail)
    await trio.sleep(5)
    assert not deal.provider.of(Countersignature)
    assert deal.job.purchase.rests


async def test_an_award_of_somebody_else_is_not_wanted(town: Town, autojump_clock: Clock) -> None:
    deal = await open_deal(town)
    thief = town.seller_by_hand(32)
    answer = await thief.tell(deal.renter, thief.award(deal.bid, deal.offer))
    assert isinstance(answer, Refusal)
    assert answer.reason == "not_wanted"
    assert deal.job.purchase.phase in (Phase.BIDDING, Phase.WAITING)


async def test_a_second_award_for_the_same_bid_is_not_countersigned(town: Town, autojump_clock: Clock) -> None:
    deal = await open_deal(town)
    await deal.countersigned(deal.award())
    await deal.tell(deal.award(tunnel_key=bytes(31) + b"\1"))
    await trio.sleep(1)
    assert len(deal.provider.of(Countersignature)) == 1


# --- grants -------------------------------------------------------------------------------------------------


async def test_a_grant_starts_the_renters_keeper_once(town: Town, autojump_clock: Clock) -> None:
    deal = await open_deal(town)
    award = deal.award()
    delivery = deal.provider.delivery(award, deal.bid, await deal.countersigned(award))
    assert isinstance(await deal.tell(delivery), Ack)
    await until(lambda: deal.job.lease is not None)
    lease_file, keys = deal.renter.leases.begun[award.record.lease]
    assert lease_file.renter_side is not None
    assert lease_file.renter_side.addresses == ("192.0.2.1:4242",)
    assert lease_file.voucher_key == deal.bid.record.voucher_key
    assert keys.voucher is not None
    assert isinstance(await deal.tell(delivery), Ack)
    assert deal.renter.read(lambda tx: tx.lease_secrets.count("lease = ?", award.record.lease)) == 0


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"signed_by": signer(32)}, "it is signed by somebody else"),
        ({"price": 1}, "it does not commit to the price, renter and job of the award"),
        ({"job_hash": bytes(32)}, "it does not commit to the price, renter and job of the award"),
        ({"countersignature_id": bytes(32)}, "it names another countersignature"),
        ({"entries": "others"}, "it is for other devices"),
        ({"simulated": True}, "it differs from the award on whether the devices are simulated"),
        ({"until": 1_790_000_060_000}, "it ends at another time than the award"),
    ],
)
async def test_a_grant_that_is_not_what_was_awarded_starts_nothing(
    town: Town, autojump_clock: Clock, fields: dict[str, Any], detail: str
) -> None:
    deal = await open_deal(town)
    award = deal.award()
    signed = await deal.countersigned(award)
    if "entries" in fields:
        right = deal.provider.delivery(award, deal.bid, signed)
        fields = {"entries": (msgspec.structs.replace(granted(right).entries[0], key=b"\7" * 32),)}
    answer = await deal.tell(deal.provider.delivery(award, deal.bid, signed, **fields))
    assert isinstance(answer, Refusal)
    assert (answer.reason, answer.detail) == ("not_as_agreed", detail)
    assert deal.job.purchase.phase is Phase.COUNTERSIGNED
    assert not deal.renter.leases.begun


def granted(delivery: Sealed[Any]) -> Any:
    return open_untrusted(delivery.record.grant, NETWORK).record


async def test_a_grant_of_an_unknown_lease_and_one_that_comes_too_late_start_nothing(
    town: Town, autojump_clock: Clock
) -> None:
    deal = await open_deal(town)
    award = deal.award()
    stranger = town.seller_by_hand(32)
    signed = await deal.countersigned(award)
    answer = await stranger.tell(deal.renter, stranger.delivery(award, deal.bid, signed))
    assert isinstance(answer, Refusal)
    assert answer.reason == "unknown_lease"
    await until(lambda: deal.job.purchase.phase is not Phase.COUNTERSIGNED, f"{GRANT_MS} ms to pass")
    answer = await deal.tell(deal.provider.delivery(award, deal.bid, signed))
    assert isinstance(answer, Refusal)
    assert answer.reason == "not_wanted"
    assert not deal.renter.leases.begun


async def test_a_refused_countersignature_is_no_grant(town: Town, autojump_clock: Clock) -> None:
    deal = await open_deal(town)
    deal.provider.answers[Countersignature] = lambda letter: Refusal(
        of=letter.id, reason="hold_lapsed", detail="too late"
    )
    await deal.countersigned(deal.award())
    await until(lambda: deal.job.purchase.phase is not Phase.COUNTERSIGNED)
    assert deal.job.purchase.note == "too late"


# --- the end, and restarts ----------------------------------------------------------------------------------


async def granted_deal(town: Town) -> tuple[Deal, bytes]:
    deal = await open_deal(town)
    award = deal.award()
    await deal.tell(deal.provider.delivery(award, deal.bid, await deal.countersigned(award)))
    await until(lambda: deal.job.lease is not None)
    return deal, award.record.lease


async def test_a_job_ends_with_its_keepers_word_when_no_receipt_comes(town: Town, autojump_clock: Clock) -> None:
    deal, lease = await granted_deal(town)
    await deal.renter.leases.say(lease, phase=LeasePhase.COLLECTED, outcome=COMPLETED, exit_status=0)
    await until(lambda: deal.job.row.state == ENDED)
    assert (deal.job.row.outcome, deal.job.row.id in deal.renter.market.jobs.by_id) == (COMPLETED, False)
    (row,) = deal.renter.lease_rows()
    assert row.state == LeaseState.OVER


async def test_a_job_cancelled_before_it_has_a_lease_is_over_and_stays_so(
    town: Town, autojump_clock: Clock
) -> None:
    deal = await open_deal(town)
    await deal.renter.market.renter.cancel(deal.job)
    assert (deal.job.row.state, deal.job.row.outcome) == (ENDED, FailReason.CANCELLED.value)
    assert isinstance(await deal.tell(deal.award()), Refusal)
    await town.restart(deal.renter)
    assert not deal.renter.market.jobs.by_id


async def test_a_cancellation_that_was_cut_short_is_finished_by_the_next_daemon(
    town: Town, autojump_clock: Clock
) -> None:
    deal = await open_deal(town)
    await deal.renter.market.buyer.cancel(deal.job)  # killed before the job's end was written
    await town.restart(deal.renter)
    await until(lambda: not deal.renter.market.jobs.by_id)
    (row,) = deal.renter.read(lambda tx: list(tx.jobs.all()))
    assert (row.state, row.outcome) == (ENDED, FailReason.CANCELLED.value)


async def test_a_job_cancelled_while_its_keeper_starts_is_cancelled_there(
    town: Town, autojump_clock: Clock
) -> None:
    deal = await open_deal(town)
    award = deal.award()
    signed = await deal.countersigned(award)
    begin = deal.renter.leases.begin

    async def begin_slowly(*args: Any) -> Any:
        await trio.sleep(3)
        return await begin(*args)

    deal.renter.leases.begin = begin_slowly  # type: ignore[method-assign]
    await deal.tell(deal.provider.delivery(award, deal.bid, signed))
    await deal.renter.market.renter.cancel(deal.job)
    assert deal.renter.leases.cancelled == [(award.record.lease, FailReason.CANCELLED)]
    assert deal.job.row.state == LEASED


async def test_a_purchase_goes_on_where_the_last_daemon_left_it(town: Town, autojump_clock: Clock) -> None:
    deal = await open_deal(town)
    award = deal.award()
    signed = await deal.countersigned(award)
    await town.restart(deal.renter)
    job = deal.renter.market.jobs.by_id[deal.job.row.id]
    assert job.purchase.phase is Phase.COUNTERSIGNED
    assert isinstance(await deal.tell(deal.provider.delivery(award, deal.bid, signed)), Ack)
    await until(lambda: award.record.lease in deal.renter.leases.begun)


async def test_a_grant_whose_keeper_was_not_started_is_started_by_the_next_daemon(
    town: Town, autojump_clock: Clock
) -> None:
    deal, lease = await granted_deal(town)
    # The daemon was killed after the grant was written and before the directory was: its secrets are there still.
    secret = deal.renter.leases.begun[lease][1]
    deal.renter.read(lambda tx: put_secret(tx, lease, secret.tunnel, secret.voucher or b""))
    await town.restart(deal.renter)
    await until(lambda: lease in deal.renter.leases.begun)
    assert deal.renter.leases.begun[lease][1] == secret


def put_secret(tx: Transaction, lease: bytes, tunnel: bytes, voucher: bytes) -> None:
    tx.lease_secrets.put(LeaseSecretRow(lease=lease, tunnel=tunnel, voucher=voucher, expires_at=2**60))


async def test_an_earlier_attempt_does_not_end_a_running_job_at_a_restart(
    town: Town, autojump_clock: Clock
) -> None:
    deal, lease = await granted_deal(town)
    (row,) = deal.renter.lease_rows()
    failed = msgspec.structs.replace(
        row, lease=bytes(16), state=LeaseState.COUNTERSIGNED, bid_id=bytes(32), award_id=bytes(32),
    )  # fmt: skip
    deal.renter.read(lambda tx: tx.leases.put(failed))
    (deal.renter.context.lease_directory(lease)).mkdir(parents=True)
    await town.restart(deal.renter)
    await trio.sleep(1)
    job = deal.renter.market.jobs.by_id[deal.job.row.id]
    assert job.row.state == LEASED
    assert job.lease is not None
    assert job.lease.row.lease == lease


async def test_a_full_disk_delays_a_purchase_and_ends_nothing(town: Town, autojump_clock: Clock) -> None:
    renter = await town.renter()
    provider = town.seller_by_hand()
    job = await renter.submit()
    renter.store.is_full = True
    await trio.sleep(0.1)
    await provider.publish()
    await trio.sleep(5)
    assert not provider.of(Bid)
    renter.store.is_full = False
    await until(lambda: provider.of(Bid))
    assert job.purchase.phase in (Phase.BIDDING, Phase.WAITING)


async def test_a_full_disk_at_the_end_of_a_job_delays_it(town: Town, autojump_clock: Clock) -> None:
    deal, lease = await granted_deal(town)
    await deal.renter.leases.say(lease, phase=LeasePhase.COLLECTED, outcome=COMPLETED, exit_status=0)
    deal.renter.store.is_full = True
    await trio.sleep(30)
    assert deal.job.row.state == LEASED
    deal.renter.store.is_full = False
    await until(lambda: deal.job.row.state == ENDED)


async def test_a_job_too_large_to_be_read_again_is_not_taken(town: Town, autojump_clock: Clock) -> None:
    renter = await town.renter()
    for spec in (
        a_spec(command=("x" * 100_000,) * 11),
        a_spec(command=tuple(str(number) for number in range(30_000))),
        a_spec(outputs=tuple(SpecOutput("out", "/" + "o" * 4000) for _ in range(300))),
    ):
        with pytest.raises(BadArgument, match="too large"):
            await renter.market.buyer.submit(spec, "", UID, UID)
    assert renter.read(lambda tx: tx.jobs.count()) == 0
