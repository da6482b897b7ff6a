"""Every reason for which a bid is not served: what it says, and when it says to try again."""

from typing import Any

import pytest
from support.auctions import (
    Table,
    a_bid_event,
    a_listing,
    an_auction,
    fresh_units,
    key,
    renter,
)
from support.offers import NOW, a_curve

from protocol import codec
from protocol.identity import hash_bytes
from protocol.machines.admission import SKEW_MAX_MS, objection
from protocol.machines.auction_types import (
    HOLD_MS,
    WAITING_BIDS_MAX,
    Auction,
    Hold,
    KeeperFailed,
    Lapse,
    LeasePhase,
    Reject,
    SoldLease,
)
from protocol.pricing import clock_price, time_of_price
from protocol.records import BidRejected, RejectReason, Resources, Terms
from protocol.units import HOUR_MS, MINUTE_MS, SECOND_MS, Millis

RENTER = 1
PRICE_NOW = clock_price(a_curve(), NOW)


def a_lease(number: int, *, until: int = NOW + HOUR_MS, devices: tuple[int, ...] = (0,)) -> SoldLease:
    return SoldLease(
        lease=bytes(15) + bytes([number]),
        renter=renter(number),
        bid_id=hash_bytes(b"sold"),
        price=1,
        keys=tuple(key(device) for device in devices),
        until=Millis(until),
        countersignature_id=bytes(32),
        phase=LeasePhase.LEASED,
    )


def a_hold(number: int, *, prefix: str = "", device: int = 0) -> Hold:
    return Hold(
        lease=bytes(15) + bytes([number]),
        bid_id=hash_bytes(b"held"),
        renter=renter(number),
        price=1,
        keys=(key(device),),
        until=Millis(NOW + HOUR_MS),
        lapses_at=Millis(NOW + HOLD_MS),
        address_prefix=prefix,
    )


def judged(auction: Auction, **fields: Any) -> BidRejected:
    event = a_bid_event(RENTER, **fields)
    rejection = objection(auction, event, NOW)
    assert rejection is not None
    assert rejection.bid_id == event.bid_id
    assert rejection.price_now == PRICE_NOW
    return rejection


def test_a_good_bid_is_admitted() -> None:
    assert objection(an_auction(), a_bid_event(RENTER), NOW) is None


CASES: list[tuple[str, dict[str, Any], dict[str, Any], RejectReason, str, int | None]] = [
    (
        "ahead", {}, {"signed_at": NOW + 10 * MINUTE_MS, "expires_at": NOW + 11 * MINUTE_MS},
        RejectReason.CLOCK_SKEW, "the renter's clock is 10m 00s ahead of the provider's", None,
    ),
    (
        "behind", {}, {"signed_at": NOW - 10 * MINUTE_MS, "expires_at": NOW - 590 * SECOND_MS},
        RejectReason.EXPIRED, "signed 10m 00s ago by the provider's clock", None,
    ),
    ("expiring now", {}, {"expires_at": NOW}, RejectReason.EXPIRED, "signed 0.0s ago", None),
    ("another provider's", {}, {"provider": hash_bytes(b"other")}, RejectReason.WRONG_PROVIDER, "", None),
    ("an old offer's", {}, {"offer_id": hash_bytes(b"old")}, RejectReason.STALE_OFFER, "a newer offer", NOW),
    (
        "simulated", {"listing": a_listing(simulated=True)}, {}, RejectReason.SIMULATED,
        "the devices are simulated", None,
    ),
    (
        "too many devices", {}, {"quantity": 3}, RejectReason.TERMS,
        "3 devices wanted, the listing has 2", None,
    ),
    (
        "too short", {}, {"duration_ms": 59_999}, RejectReason.TERMS,
        "a lease of 59.9s; the terms allow 1m 00s to 24h 00m", None,
    ),
    (
        "too long", {}, {"duration_ms": 24 * HOUR_MS + 1}, RejectReason.TERMS, "a lease of 24h 00m", None,
    ),
    (
        "isolation", {}, {"isolation": "kata"}, RejectReason.TERMS,
        "isolation 'kata' is not among bubblewrap", None,
    ),
    (
        "network", {}, {"network_mode": "renter"}, RejectReason.TERMS,
        "network mode 'renter' is not among none, internet", None,
    ),
    (
        "cap", {"listing": a_listing(terms=Terms(window_intervals=2))}, {"max_spend": 20 * 438_888 - 1},
        RejectReason.TERMS, "the first window before vouchers are due costs $0.008777", None,
    ),
    (
        "cpus", {}, {"resources": Resources(cpus_milli=8500, memory_mib=1, disk_mib=1)}, RejectReason.TERMS,
        "8.5 CPUs wanted, 8 offered", None,
    ),
    (
        "memory", {}, {"resources": Resources(cpus_milli=1, memory_mib=65_537, disk_mib=1)}, RejectReason.TERMS,
        "65537 MiB of memory wanted, 65536 offered", None,
    ),
    (
        "disk", {}, {"resources": Resources(cpus_milli=1, memory_mib=1, disk_mib=200_001)}, RejectReason.TERMS,
        "200001 MiB of disk wanted, 200000 offered", None,
    ),
    (
        "backoff", {"lapses": (Lapse(renter(RENTER), 3, Millis(NOW + 1)),)}, {}, RejectReason.BACKOFF,
        "3 earlier awards were not countersigned in time", NOW + 1,
    ),
    (
        "held already", {"holds": (a_hold(RENTER),)}, {}, RejectReason.DUPLICATE,
        "one bid at a time", NOW + HOLD_MS,
    ),
    (
        "neighbour held", {"holds": (a_hold(2, prefix="198.51.100.0/24"),)},
        {"address_prefix": "198.51.100.0/24"}, RejectReason.DUPLICATE, "one bid at a time", NOW + HOLD_MS,
    ),
    (
        "credit", {}, {"credit": 10 * PRICE_NOW, "max_spend": 40 * PRICE_NOW}, RejectReason.CREDIT,
        "which buys 10.0s at the price now", None,
    ),
    (
        "no credit", {}, {"credit": -5}, RejectReason.CREDIT,
        "the $0.000000 of credit left with this provider, which buys no time", None,
    ),
    ("paused", {"paused": True}, {}, RejectReason.PAUSED, "the owner has paused lending", None),
    (
        "restored", {"sells_from": Millis(NOW + HOUR_MS)}, {}, RejectReason.PAUSED,
        "leases that its restored database does not know", NOW + HOUR_MS,
    ),
    (
        "sold out", {"leases": (a_lease(2), a_lease(3, until=NOW + MINUTE_MS, devices=(1,)))}, {},
        RejectReason.SOLD_OUT, "1 devices wanted, 0 free", NOW + MINUTE_MS,
    ),
    (
        "overdue lease", {"leases": (a_lease(2, until=NOW - 1, devices=(0, 1)),)}, {}, RejectReason.SOLD_OUT,
        "1 devices wanted, 0 free", NOW,
    ),
    (
        "switched off", {"units": ()}, {"quantity": 1}, RejectReason.TERMS,
        "1 devices wanted, the listing has 0", None,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("auction_fields", "bid_fields", "reason", "detail", "retry_at"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_a_bid_is_refused_with_its_reason(
    auction_fields: dict[str, Any],
    bid_fields: dict[str, Any],
    reason: RejectReason,
    detail: str,
    retry_at: int | None,
) -> None:
    rejection = judged(an_auction(**auction_fields), **bid_fields)
    assert (rejection.reason, rejection.retry_at) == (reason, retry_at)
    assert detail in rejection.detail


def test_every_reason_but_the_unsaid_ones_is_told_of_here_or_by_the_shell() -> None:
    told = {case[3] for case in CASES}
    by_price_and_batch = {RejectReason.PRICE_TOO_LOW, RejectReason.LOST_LOTTERY, RejectReason.OVERLOADED}
    assert told | by_price_and_batch | {RejectReason.PROVIDER_FAILED} == set(RejectReason) - {
        RejectReason.HOLD_LAPSED  # what a renter calls a refused countersignature
    }


def test_a_skew_within_the_limit_is_admitted_and_one_beyond_is_not() -> None:
    auction = an_auction()
    assert objection(auction, a_bid_event(RENTER, signed_at=NOW + SKEW_MAX_MS), NOW) is None
    assert judged(auction, signed_at=NOW + SKEW_MAX_MS + 1).reason is RejectReason.CLOCK_SKEW


def test_a_price_of_five_seconds_ahead_will_do_and_one_below_is_told_its_time() -> None:
    auction = an_auction()
    lowest = clock_price(auction.curve, Millis(NOW + SKEW_MAX_MS))
    assert lowest < PRICE_NOW
    assert objection(auction, a_bid_event(RENTER, price=lowest), NOW) is None
    rejection = judged(auction, price=lowest - 1)
    assert rejection.reason is RejectReason.PRICE_TOO_LOW
    assert rejection.retry_at == time_of_price(auction.curve, lowest - 1)
    assert rejection.retry_at is not None
    assert rejection.retry_at > NOW
    assert rejection.detail == "bid $1.5523/h, the clock is at $1.5546/h"


def test_a_price_below_the_reserve_has_no_time_to_try_again() -> None:
    auction = an_auction(curve=a_curve(reserve=105_555))
    rejection = judged(auction, price=105_554)
    assert (rejection.reason, rejection.retry_at) == (RejectReason.PRICE_TOO_LOW, None)


def test_a_bid_of_a_neighbour_in_the_batch_is_a_duplicate_but_not_one_behind_a_private_address() -> None:
    table = Table()
    table.bid(1, address_prefix="198.51.100.0/24")
    table.bid(2, address_prefix="")
    table.bid(3, address_prefix="")
    table.bid(4, address_prefix="198.51.100.0/24")
    rejections = table.of(Reject)
    assert [rejection.renter for rejection in rejections] == [renter(4)]
    assert rejections[0].rejection.reason is RejectReason.DUPLICATE
    assert table.auction.batch is not None
    assert rejections[0].rejection.retry_at == table.auction.batch.closes_at + 1


def test_a_second_bid_of_a_renter_is_told_when_its_first_is_decided_not_when_some_lease_ends() -> None:
    rejection = judged(
        an_auction(devices=2, holds=(a_hold(RENTER),), leases=(a_lease(3, until=NOW + 1, devices=(1,)),))
    )
    assert (rejection.reason, rejection.retry_at) == (RejectReason.DUPLICATE, NOW + HOLD_MS)


def test_a_full_batch_is_overloaded_until_it_closes() -> None:
    table = Table(an_auction(devices=64))
    for number in range(WAITING_BIDS_MAX):
        table.bid(number)
    assert table.auction.batch is not None
    table.bid(WAITING_BIDS_MAX)
    rejection = table.of(Reject)[0].rejection
    assert rejection.reason is RejectReason.OVERLOADED
    assert rejection.retry_at == table.auction.batch.closes_at + 1


def test_losing_says_so_with_the_transcript_and_when_a_device_may_come_free() -> None:
    table = Table(an_auction(devices=1))
    table.bid(1)
    table.bid(2)
    table.close_batch()
    won = table.auction.holds[0]
    assert not table.of(Reject)  # the hold may still lapse
    table.countersign(won.lease)
    (lost,) = [effect.rejection for effect in table.of(Reject)]
    assert lost.reason is RejectReason.LOST_LOTTERY
    assert lost.transcript is not None
    assert lost.transcript.served == 1
    assert lost.retry_at == won.until


def test_a_keeper_that_does_not_start_is_the_providers_fault() -> None:
    table = Table()
    table.bid(1)
    table.close_batch()
    lease = table.auction.holds[0].lease
    table.countersign(lease)
    table.apply(KeeperFailed(lease, "no room on the disk"))
    rejection = table.of(Reject)[-1].rejection
    assert (rejection.reason, rejection.detail) == (RejectReason.PROVIDER_FAILED, "no room on the disk")


def test_terms_are_judged_before_credit_and_stock() -> None:
    auction = an_auction(paused=True, units=tuple(fresh_units(1).values()))
    assert judged(auction, isolation="kata", credit=0).reason is RejectReason.TERMS
    assert judged(auction, credit=0).reason is RejectReason.CREDIT
    assert judged(auction).reason is RejectReason.PAUSED


def test_a_rejection_survives_its_own_record() -> None:
    terms = Terms(isolation=tuple(f"tier-{number:058d}" for number in range(8)))
    rejection = judged(an_auction(listing=a_listing(terms=terms)), isolation="x" * 64)
    assert codec.decode_untrusted(codec.encode(rejection), BidRejected) == rejection
