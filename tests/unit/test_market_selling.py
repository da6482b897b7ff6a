"""A provider's answers to bids and countersignatures: over the wire, from its database, through restarts."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from support.market_nodes import HandRenter, MarketNode, Town, a_device, open_town, until
from support.memory_network import Faults
from trio.abc import Clock

from node.errors import PeerRefused
from node.market.leases import LeaseState
from node.store import PeerRow
from protocol.machines.auction_types import HOLD_MS
from protocol.machines.lease import COMPLETED, FailReason, LeasePhase
from protocol.records import (
    Ack,
    Award,
    BidAck,
    BidRejected,
    Receipt,
    Refusal,
    RejectReason,
    Release,
)
from protocol.records.lease import GENESIS, CommittedTerms, grant_commitment
from protocol.units import MINUTE_MS


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with open_town(tmp_path) as town:
        yield town


async def refused(renter: HandRenter, seller: MarketNode, **fields: object) -> BidRejected:
    answer = (await renter.send(seller, renter.bid(seller, **fields))).record
    assert isinstance(answer, BidRejected), answer
    return answer


# --- bids ---------------------------------------------------------------------------------------------------


async def test_a_bid_heard_twice_gets_the_very_same_answer(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    renter = town.by_hand()
    bid = renter.bid(provider)
    first = await renter.send(provider, bid)
    await trio.sleep(0.2)
    again = await renter.send(provider, bid)
    assert isinstance(first.record, BidAck)
    assert again.data == first.data
    await until(lambda: renter.of(Award))
    await trio.sleep(HOLD_MS / 1000)
    assert (await renter.send(provider, bid)).data == first.data
    await trio.sleep(5)
    assert len(renter.of(Award)) == 1


async def test_two_copies_of_a_bid_at_the_same_moment_are_one_bid(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    town.hub.faults = Faults(delay_min_ms=5, delay_max_ms=5)
    renter = town.by_hand()
    bid = renter.bid(provider)
    answers: list[bytes] = []

    async def send() -> None:
        answers.append((await renter.send(provider, bid)).data)

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(send)
    assert len(set(answers)) == 1
    await until(lambda: renter.of(Award))
    assert len(renter.of(Award)) == 1


async def test_a_bid_answered_before_a_restart_is_answered_alike_after_it(
    town: Town, autojump_clock: Clock
) -> None:
    provider = await town.provider()
    renter = town.by_hand()
    bid = renter.bid(provider)
    first = await renter.send(provider, bid)
    await town.restart(provider)
    assert (await renter.send(provider, bid)).data == first.data
    award = await until(lambda: renter.of(Award))
    assert award[0].record.bid_id == bid.id


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"offer_id": bytes(32)}, RejectReason.STALE_OFFER),
        ({"addressee": bytes(32)}, RejectReason.WRONG_PROVIDER),
        ({"price": 100_000}, RejectReason.PRICE_TOO_LOW),
        ({"quantity": 2}, RejectReason.TERMS),
        ({"isolation": "gvisor"}, RejectReason.TERMS),
        ({"max_spend": 2 * 10**9}, RejectReason.CREDIT),
    ],
)
async def test_a_bid_that_will_not_do_is_refused_over_the_wire(
    town: Town, autojump_clock: Clock, fields: dict[str, object], reason: RejectReason
) -> None:
    provider = await town.provider()
    rejection = await refused(town.by_hand(), provider, **fields)
    assert rejection.reason is reason
    assert rejection.price_now == 438_888


@pytest.mark.parametrize(
    ("off_ms", "reason", "detail"),
    [
        (10 * MINUTE_MS, RejectReason.CLOCK_SKEW, "the renter's clock is 9m 59s ahead of the provider's"),
        (-10 * MINUTE_MS, RejectReason.EXPIRED, "signed 10m 00s ago by the provider's clock"),
    ],
)
async def test_a_clock_that_is_ten_minutes_off_is_named_as_the_reason(
    town: Town, autojump_clock: Clock, off_ms: int, reason: RejectReason, detail: str
) -> None:
    provider = await town.provider()
    renter = town.by_hand()
    now = provider.clock.now() + off_ms
    rejection = await refused(renter, provider, signed_at=now, expires_at=now + 10_000)
    assert rejection.reason is reason
    assert detail in rejection.detail


async def test_a_listing_that_is_not_there_is_a_stale_offer(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    renter = town.by_hand()
    bid = renter.bid(provider).record
    fields = {name: getattr(bid, name) for name in bid.__struct_fields__} | {"listing": "h100"}
    answer = await renter.ask(provider, type(bid)(**fields))
    assert isinstance(answer, BidRejected)
    assert answer.reason is RejectReason.STALE_OFFER


async def test_a_record_signed_by_another_than_the_caller_is_refused(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    renter, thief = town.by_hand(21), town.by_hand(22)
    with pytest.raises(PeerRefused):
        await thief.send(provider, renter.bid(provider))
    with pytest.raises(PeerRefused):
        await thief.network.request(provider.id, "trade/1", b"\x00" * 50)


async def test_a_message_that_belongs_nowhere_is_refused_politely(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    answer = await town.by_hand().ask(provider, Ack(of=bytes(32)))
    assert isinstance(answer, Refusal)
    assert answer.reason == "unexpected"


# --- countersignatures --------------------------------------------------------------------------------------


async def test_a_countersigned_award_becomes_a_grant_that_its_renter_can_check(
    town: Town, autojump_clock: Clock
) -> None:
    provider = await town.provider(devices=2)
    renter = town.by_hand()
    award = await renter.buy(provider, quantity=2)
    (grant,) = renter.grants()
    (row,) = provider.lease_rows()
    terms = CommittedTerms(salt=row.salt, renter=renter.signer.node, price=award.record.price, job_hash=bytes(32))
    assert grant.commitment == grant_commitment(terms)
    assert [(entry.key, entry.number, entry.previous) for entry in grant.entries] == [
        (head.key, 0, GENESIS) for head in award.record.devices
    ]
    assert row.state == LeaseState.GRANTED
    lease_file, keys = provider.leases.begun[award.record.lease]
    assert (lease_file.price, lease_file.quantity, lease_file.until) == (row.price, 2, award.record.until)
    assert keys.voucher is None
    assert provider.read(lambda tx: tx.lease_secrets.count()) == 0


async def test_a_late_countersignature_is_refused_and_the_exposure_is_gone(
    town: Town, autojump_clock: Clock
) -> None:
    provider = await town.provider()
    renter = town.by_hand()
    award = await renter.win(provider, max_spend=10**9)
    await until(lambda: not provider.desk().auction.holds)
    answer = (await renter.send(provider, renter.countersignature(award))).record
    assert isinstance(answer, Refusal)
    assert answer.reason == "hold_lapsed"
    assert provider.lease_rows()[0].state == LeaseState.LAPSED
    other = town.by_hand(22)
    assert await other.win(provider, max_spend=10**9)


async def test_only_the_renter_can_countersign_and_only_its_own_award(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider(devices=2)
    renter, thief = town.by_hand(21), town.by_hand(22)
    award = await renter.win(provider)
    for who, fields in ((thief, {}), (renter, {"award_id": bytes(32)}), (renter, {"lease": bytes(16)})):
        answer = (await who.send(provider, who.countersignature(award, **fields))).record
        assert isinstance(answer, Refusal)
        assert answer.reason == "unknown_award"
    assert provider.read(lambda tx: tx.records.count("kind = 'countersignature'")) == 0
    assert isinstance((await renter.send(provider, renter.countersignature(award))).record, Ack)
    answer = (await thief.send(provider, thief.countersignature(award))).record
    assert isinstance(answer, Refusal)


async def test_countersigning_again_and_again_fills_no_disk(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    renter = town.by_hand()
    award = await renter.buy(provider)
    for number in range(20):
        answer = await renter.send(provider, renter.countersignature(award, signed_at=number))
        assert isinstance(answer.record, Ack)
    assert provider.read(lambda tx: tx.records.count("kind = 'countersignature'")) == 1
    assert len(renter.grants()) == 1


async def test_a_sold_device_is_awarded_to_nobody_else(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    first, second = town.by_hand(21), town.by_hand(22)
    award = await first.buy(provider)
    rejection = await refused(second, provider)
    assert rejection.reason is RejectReason.SOLD_OUT
    assert rejection.retry_at == award.record.until
    await town.restart(provider)
    assert (await refused(second, provider)).reason is RejectReason.SOLD_OUT
    assert len(second.of(Award)) == 0


async def test_a_device_goes_on_sale_again_when_its_job_is_gone_from_it(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    first, second = town.by_hand(21), town.by_hand(22)
    award = await first.buy(provider)
    provider.source.change(0, processes=(4711,), memory_used_mib=30_000)
    await provider.leases.say(award.record.lease, phase=LeasePhase.COLLECTING)
    await trio.sleep(10)
    assert (await refused(second, provider)).reason is RejectReason.SOLD_OUT
    provider.source.change(0, processes=(), memory_used_mib=0)
    await until(lambda: first.of(Release), "the release")
    release = first.of(Release)[0].record
    grant = first.grants()[0]
    assert release.lease == award.record.lease
    assert [entry.number for entry in release.entries] == [1]
    assert grant.entries[0].key == release.entries[0].key
    assert (await second.win(provider)).record.devices[0].number == 2


async def test_a_keeper_that_does_not_start_frees_the_device_and_is_not_started_again(
    town: Town, autojump_clock: Clock
) -> None:
    provider = town.build(1, a_device())
    provider.leases.starts_well = False
    await town.start(provider)
    renter = town.by_hand()
    award = await renter.win(provider)
    await renter.send(provider, renter.countersignature(award))
    rejection = (await until(lambda: renter.of(BidRejected)))[0].record
    assert rejection.reason is RejectReason.PROVIDER_FAILED
    assert not provider.desk().auction.leases
    assert provider.lease_rows()[0].state == LeaseState.LAPSED
    await town.restart(provider)
    await trio.sleep(1)
    assert not provider.leases.begun


async def test_a_keeper_that_comes_up_too_late_is_ended_however_long_it_takes(
    town: Town, autojump_clock: Clock
) -> None:
    provider = town.build(1, a_device())
    provider.leases.starts_well = False
    await town.start(provider)
    renter = town.by_hand()
    award = await renter.win(provider)
    lease = award.record.lease
    await renter.send(provider, renter.countersignature(award))
    await until(lambda: provider.lease_rows()[0].state == LeaseState.LAPSED)
    before = len(provider.leases.cancelled)
    await provider.leases.say(lease, port=4242)
    assert provider.leases.cancelled[before:] == [(lease, FailReason.SANDBOX_FAILED)]
    await provider.leases.say(lease, phase=LeasePhase.FAILED, outcome=FailReason.SANDBOX_FAILED.value)
    assert provider.leases.settled == [lease]
    assert not renter.grants()


async def test_a_countersigned_lease_is_started_by_the_next_daemon(town: Town, autojump_clock: Clock) -> None:
    provider = town.build(1, a_device())
    provider.leases.starts_well = False
    await town.start(provider)
    renter = town.by_hand()
    award = await renter.win(provider)
    await renter.send(provider, renter.countersignature(award))
    await town.restart(provider)
    await until(renter.grants, "the grant")
    assert renter.grants()[0].lease == award.record.lease


async def test_a_full_disk_at_the_grant_delays_it_and_ends_nothing(town: Town, autojump_clock: Clock) -> None:
    provider = town.build(1, a_device())
    provider.leases.starts_well = False
    await town.start(provider)
    renter = town.by_hand()
    award = await renter.win(provider)
    await renter.send(provider, renter.countersignature(award))
    await until(lambda: provider.leases.live)
    live = provider.leases.live[award.record.lease]
    provider.store.is_full = True
    with pytest.raises(Exception, match="disk is full"):
        await provider.leases.say(award.record.lease, port=4242)
    assert live.status is not None
    await trio.sleep(5)
    assert not renter.grants()
    provider.store.is_full = False
    await until(renter.grants, "the grant")


async def test_a_full_disk_at_the_release_delays_it(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    renter = town.by_hand()
    award = await renter.buy(provider)
    provider.source.change(0, processes=(4711,))
    await provider.leases.say(award.record.lease, phase=LeasePhase.COLLECTING)
    await trio.sleep(2)
    provider.store.is_full = True
    provider.source.change(0, processes=())
    await trio.sleep(5)
    assert not renter.of(Release)
    provider.store.is_full = False
    await until(lambda: renter.of(Release), "the release")


# --- offers -------------------------------------------------------------------------------------------------


async def test_an_offer_is_out_again_as_soon_as_the_daemon_is(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    before = provider.desk().auction.sequence
    await trio.sleep(60)
    await town.restart(provider)
    assert provider.desk().auction.sequence > before
    assert provider.desk().offer is not None
    renter = await town.renter()
    town.hub.connect_all()
    await until(lambda: list(renter.market.book.live_offers(renter.clock.now())), "the offer")


async def test_an_offer_that_was_not_written_is_told_to_nobody(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    before = provider.desk().offer
    provider.store.is_full = True
    provider.source.devices.append(a_device(1))
    await trio.sleep(12)
    assert provider.desk().offer == before
    provider.store.is_full = False
    await until(lambda: provider.desk().offer != before, "the offer of two devices")


async def test_the_last_gpu_may_vanish_and_come_back_with_its_chain(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    renter = town.by_hand()
    award = await renter.buy(provider)
    await provider.leases.say(award.record.lease, phase=LeasePhase.COLLECTED, outcome=COMPLETED)
    await until(lambda: renter.of(Release))
    (gone,) = provider.source.devices
    provider.source.devices = []
    await until(lambda: not provider.desk().auction.units, "the device to be missed")
    await trio.sleep(MINUTE_MS / 1000)
    provider.source.devices = [gone]
    await until(lambda: provider.desk().auction.units, "the device to be back")
    assert (await renter.win(provider)).record.devices[0].number == 2


async def test_a_device_that_changes_its_listing_takes_its_chain_along(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    renter = town.by_hand()
    award = await renter.buy(provider)
    await provider.leases.say(award.record.lease, phase=LeasePhase.COLLECTED, outcome=COMPLETED)
    await until(lambda: renter.of(Release))
    provider.source.change(0, memory_mib=38_000)  # ECC was switched on
    await until(lambda: len(provider.market.seller.auctions) == 2, "the other listing")
    (other,) = [name for name in provider.market.seller.auctions if not name.endswith("40g")]
    await until(lambda: provider.desk(other).auction.recent_offers)
    assert (await renter.win(provider, listing=other)).record.devices[0].number == 2


async def test_a_leased_device_is_not_sold_in_another_listing(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    renter = town.by_hand()
    await renter.buy(provider)
    provider.source.change(0, memory_mib=38_000)
    await trio.sleep(20)
    for name, desk in provider.market.seller.auctions.items():
        assert provider.market.seller.free_of(desk) == 0, name


# --- credit -------------------------------------------------------------------------------------------------


async def test_all_strangers_share_one_bucket(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider(devices=3)
    first, second = town.by_hand(21), town.by_hand(22)
    await first.buy(provider, max_spend=7 * 10**8)
    rejection = await refused(second, provider, max_spend=4 * 10**8)
    assert rejection.reason is RejectReason.CREDIT
    price = provider.desk().auction.curve.start
    seconds = 3 * 10**8 // price
    assert f"$0.300000 of credit left with this provider, which buys {seconds // 60}m" in rejection.detail
    await second.buy(provider, max_spend=3 * 10**8)
    assert (await refused(second, provider, max_spend=2 * 10**7)).reason is RejectReason.CREDIT


async def test_bids_that_wait_for_an_award_count_against_the_bucket(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider(devices=8)
    people = [town.by_hand(20 + number) for number in range(1, 6)]
    answers: list[object] = []

    async def bid(renter: HandRenter) -> None:
        answers.append((await renter.send(provider, renter.bid(provider, max_spend=4 * 10**8))).record)

    async with trio.open_nursery() as nursery:
        for renter in people:
            nursery.start_soon(bid, renter)
    assert sorted(type(answer).__name__ for answer in answers) == ["BidAck"] * 2 + ["BidRejected"] * 3


async def test_a_named_peer_has_a_limit_of_its_own_over_all_listings(town: Town, autojump_clock: Clock) -> None:
    provider = await town.start(
        town.build(1, a_device(), a_device(1, model="NVIDIA H100 PCIe", memory_mib=81_920))
    )
    renter, stranger = town.by_hand(21), town.by_hand(22)
    provider.read(lambda tx: tx.peers.put(PeerRow(node=renter.signer.node, label="friend", credit_limit=10**9)))
    one, other = provider.market.seller.auctions
    answer = await renter.send(provider, renter.bid(provider, listing=one, max_spend=6 * 10**8))
    assert isinstance(answer.record, BidAck)
    rejection = await refused(renter, provider, listing=other, max_spend=6 * 10**8)
    assert rejection.reason is RejectReason.CREDIT
    bid = stranger.bid(provider, listing=other, max_spend=10**9)
    assert isinstance((await stranger.send(provider, bid)).record, BidAck)


async def test_a_window_that_nobody_paid_for_is_gone_from_the_bucket_for_good(
    town: Town, autojump_clock: Clock
) -> None:
    provider = await town.provider(stranger_credit=10**8)
    thief, next_thief = town.by_hand(21), town.by_hand(22)
    award = await thief.buy(provider, max_spend=10**8)
    await provider.leases.say(
        award.record.lease, phase=LeasePhase.FAILED, outcome=FailReason.UNPAID.value, metered_ms=30_000
    )
    await until(lambda: thief.of(Release) and thief.of(Receipt))
    taken = award.record.price * 30
    rejection = await refused(next_thief, provider, max_spend=10**8 - taken + 1)
    assert rejection.reason is RejectReason.CREDIT
    assert await next_thief.win(provider, max_spend=10**8 - taken)
    assert thief.of(Receipt)[0].record.amount == 0


async def test_a_cap_below_the_first_window_buys_nothing(town: Town, autojump_clock: Clock) -> None:
    provider = await town.provider()
    renter = town.by_hand()
    rejection = await refused(renter, provider, max_spend=0)
    assert rejection.reason is RejectReason.TERMS
    price = provider.desk().auction.curve.start
    assert rejection.detail == (
        "a spending cap of $0.000000; the first window before vouchers are due costs $0.013166"
    )
    assert isinstance((await renter.send(provider, renter.bid(provider, max_spend=price * 30))).record, BidAck)
