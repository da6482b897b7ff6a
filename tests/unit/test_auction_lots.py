"""From a batch to a release: who is served, at what price, and what becomes of everybody else."""

import msgspec
import pytest
from support.auctions import (
    OFFER,
    PROVIDER,
    SECRET,
    Table,
    a_bid,
    a_listing,
    an_auction,
    key,
    renter,
)
from support.offers import NOW, a_curve

from protocol import codec
from protocol.envelope import content_id_of
from protocol.identity import hash_bytes, lease_id
from protocol.machines.auction import BACKOFF_BASE_MS, is_sound, next_time
from protocol.machines.auction_types import (
    HOLD_MS,
    WAITING_BIDS_MAX,
    Acknowledge,
    Auction,
    CountersignatureReceived,
    EpochOpened,
    ForgetLease,
    Hold,
    KeeperFailed,
    KeeperReady,
    LeaseEnded,
    LeasePhase,
    ListingChanged,
    OfferRefreshed,
    PauseChanged,
    PublishOffer,
    RefuseCountersignature,
    Reject,
    Repriced,
    Resumed,
    SendAward,
    SendGrant,
    SendRelease,
    StartKeeper,
    Unit,
    WithdrawOffer,
    free_units,
    offer_of,
)
from protocol.machines.clearing import lottery_commitment, lottery_rank
from protocol.pricing import clock_price
from protocol.records import RejectReason
from protocol.records.lease import GENESIS
from protocol.units import MINUTE_MS, Millis

COMMITMENT = hash_bytes(b"commitment")


def sold(table: Table, number: int, **fields: int) -> bytes:
    """Let renter `number` buy alone, and return its lease, granted."""
    table.bid(number, **fields)
    table.close_batch()
    lease = table.of(SendAward)[-1].hold.lease
    table.countersign(lease)
    table.apply(KeeperReady(lease, COMMITMENT))
    return lease


# --- batches ------------------------------------------------------------------------------------------------


def test_the_first_batch_of_a_fresh_offer_stays_open_for_the_opening_and_later_ones_for_a_tick() -> None:
    table = Table(an_auction(curve=a_curve(opened_at=NOW)))
    table.bid(1)
    assert table.of(Acknowledge)[0].ack.closes_at == NOW + 2000 == next_time(table.auction)
    table.close_batch()
    table.wait(1)
    table.bid(2)
    ack = table.of(Acknowledge)[1].ack
    assert (ack.batch, ack.closes_at) == (2, table.now + 300)


def test_a_batch_that_is_not_due_yet_is_not_closed() -> None:
    table = Table()
    table.bid(1)
    table.wait(299)
    table.tick()
    assert not table.of(SendAward)
    table.wait(1)
    table.tick()
    assert len(table.of(SendAward)) == 1


def test_everyone_is_served_when_there_is_enough_and_the_secret_stays() -> None:
    table = Table(an_auction(devices=3))
    table.bid(1, quantity=2)
    table.bid(2)
    table.close_batch()
    awards = table.of(SendAward)
    assert [award.hold.renter for award in awards] == [renter(1), renter(2)]
    assert [len(award.hold.keys) for award in awards] == [2, 1]
    assert {award.transcript for award in awards} == {None}
    assert table.auction.secret == SECRET
    assert awards[0].hold.lease == lease_id(PROVIDER, renter(1), a_bid(1, quantity=2).nonce)
    assert awards[0].devices == table.heads(0, 1)


def test_a_contended_batch_is_ranked_by_the_committed_secret_which_is_then_replaced() -> None:
    table = Table(an_auction(devices=2))
    people = range(1, 7)
    for number in people:
        table.bid(number)
    table.close_batch()
    ranked = sorted(people, key=lambda number: lottery_rank(SECRET, 1, renter(number)))
    awards = table.of(SendAward)
    assert [award.hold.renter for award in awards] == [renter(number) for number in ranked[:2]]
    transcript = awards[0].transcript
    assert transcript is not None
    assert lottery_commitment(transcript.secret) == lottery_commitment(SECRET)
    bid_ids = [hash_bytes(a_bid(number).nonce) for number in ranked]
    assert transcript.bid_hashes == tuple(hash_bytes(bid_id) for bid_id in bid_ids)
    assert transcript.served == 2
    assert table.auction.secret != SECRET
    assert table.effects[-1] == PublishOffer()  # with the fresh commitment


def test_a_bid_too_large_for_what_is_left_does_not_stop_the_next_in_rank() -> None:
    people = sorted((1, 2, 3), key=lambda number: lottery_rank(SECRET, 1, renter(number)))
    table = Table(an_auction(devices=3))
    for number, quantity in zip(people, (2, 2, 1), strict=True):
        table.bid(number, quantity=quantity)
    table.close_batch()
    assert [award.hold.renter for award in table.of(SendAward)] == [renter(people[0]), renter(people[2])]


def test_a_bid_that_expired_while_nobody_ran_is_told_so_and_not_served() -> None:
    table = Table()
    table.bid(1)
    table.wait(MINUTE_MS)  # the daemon was down
    table.close_batch()
    assert not table.of(SendAward)
    (told,) = [effect.rejection for effect in table.of(Reject)]
    assert (told.reason, told.retry_at) == (RejectReason.EXPIRED, table.now)
    assert len(free_units(table.auction)) == 2


def test_nothing_is_awarded_after_the_owner_has_paused() -> None:
    for people in ((1,), (1, 2, 3)):
        table = Table()
        for number in people:
            table.bid(number)
        table.apply(PauseChanged(paused=True))
        table.close_batch()
        assert not table.of(SendAward)
        assert [effect.rejection.reason for effect in table.of(Reject)] == [RejectReason.PAUSED] * len(people)


def test_nothing_is_awarded_after_the_database_was_found_to_be_old() -> None:
    table = Table()
    table.bid(1)
    table.apply(EpochOpened(1, Millis(NOW + MINUTE_MS)))
    table.close_batch()
    assert not table.of(SendAward)
    rejection = table.of(Reject)[0].rejection
    assert (rejection.reason, rejection.retry_at) == (RejectReason.PAUSED, NOW + MINUTE_MS)


def test_waiting_bids_are_bounded_so_that_the_state_can_always_be_stored() -> None:
    table = Table(an_auction(devices=64))
    number = 0
    for quantity in (33, 17, 9, 5, 3):  # each batch leaves some devices free, so that another may open
        for _ in range(WAITING_BIDS_MAX):
            number += 1
            table.bid(number, quantity=quantity)
        table.close_batch()
    waiting = sum(len(group.bids) for group in table.auction.runners_up)
    assert 0 < waiting <= WAITING_BIDS_MAX
    assert RejectReason.OVERLOADED in {effect.rejection.reason for effect in table.of(Reject)}
    codec.encode(table.auction)


# --- prices -------------------------------------------------------------------------------------------------


def test_a_bid_is_served_at_the_clock_of_its_receipt_when_that_is_below_its_price() -> None:
    table = Table()
    clock = clock_price(table.auction.curve, table.now)
    table.bid(1, price=clock + 1)
    table.bid(2, price=clock - 1)
    table.close_batch()
    assert [award.hold.price for award in table.of(SendAward)] == [clock, clock - 1]


def test_a_sale_or_a_new_price_after_the_receipt_changes_nothing_for_a_waiting_bid() -> None:
    table = Table(an_auction(devices=3))
    table.bid(1)
    table.close_batch()
    clock = clock_price(table.auction.curve, table.now)
    table.bid(2)
    table.countersign(table.auction.holds[0].lease)  # lifts the clock
    table.apply(Repriced(438_888, 438_888))
    assert clock_price(table.auction.curve, table.now) > clock
    table.close_batch()
    assert table.of(SendAward)[-1].hold.price == clock


def test_a_runner_up_is_promoted_at_the_price_of_its_own_batch() -> None:
    table = Table(an_auction(devices=1))
    clock = clock_price(table.auction.curve, table.now)
    table.bid(1)
    table.bid(2)
    table.close_batch()
    assert table.of(SendAward)[0].hold.price == clock
    table.apply(Repriced(438_888, 438_888))
    table.wait(HOLD_MS)
    table.tick()
    first, second = table.of(SendAward)
    assert {first.hold.renter, second.hold.renter} == {renter(1), renter(2)}
    assert second.hold.price == clock
    assert first.transcript == second.transcript is not None


def test_a_lift_comes_with_the_countersignature_and_not_before() -> None:
    table = Table(an_auction(curve=a_curve(opened_at=NOW - 20 * MINUTE_MS)))
    table.bid(1, quantity=2)
    table.close_batch()
    before = clock_price(table.auction.curve, table.now)
    assert table.auction.curve.opened_at == NOW - 20 * MINUTE_MS
    table.countersign(table.auction.holds[0].lease)
    lifted = clock_price(table.auction.curve, table.now)
    assert before * 120 // 100 < lifted <= before * 121 // 100


# --- holds --------------------------------------------------------------------------------------------------


def test_a_lapsed_hold_frees_its_devices_and_its_renter_rests_twice_as_long_each_time() -> None:
    table = Table()
    for lapse in range(1, 4):
        table.bid(1)
        table.close_batch()
        hold = table.auction.holds[0]
        table.wait(HOLD_MS)
        forgotten, told = table.tick()
        wait_ms = BACKOFF_BASE_MS << (lapse - 1)
        (remembered,) = table.auction.lapses
        assert (remembered.count, remembered.blocked_until) == (lapse, table.now + wait_ms)
        assert forgotten == ForgetLease(hold.lease)
        assert isinstance(told, Reject)
        assert (told.renter, told.rejection.bid_id) == (renter(1), hold.bid_id)
        assert told.rejection.reason is RejectReason.HOLD_LAPSED
        assert told.rejection.retry_at == remembered.blocked_until
        table.wait(wait_ms - 1)
        table.bid(1)
        assert table.of(Reject)[-1].rejection.reason is RejectReason.BACKOFF
        table.wait(1)
    assert len(free_units(table.auction)) == 2


def test_who_waited_while_the_provider_was_away_is_told_to_bid_again_and_is_not_blamed() -> None:
    table = Table()
    table.bid(1)
    table.close_batch()
    lapsed = table.auction.holds[0]
    table.bid(2)
    table.wait(HOLD_MS)
    effects = table.apply(Resumed())
    told = {effect.rejection.bid_id: effect for effect in effects if isinstance(effect, Reject)}
    assert effects[0] == ForgetLease(lapsed.lease)
    assert {effect.renter for effect in told.values()} == {renter(1), renter(2)}
    assert lapsed.bid_id in told
    assert {effect.rejection.reason for effect in told.values()} == {RejectReason.PROVIDER_FAILED}
    assert {effect.rejection.retry_at for effect in told.values()} == {table.now}
    assert (table.auction.lapses, table.auction.waiting(), table.auction.holds) == ((), (), ())
    assert next_time(table.auction) is None
    assert isinstance(table.bid(1)[0], Acknowledge)


def test_what_still_runs_outlives_a_restart_of_the_provider() -> None:
    table = Table()
    table.bid(1)
    table.close_batch()
    hold = table.auction.holds[0]
    table.wait(HOLD_MS - 1)
    table.bid(2)
    assert table.apply(Resumed()) == ()
    assert table.countersign(hold.lease)[0] == StartKeeper(hold.lease)
    table.close_batch()
    assert table.of(SendAward)[-1].hold.renter == renter(2)


def test_runners_up_of_a_hold_that_lapsed_meanwhile_bid_again() -> None:
    table = Table(an_auction(devices=1))
    table.bid(1)
    table.bid(2)
    table.close_batch()
    table.wait(HOLD_MS)
    told = [effect for effect in table.apply(Resumed()) if isinstance(effect, Reject)]
    assert {effect.renter for effect in told} == {renter(1), renter(2)}
    assert not table.auction.waiting()


def test_a_countersignature_ends_the_renters_bad_name() -> None:
    table = Table()
    table.bid(1)
    table.close_batch()
    table.wait(HOLD_MS)
    table.tick()
    table.wait(BACKOFF_BASE_MS)
    sold(table, 1)
    assert table.auction.lapses == ()


def test_a_countersignature_is_refused_when_late_when_unknown_and_when_somebody_elses() -> None:
    table = Table()
    table.bid(1)
    table.close_batch()
    hold = table.auction.holds[0]
    for lease, who in ((bytes(16), renter(1)), (hold.lease, renter(2))):
        refusal = table.apply(CountersignatureReceived(lease, who, bytes(32)))
        assert refusal == (RefuseCountersignature(lease, bytes(32)),)
    table.wait(HOLD_MS)
    assert table.apply(CountersignatureReceived(hold.lease, renter(1), bytes(32))) == (
        RefuseCountersignature(hold.lease, bytes(32)),
    )
    assert not table.auction.leases


def test_a_countersignature_is_refused_once_the_database_was_found_to_be_old() -> None:
    table = Table()
    table.bid(1)
    table.close_batch()
    table.apply(EpochOpened(1, Millis(NOW + MINUTE_MS)))
    hold = table.auction.holds[0]
    assert table.countersign(hold.lease) == (
        RefuseCountersignature(hold.lease, hash_bytes(b"countersigned" + hold.lease)),
    )
    assert not table.of(StartKeeper)


def test_a_countersignature_that_comes_twice_sells_once() -> None:
    table = Table()
    table.bid(1)
    table.close_batch()
    lease = table.auction.holds[0].lease
    table.countersign(lease)
    before = table.auction
    assert table.countersign(lease) == ()
    assert table.auction == before
    assert table.of(StartKeeper) == [StartKeeper(lease)]


def test_devices_that_come_free_go_to_who_waited_before_they_go_to_a_newer_batch() -> None:
    table = Table(an_auction(devices=3))
    lease = sold(table, 1)
    first, second = sorted((2, 3), key=lambda number: lottery_rank(SECRET, 2, renter(number)))
    table.bid(first)
    table.bid(second, quantity=2)
    table.close_batch()
    assert table.auction.runners_up
    table.bid(4)
    table.apply(LeaseEnded(lease, "completed"))
    table.close_batch()
    assert [award.hold.renter for award in table.of(SendAward)][1:] == [renter(first), renter(second)]


# --- the chain ----------------------------------------------------------------------------------------------


def test_a_grant_and_its_release_continue_every_devices_chain_by_one_entry_each() -> None:
    table = Table()
    lease = sold(table, 1, quantity=2)
    grant = table.of(SendGrant)[0].grant
    assert [(entry.key, entry.number, entry.previous) for entry in grant.entries] == [
        (key(0), 0, GENESIS),
        (key(1), 0, GENESIS),
    ]
    assert grant.commitment == COMMITMENT
    assert grant.countersignature_id == hash_bytes(b"countersigned" + lease)
    table.wait(MINUTE_MS)
    table.apply(LeaseEnded(lease, "completed"))
    release = table.of(SendRelease)[0].release
    assert {(entry.number, entry.previous) for entry in release.entries} == {(1, content_id_of(grant))}
    assert {(unit.number, unit.head) for unit in table.auction.units} == {(2, content_id_of(release))}
    assert (release.reason, release.released_at) == ("completed", table.now)
    table.apply(LeaseEnded(lease, "completed"))
    assert len(table.of(SendRelease)) == 1


@pytest.mark.parametrize("event", [KeeperFailed, LeaseEnded])
def test_a_lease_that_never_began_leaves_the_chain_alone(event: type[KeeperFailed] | type[LeaseEnded]) -> None:
    table = Table()
    table.bid(1)
    table.close_batch()
    lease = table.auction.holds[0].lease
    table.countersign(lease)
    effects = table.apply(event(lease, "why"))
    assert ForgetLease(lease) in effects
    assert table.auction.units == an_auction().units
    assert not table.auction.leases
    assert table.apply(KeeperReady(lease, COMMITMENT)) == ()


def test_a_device_that_was_away_goes_on_with_its_chain() -> None:
    table = Table()
    lease = sold(table, 1)
    table.apply(LeaseEnded(lease, "completed"))
    head = table.auction.units[0]
    assert head.number == 2
    table.list_devices(1)
    assert [unit.key for unit in table.auction.units] == [key(1)]
    table.list_devices(0, 1)
    back = next(unit for unit in table.auction.units if unit.key == key(0))
    assert (back.number, back.head) == (head.number, head.head)
    assert not table.auction.retired


def test_a_device_whose_chain_went_on_elsewhere_takes_the_newer_head() -> None:
    table = Table(an_auction(devices=1))
    newer = {key(0): Unit(key(0), 8, hash_bytes(b"head"), True)}
    table.apply(ListingChanged(table.auction.listing, newer, frozenset(newer)))
    assert (table.auction.units[0].number, table.auction.units[0].head) == (8, hash_bytes(b"head"))


def test_a_sold_device_that_is_gone_stays_until_its_release() -> None:
    table = Table()
    lease = sold(table, 1)
    table.list_devices(1)
    assert {unit.key for unit in table.auction.units} == {key(0), key(1)}
    assert [unit.key for unit in free_units(table.auction)] == [key(1)]
    table.apply(LeaseEnded(lease, "gone"))
    assert len(table.of(SendRelease)) == 1
    assert is_sound(table.auction) is None
    table.list_devices(1)
    assert [unit.key for unit in table.auction.units] == [key(1)]


# --- offers -------------------------------------------------------------------------------------------------


def an_offer_at(auction: Auction, now: Millis) -> int:
    offer = offer_of(
        auction, sequence=2, lottery_commitment=bytes(32), addresses=(), now=now, lifetime_ms=MINUTE_MS
    )
    assert offer.quantity == len(auction.units)
    return offer.free


def test_an_offer_states_what_is_free() -> None:
    table = Table(an_auction(devices=3))
    sold(table, 1)
    assert an_offer_at(table.auction, table.now) == 2
    table.list_devices(0, 1, 2, sellable=(0, 1))
    assert an_offer_at(table.auction, table.now) == 1
    table.apply(EpochOpened(1, Millis(table.now + 1)))
    assert an_offer_at(table.auction, table.now) == 0
    table.wait(1)
    assert an_offer_at(table.auction, table.now) == 1


def test_what_changes_nothing_publishes_nothing() -> None:
    table = Table()
    curve = table.auction.curve
    assert table.apply(Repriced(curve.start, curve.reserve)) == ()
    assert table.apply(PauseChanged(paused=False)) == ()
    assert table.list_devices(0, 1) == ()
    assert table.apply(EpochOpened(0, Millis(0))) == ()
    assert table.apply(PauseChanged(paused=True)) == (WithdrawOffer(),)
    assert table.apply(OfferRefreshed()) == ()
    assert table.list_devices(0) == ()
    assert table.apply(PauseChanged(paused=False)) == (PublishOffer(),)
    assert table.apply(OfferRefreshed()) == (PublishOffer(),)


def test_neither_epoch_nor_the_time_to_sell_ever_goes_back() -> None:
    table = Table()
    for event, expected in (
        (EpochOpened(3, Millis(NOW + 5)), (3, NOW + 5)),
        (EpochOpened(1, Millis(NOW + 9)), (3, NOW + 9)),
        (EpochOpened(4, Millis(NOW)), (4, NOW + 9)),
    ):
        assert table.apply(event) == (PublishOffer(),)
        assert (table.auction.epoch, table.auction.sells_from) == expected


def test_a_listing_without_devices_is_withdrawn_and_not_offered() -> None:
    table = Table()
    assert table.list_devices() == (WithdrawOffer(),)
    for event in (OfferRefreshed(), Repriced(500_000, 0), EpochOpened(1, Millis(0)), PauseChanged(paused=True)):
        assert PublishOffer() not in table.apply(event)
    assert table.apply(PauseChanged(paused=False)) == ()
    assert table.list_devices(0) == (PublishOffer(),)


def test_a_bid_on_a_slightly_older_offer_will_do_and_on_a_much_older_one_will_not() -> None:
    table = Table()
    for number in range(15):
        table.publish(hash_bytes(bytes([number])))
    table.bid(1)
    assert table.of(Acknowledge)
    table.publish(hash_bytes(b"one more"))
    table.bid(2)
    assert table.of(Reject)[0].rejection.reason is RejectReason.STALE_OFFER
    assert OFFER not in table.auction.recent_offers


def test_an_unsound_state_is_called_so() -> None:
    table = Table()
    table.bid(1)
    table.bid(2)
    table.close_batch()
    assert is_sound(table.auction) is None
    first, second = table.auction.holds
    broken = [
        an_auction(holds=(first, msgspec.structs.replace(second, keys=first.keys))),
        an_auction(devices=1, holds=(second,)),
        an_auction(holds=(first, msgspec.structs.replace(second, renter=first.renter))),
        an_auction(retired=an_auction().units),
    ]
    assert [is_sound(auction) for auction in broken] == [
        "a device is in two holds or leases",
        "an unknown device is held or leased",
        "a renter has two holds",
        "a device is listed and retired",
    ]


def test_a_simulated_listing_says_so_in_its_offer_and_its_grants() -> None:
    table = Table(an_auction(listing=a_listing(simulated=True)))
    sold(table, 1, allow_simulated=True)
    assert table.of(SendGrant)[0].grant.simulated
    assert table.auction.leases[0].phase is LeasePhase.LEASED


def test_an_offer_that_goes_out_during_a_hold_counts_the_held_devices_as_free() -> None:
    """Or nobody would bid again when the hold has lapsed, which is not gossiped."""
    hold = Hold(
        lease=bytes(16),
        bid_id=bytes(32),
        renter=bytes(32),
        price=1,
        keys=(key(0),),
        until=Millis(NOW + 60_000),
        lapses_at=Millis(NOW + 2_000),
        address_prefix="",
    )
    auction = msgspec.structs.replace(an_auction(1), holds=(hold,))
    assert free_units(auction) == ()
    offer = offer_of(
        auction, sequence=1, lottery_commitment=COMMITMENT, addresses=(), now=Millis(NOW), lifetime_ms=MINUTE_MS
    )
    assert offer.free == 1
