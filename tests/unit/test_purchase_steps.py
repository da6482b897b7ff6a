"""A purchase step by step: what each answer of a provider leads to, and what is refused."""

import msgspec
import pytest
from support.offers import NOW
from support.purchases import LISTING, PROVIDERS, Basket, a_candidate

from protocol import codec
from protocol.identity import hash_bytes
from protocol.machines.purchase import (
    ANSWER_MS,
    AWARD_SLACK_MS,
    GRANT_MS,
    NOTE_SIZE_MAX,
    REST_MS,
    RESTS_MAX,
    RETRY_MIN_MS,
    STALE_REST_MS,
    STOCK_REASONS,
    AwardReceived,
    BidAcknowledged,
    BidFailed,
    BidSigned,
    Cancelled,
    CandidatesRanked,
    Countersign,
    CountersignatureRefused,
    GrantReceived,
    OpenBid,
    Phase,
    PlaceBid,
    ProviderReached,
    Purchase,
    RefuseAward,
    Rest,
    Seek,
    StartLease,
    TimePassed,
)
from protocol.records import RejectReason
from protocol.units import HOUR_MS, Millis

AWARD = hash_bytes(b"award")


def test_the_way_to_a_grant() -> None:
    basket = Basket()
    bid = basket.place()
    assert (basket.purchase.phase, basket.purchase.deadline) == (Phase.BIDDING, NOW + ANSWER_MS)
    basket.apply(BidAcknowledged(bid.bid_id, 300))
    assert (basket.purchase.phase, basket.purchase.deadline) == (Phase.WAITING, NOW + 300 + AWARD_SLACK_MS)
    assert basket.apply(AwardReceived(AWARD, bid.bid_id, bid.price, "")) == (Countersign(AWARD, bid),)
    assert (basket.purchase.phase, basket.purchase.deadline) == (Phase.COUNTERSIGNED, NOW + GRANT_MS)
    assert basket.apply(GrantReceived(bid.lease)) == (StartLease(bid),)
    assert (basket.purchase.phase, basket.purchase.deadline) == (Phase.GRANTED, None)
    assert basket.apply(GrantReceived(bid.lease)) == ()  # it comes twice


def test_an_award_may_come_before_the_acknowledgement() -> None:
    basket = Basket()
    bid = basket.place()
    basket.apply(AwardReceived(AWARD, bid.bid_id, 0, ""))
    assert basket.apply(BidAcknowledged(bid.bid_id, 300)) == ()
    assert basket.purchase.phase is Phase.COUNTERSIGNED


@pytest.mark.parametrize(
    ("price", "objection", "reason"),
    [(101, "", "price"), (100, "other terms", "terms"), (2**62, "other terms", "price")],
)
def test_an_award_that_is_not_what_was_bid_for_is_refused_and_the_provider_rests(
    price: int, objection: str, reason: str
) -> None:
    basket = Basket()
    bid = basket.place(price=100)
    effects = basket.apply(AwardReceived(AWARD, bid.bid_id, price, objection))
    assert effects == (RefuseAward(AWARD, reason), Seek())
    assert (basket.purchase.phase, basket.purchase.bid) == (Phase.SEEKING, None)
    assert [(rest.provider, rest.until) for rest in basket.purchase.rests] == [(bid.provider, NOW + REST_MS)]


def test_an_award_for_an_older_bid_is_refused_and_changes_nothing() -> None:
    basket = Basket()
    old = basket.place(provider=0)
    basket.wait(ANSWER_MS)
    basket.apply(TimePassed())
    basket.place(provider=1)
    before = basket.purchase
    assert basket.apply(AwardReceived(AWARD, old.bid_id, 1, "")) == (RefuseAward(AWARD, "not_wanted"),)
    assert basket.purchase == before


def test_no_grant_but_the_countersigned_leases_own_is_taken() -> None:
    basket = Basket()
    bid = basket.place()
    assert basket.apply(GrantReceived(bid.lease)) == ()  # not countersigned
    basket.apply(AwardReceived(AWARD, bid.bid_id, 1, ""))
    assert basket.apply(GrantReceived(bytes(16))) == ()
    assert basket.purchase.phase is Phase.COUNTERSIGNED


@pytest.mark.parametrize(
    ("reason", "retry_in_ms", "rest_ms"),
    [
        (None, None, REST_MS),
        (RejectReason.TERMS, None, REST_MS),
        (RejectReason.STALE_OFFER, None, STALE_REST_MS),
        (RejectReason.STALE_OFFER, HOUR_MS, STALE_REST_MS),
        (RejectReason.HOLD_LAPSED, None, RETRY_MIN_MS),
        (RejectReason.HOLD_LAPSED, 1_000, 1_000),
        (RejectReason.PROVIDER_FAILED, 0, RETRY_MIN_MS),
        (RejectReason.SOLD_OUT, 5_000, 5_000),
        (RejectReason.PRICE_TOO_LOW, -7, RETRY_MIN_MS),
        (RejectReason.PAUSED, 10**15, HOUR_MS),
    ],
)
def test_a_failed_bid_lets_its_listing_rest(
    reason: RejectReason | None, retry_in_ms: int | None, rest_ms: int
) -> None:
    basket = Basket()
    bid = basket.place()
    assert basket.apply(BidFailed(bid.bid_id, reason, "because", retry_in_ms)) == (Seek(),)
    note = f"{reason.value}: because" if reason else "because"
    offer_id = bid.offer_id if reason in STOCK_REASONS else None
    same = msgspec.structs.replace(a_candidate(), offer_id=bid.offer_id)
    was_silent = reason is None
    rest = Rest(bid.provider, LISTING, Millis(NOW + rest_ms), note, offer_id, was_silent)
    assert basket.purchase.rests == (rest,)
    assert basket.purchase.note == note
    assert basket.rank(same) == ()
    assert basket.purchase.deadline == NOW + max(RETRY_MIN_MS, rest_ms)
    basket.wait(rest_ms)
    assert basket.rank(same) == (PlaceBid(same),)


def test_a_provider_that_was_silent_is_bid_on_again_as_soon_as_it_connects() -> None:
    basket = Basket()
    bid = basket.place()
    basket.apply(BidFailed(bid.bid_id, None, "it did not answer", None))
    assert basket.rank(a_candidate()) == ()
    assert basket.apply(ProviderReached(PROVIDERS[1])) == ()
    assert basket.apply(ProviderReached(PROVIDERS[0])) == (Seek(),)
    assert basket.rank(a_candidate()) == (PlaceBid(a_candidate()),)


def test_a_provider_that_had_a_reason_is_not_bid_on_because_it_connects() -> None:
    basket = Basket()
    bid = basket.place()
    basket.apply(BidFailed(bid.bid_id, RejectReason.TERMS, "", None))
    assert basket.apply(ProviderReached(PROVIDERS[0])) == ()
    assert basket.rank(a_candidate()) == ()


def test_a_provider_that_connects_while_another_is_bid_on_is_remembered_without_its_rest() -> None:
    basket = Basket()
    bid = basket.place()
    basket.apply(BidFailed(bid.bid_id, None, "", None))
    other = basket.place(1)
    assert basket.apply(ProviderReached(PROVIDERS[0])) == ()
    assert (basket.purchase.bid, basket.purchase.rests) == (other, ())


@pytest.mark.parametrize("reason", [RejectReason.SOLD_OUT, RejectReason.DUPLICATE])
def test_a_listing_that_had_nothing_for_us_is_bid_on_again_when_a_newer_offer_has_devices(
    reason: RejectReason,
) -> None:
    basket = Basket()
    bid = basket.place()
    basket.apply(BidFailed(bid.bid_id, reason, "", HOUR_MS))
    assert basket.rank(msgspec.structs.replace(a_candidate(), offer_id=bid.offer_id)) == ()
    assert basket.rank(a_candidate()) == (PlaceBid(a_candidate()),)


def test_another_listing_is_bid_on_while_one_rests() -> None:
    basket = Basket()
    bid = basket.place(provider=0)
    basket.apply(BidFailed(bid.bid_id, None, "no answer", None))
    other = a_candidate(provider=1, price=99)
    assert basket.rank(a_candidate(provider=0), other) == (PlaceBid(other),)


@pytest.mark.parametrize(
    ("phase_ms", "note"),
    [
        (ANSWER_MS, "the provider did not answer the bid"),
        (300 + AWARD_SLACK_MS, "the provider's batch closed without an answer"),
        (GRANT_MS, "the provider did not grant the lease in time"),
    ],
)
def test_each_phase_gives_up_at_its_deadline_and_not_before(phase_ms: int, note: str) -> None:
    basket = Basket()
    bid = basket.place()
    if phase_ms != ANSWER_MS:
        basket.apply(BidAcknowledged(bid.bid_id, 300))
    if phase_ms == GRANT_MS:
        basket.apply(AwardReceived(AWARD, bid.bid_id, 1, ""))
    basket.wait(phase_ms - 1)
    assert basket.apply(TimePassed()) == ()
    basket.wait(1)
    assert basket.apply(TimePassed()) == (Seek(),)
    assert (basket.purchase.phase, basket.purchase.note) == (Phase.SEEKING, note)


def test_a_provider_cannot_make_a_purchase_wait_longer_than_a_minute_for_its_batch() -> None:
    basket = Basket()
    bid = basket.place()
    basket.apply(BidAcknowledged(bid.bid_id, 2**62))
    assert basket.purchase.deadline == NOW + 60_000 + AWARD_SLACK_MS


def test_a_refused_countersignature_tries_again_at_once() -> None:
    basket = Basket()
    bid = basket.place()
    basket.apply(AwardReceived(AWARD, bid.bid_id, 1, ""))
    assert basket.apply(CountersignatureRefused(bytes(16), "another lease's")) == ()
    assert basket.apply(CountersignatureRefused(bid.lease, "the hold had lapsed")) == (Seek(),)
    assert basket.purchase.rests[0].until == NOW + RETRY_MIN_MS


def test_seeking_wakes_when_a_price_will_have_fallen_or_a_rest_is_over() -> None:
    basket = Basket()
    dear = a_candidate(provider=1, price=500, affordable_at=NOW + 7000)
    assert basket.rank(dear) == ()
    assert basket.purchase.deadline == NOW + 7000
    assert basket.purchase.note == "waiting for a matching offer's price to fall to the highest price allowed"
    never = a_candidate(provider=2, price=500, affordable_at=None)
    assert basket.rank(never) == ()
    assert basket.purchase.deadline is None
    assert basket.purchase.note == "every matching offer's reserve price is above the highest price allowed"
    basket.apply(CandidatesRanked((), "none of 3 offers matches"))
    assert (basket.purchase.deadline, basket.purchase.note) == (None, "none of 3 offers matches")
    assert basket.rank(dear) == ()
    basket.wait(7000)
    assert basket.apply(TimePassed()) == (Seek(),)


def test_a_price_at_the_cap_is_bid_and_one_above_never() -> None:
    basket = Basket(max_price=100)
    assert basket.rank(a_candidate(price=101, affordable_at=NOW)) == ()
    assert basket.purchase.deadline == NOW + RETRY_MIN_MS
    assert basket.rank(a_candidate(price=100)) == (PlaceBid(a_candidate(price=100)),)
    basket.apply(
        BidSigned(OpenBid(bid_id=AWARD, offer_id=AWARD, lease=bytes(16), provider=b"", listing="", price=101))
    )
    assert basket.purchase.phase is Phase.SEEKING


@pytest.mark.parametrize("until", [Phase.SEEKING, Phase.BIDDING, Phase.WAITING, Phase.COUNTERSIGNED])
def test_cancelled_is_final(until: Phase) -> None:
    basket = Basket()
    bid = basket.place() if until is not Phase.SEEKING else basket.signed()
    if until is Phase.WAITING:
        basket.apply(BidAcknowledged(bid.bid_id, 300))
    if until is Phase.COUNTERSIGNED:
        basket.apply(AwardReceived(AWARD, bid.bid_id, 1, ""))
    assert basket.purchase.phase is until
    assert basket.apply(Cancelled()) == ()
    ended = basket.purchase
    basket.wait(GRANT_MS)
    for event in (
        BidSigned(bid), BidAcknowledged(bid.bid_id, 1), BidFailed(bid.bid_id, None, "", None), TimePassed(),
        GrantReceived(bid.lease), CountersignatureRefused(bid.lease, ""), Cancelled(),
        CandidatesRanked((a_candidate(),)),
    ):  # fmt: skip
        assert basket.apply(event) == ()
    assert basket.apply(AwardReceived(AWARD, bid.bid_id, 1, "")) == (RefuseAward(AWARD, "not_wanted"),)
    assert basket.purchase == ended
    assert ended.phase is Phase.CANCELLED


def test_granted_is_final() -> None:
    basket = Basket()
    bid = basket.place()
    basket.apply(AwardReceived(AWARD, bid.bid_id, 1, ""))
    basket.apply(GrantReceived(bid.lease))
    granted = basket.purchase
    basket.wait(HOUR_MS)
    for event in (Cancelled(), TimePassed(), BidFailed(bid.bid_id, None, "", None), BidSigned(bid)):
        assert basket.apply(event) == ()
    assert basket.purchase == granted


def test_a_second_bid_is_not_signed_while_one_is_out() -> None:
    basket = Basket()
    first = basket.place(provider=0)
    assert basket.rank(a_candidate(provider=1)) == ()
    basket.apply(BidSigned(basket.signed(provider=1)))
    assert basket.purchase.bid == first


def test_talkative_providers_cannot_make_the_state_too_large_to_store() -> None:
    basket = Basket()
    for number in range(RESTS_MAX + 10):
        basket.apply(BidSigned(basket.signed(listing=f"{number:064d}")))
        bid = basket.purchase.bid
        assert bid is not None
        basket.apply(BidFailed(bid.bid_id, RejectReason.LOST_LOTTERY, "\U0001f600" * 1024, HOUR_MS))
    assert len(basket.purchase.rests) == RESTS_MAX
    assert len(basket.purchase.note) <= NOTE_SIZE_MAX
    stored = codec.encode(basket.purchase)
    assert codec.decode_untrusted(stored, Purchase) == basket.purchase
