"""A purchase under any order of answers, awards, grants, losses and restarts.

It never has two bids out, never pays more than its cap, takes awards and grants only for the bid that is out, and
always has a deadline or waits for the book. From wherever it is, a provider that works with it gets it its lease.
"""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.purchases import PROVIDERS, Basket, a_candidate

from protocol import codec
from protocol.identity import hash_bytes
from protocol.machines.purchase import (
    AwardReceived,
    BidAcknowledged,
    BidFailed,
    BidSigned,
    Cancelled,
    Candidate,
    CandidatesRanked,
    Countersign,
    CountersignatureRefused,
    GrantReceived,
    OpenBid,
    Phase,
    PlaceBid,
    ProviderReached,
    Purchase,
    PurchaseEvent,
    RefuseAward,
    Seek,
    StartLease,
    TimePassed,
)
from protocol.records import RejectReason
from protocol.units import HOUR_MS, Millis

MAX_PRICE = 100
OPEN = (Phase.BIDDING, Phase.WAITING, Phase.COUNTERSIGNED)


class PurchaseMachine(RuleBasedStateMachine):
    """One purchase, and every bid that it ever placed."""

    def __init__(self) -> None:
        super().__init__()
        self.basket = Basket(MAX_PRICE)
        self.bids: list[OpenBid] = []
        self.countersigned: list[bytes] = []
        """Leases, in order."""
        self.started: list[bytes] = []
        self.serial = 0

    @property
    def purchase(self) -> Purchase:
        return self.basket.purchase

    def apply(self, event: PurchaseEvent) -> tuple[Any, ...]:
        before = self.purchase
        effects = self.basket.apply(event)
        for effect in effects:
            match effect:
                case PlaceBid(candidate):
                    assert before.phase is Phase.SEEKING
                    assert candidate.price <= MAX_PRICE
                    bid = self.basket.signed(PROVIDERS.index(candidate.provider), price=candidate.price)
                    self.bids.append(bid)
                    self.basket.apply(BidSigned(bid))
                    assert self.purchase.bid == bid
                case Countersign(_, bid):
                    assert bid == before.bid
                    assert before.phase in (Phase.BIDDING, Phase.WAITING)
                    self.countersigned.append(bid.lease)
                case StartLease(bid):
                    assert bid.lease == self.countersigned[-1]
                    self.started.append(bid.lease)
                case RefuseAward():
                    assert isinstance(event, AwardReceived)
                case Seek():
                    assert self.purchase.phase is Phase.SEEKING
                case _:
                    raise AssertionError(effect)
        if before.phase in (Phase.CANCELLED, Phase.GRANTED):
            assert self.purchase == before
        if before.phase in OPEN and self.purchase.phase in OPEN:
            assert self.purchase.bid == before.bid
        if before.phase in OPEN and self.purchase.phase is Phase.SEEKING:
            assert effects[-1] == Seek()
        return effects

    # --- what happens ---------------------------------------------------------------------------------------

    @rule(
        offers=st.lists(
            st.tuples(st.integers(0, 3), st.integers(0, 150), st.sampled_from([None, -1, 0, 700, HOUR_MS])),
            max_size=3,
        )
    )
    def rank(self, offers: list[tuple[int, int, int | None]]) -> None:
        candidates = [self.candidate(*offer) for offer in offers]
        self.apply(CandidatesRanked(tuple(candidates), "" if candidates else "nothing there"))

    def candidate(self, provider: int, price: int, in_ms: int | None) -> Candidate:
        at = None if in_ms is None else self.basket.now + in_ms
        return a_candidate(provider, price=price, affordable_at=at)

    @rule(ms=st.sampled_from([0, 200, 1000, 10_000, 30_000]))
    def wait(self, ms: int) -> None:
        self.basket.wait(ms)
        self.apply(TimePassed())

    @rule()
    def reach_the_deadline(self) -> None:
        if self.purchase.deadline is not None:
            self.basket.now = Millis(max(self.basket.now, self.purchase.deadline))
            before = self.purchase.phase
            assert self.apply(TimePassed()) == (Seek(),)
            assert before in (Phase.SEEKING, *OPEN)

    @precondition(lambda self: self.bids)
    @rule(data=st.data(), ms=st.sampled_from([0, 300, 2**40]))
    def acknowledge(self, data: st.DataObject, ms: int) -> None:
        self.apply(BidAcknowledged(self.any_bid(data).bid_id, ms))

    @precondition(lambda self: self.bids)
    @rule(
        data=st.data(),
        reason=st.sampled_from([None, *RejectReason]),
        retry=st.sampled_from([None, -5, 5000, 2**40]),
    )
    def fail(self, data: st.DataObject, reason: RejectReason | None, retry: int | None) -> None:
        self.apply(BidFailed(self.any_bid(data).bid_id, reason, "because", retry))

    @precondition(lambda self: self.bids)
    @rule(data=st.data(), off=st.sampled_from([0, 0, 0, -10, 1]), objection=st.sampled_from(["", "", "", "no"]))
    def award(self, data: st.DataObject, off: int, objection: str) -> None:
        bid, before = self.any_bid(data), self.purchase
        self.serial += 1
        award_id = hash_bytes(self.serial.to_bytes(8, "big"))
        price = max(0, bid.price + off)
        effects = self.apply(AwardReceived(award_id, bid.bid_id, price, objection))
        is_wanted = before.bid == bid and before.phase in (Phase.BIDDING, Phase.WAITING)
        if not is_wanted:
            assert effects == (RefuseAward(award_id, "not_wanted"),)
        elif price > bid.price or objection:
            assert isinstance(effects[0], RefuseAward)
        else:
            assert effects == (Countersign(award_id, bid),)

    @precondition(lambda self: self.bids)
    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        bid, before = self.any_bid(data), self.purchase
        effects = self.apply(GrantReceived(bid.lease))
        is_ours = before.phase is Phase.COUNTERSIGNED and before.bid == bid
        assert effects == ((StartLease(bid),) if is_ours else ())

    @precondition(lambda self: self.bids)
    @rule(data=st.data())
    def refuse_countersignature(self, data: st.DataObject) -> None:
        self.apply(CountersignatureRefused(self.any_bid(data).lease, "the hold had lapsed"))

    @rule(provider=st.sampled_from(PROVIDERS))
    def reach(self, provider: bytes) -> None:
        before = self.purchase
        effects = self.apply(ProviderReached(provider))
        assert effects in ((), (Seek(),))
        assert (self.purchase.phase, self.purchase.bid) == (before.phase, before.bid)
        assert {rest.provider for rest in before.rests if rest not in self.purchase.rests} <= {provider}

    @rule(sure=st.integers(0, 19).map(lambda drawn: drawn == 0))
    def cancel(self, sure: bool) -> None:
        if sure:
            self.apply(Cancelled())
            assert self.purchase.phase in (Phase.CANCELLED, Phase.GRANTED)

    def any_bid(self, data: st.DataObject) -> OpenBid:
        """Usually the bid that is out, else any that ever was."""
        if self.purchase.bid is not None and data.draw(st.integers(0, 3)):
            return self.purchase.bid
        return data.draw(st.sampled_from(self.bids))

    # --- what always holds ----------------------------------------------------------------------------------

    @invariant()
    def the_state_survives_the_disk(self) -> None:
        stored = codec.decode_untrusted(codec.encode(self.purchase), Purchase)
        assert stored == self.purchase
        self.basket.purchase = stored

    @invariant()
    def it_knows_what_it_waits_for(self) -> None:
        purchase = self.purchase
        if purchase.phase in OPEN:
            assert purchase.bid is not None
            assert purchase.bid.price <= MAX_PRICE
            assert purchase.deadline is not None
            assert purchase.deadline <= self.basket.now + 60_000 + 10_000
        if purchase.phase is Phase.SEEKING:
            assert purchase.bid is None
        if purchase.phase in (Phase.GRANTED, Phase.CANCELLED):
            assert purchase.deadline is None
        assert len(self.started) <= 1

    def teardown(self) -> None:
        """A provider that answers gets the purchase to its lease, from wherever it is."""
        if self.purchase.phase is Phase.CANCELLED:
            return
        for _ in range(20):
            match self.purchase.phase:
                case Phase.SEEKING:
                    self.apply(CandidatesRanked((self.candidate(0, MAX_PRICE, 0),)))
                    if self.purchase.phase is Phase.SEEKING:
                        self.reach_the_deadline()
                case Phase.BIDDING:
                    self.apply(BidAcknowledged(self.out().bid_id, 300))
                case Phase.WAITING:
                    self.apply(AwardReceived(hash_bytes(b"award"), self.out().bid_id, self.out().price, ""))
                case Phase.COUNTERSIGNED:
                    self.apply(GrantReceived(self.out().lease))
                case Phase.GRANTED:
                    break
        assert self.purchase.phase is Phase.GRANTED
        assert self.started == self.countersigned[-1:]

    def out(self) -> OpenBid:
        assert self.purchase.bid is not None
        return self.purchase.bid


PurchaseMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
test_a_purchase_in_any_order = PurchaseMachine.TestCase
