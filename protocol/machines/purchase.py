"""The renter's purchase of one lease: find, bid, countersign, and be told of the grant.

      SEEKING ─bid─▶ BIDDING ─acknowledged─▶ WAITING ─award─▶ COUNTERSIGNED ─grant─▶ GRANTED
         ▲              │ no answer, rejected    │ rejected, late    │ no grant in time
         └──────────────┴────────────────────────┴───────────────────┘ (that provider rests, or is excluded)

Rules. One bid is open at a time, and an award for any other is refused: a purchase never buys more than was
wanted. No bid is above `max_price`, and no lease's cap above `max_spend`. A purchase ends only when it is
granted, cancelled, or when nothing can ever match. Refuses to choose among offers: `protocol.matching` ranks
them, and the shell brings the best as an event.
"""

import enum
from typing import TypeAlias, assert_never

import msgspec

from protocol.records import RejectReason
from protocol.units import Millis

ANSWER_MS = 10_000
"""How long a bid waits for its acknowledgement."""
AWARD_SLACK_MS = 10_000
"""How long after a batch's closing an award or rejection may take: as long as a bid lives, since a runner-up may
be promoted until then, and who lets such an award lapse is not let in again for a while."""
GRANT_MS = 20_000
"""How long a countersigned award waits for its grant: the provider starts a keeper in between."""
REST_MS = 30_000
"""How long a provider that did not answer is passed over, unless it connects before: it was restarted, say."""
STALE_REST_MS = 1_000
"""How long a listing is passed over whose newer offer has not arrived yet."""
RETRY_MIN_MS = 200
STOCK_REASONS = (RejectReason.SOLD_OUT, RejectReason.LOST_LOTTERY, RejectReason.PAUSED, RejectReason.DUPLICATE)
"""Reasons that a newer offer with devices free does away with: a lease may end long before its term, and another
bid of ours has become one."""
RESTS_MAX = 64
"""Most listings remembered as resting."""
NOTE_SIZE_MAX = 200
"""Longest note in characters: it may quote a provider, and the state has to fit one record of the store."""


class Phase(enum.StrEnum):
    """Where a purchase stands."""

    SEEKING = "seeking"
    BIDDING = "bidding"
    WAITING = "waiting"
    COUNTERSIGNED = "countersigned"
    GRANTED = "granted"
    CANCELLED = "cancelled"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An offer that matches, as `protocol.matching` ranked it."""

    offer_id: bytes
    provider: bytes
    listing: str
    price: int
    """The clock price now."""
    affordable_at: Millis | None
    """When the clock reaches the cap: now or earlier when it is there; None when the reserve is above it."""


class Rest(msgspec.Struct, frozen=True):
    """A listing that is passed over until a time, and why."""

    provider: bytes
    listing: str
    until: Millis
    reason: str
    offer_id: bytes | None = None
    """The offer that had nothing left: a newer one of the listing is bid on at once. None: any offer rests."""
    until_reached: bool = False
    """Whether the provider was silent: it is bid on again as soon as it connects."""


class OpenBid(msgspec.Struct, frozen=True, kw_only=True):
    """The one bid that is out."""

    bid_id: bytes
    offer_id: bytes
    lease: bytes
    provider: bytes
    listing: str
    price: int


class Purchase(msgspec.Struct, frozen=True, kw_only=True):
    """The whole state of one purchase."""

    max_price: int
    phase: Phase = Phase.SEEKING
    deadline: Millis | None = None
    """When the present phase gives up (or, seeking, tries again)."""
    bid: OpenBid | None = None
    rests: tuple[Rest, ...] = ()
    note: str = ""
    """What it waits for, or why the last bid failed: for people."""
    attempts: int = 0


# --- events -------------------------------------------------------------------------------------------------


class CandidatesRanked(msgspec.Struct, frozen=True):
    """The order book was matched again: the candidates, best first, and why there are none."""

    candidates: tuple[Candidate, ...]
    none_because: str = ""


class BidSigned(msgspec.Struct, frozen=True):
    """The shell signed the bid that `PlaceBid` asked for."""

    bid: OpenBid


class BidAcknowledged(msgspec.Struct, frozen=True):
    """The provider has the bid; its batch closes in `closes_in_ms` by the provider's clock."""

    bid_id: bytes
    closes_in_ms: int


class BidFailed(msgspec.Struct, frozen=True):
    """The provider rejected the bid, or could not be reached (`reason` None)."""

    bid_id: bytes
    reason: RejectReason | None
    detail: str
    retry_in_ms: int | None


class AwardReceived(msgspec.Struct, frozen=True):
    """A verified award came in. `objection`: why its terms are not what was bid for, or ""."""

    award_id: bytes
    bid_id: bytes
    price: int
    objection: str


class GrantReceived(msgspec.Struct, frozen=True):
    """The verified grant of a lease came in."""

    lease: bytes


class CountersignatureRefused(msgspec.Struct, frozen=True):
    """The provider did not take the countersignature: the hold had lapsed."""

    lease: bytes
    detail: str


class ProviderReached(msgspec.Struct, frozen=True):
    """The provider has just connected."""

    provider: bytes


class TimePassed(msgspec.Struct, frozen=True):
    """It is `deadline` or later."""


class Cancelled(msgspec.Struct, frozen=True):
    """The renter does not want it any more."""


PurchaseEvent: TypeAlias = (
    CandidatesRanked
    | BidSigned
    | BidAcknowledged
    | BidFailed
    | AwardReceived
    | GrantReceived
    | CountersignatureRefused
    | ProviderReached
    | TimePassed
    | Cancelled
)

# --- effects ------------------------------------------------------------------------------------------------


class PlaceBid(msgspec.Struct, frozen=True):
    """Sign a bid on this candidate at its clock price, report `BidSigned`, and send it."""

    candidate: Candidate


class Countersign(msgspec.Struct, frozen=True):
    """Sign and send the countersignature of this award."""

    award_id: bytes
    bid: OpenBid


class RefuseAward(msgspec.Struct, frozen=True):
    """Answer that the award is not wanted."""

    award_id: bytes
    reason: str


class StartLease(msgspec.Struct, frozen=True):
    """The lease is ours: start its keeper."""

    bid: OpenBid


class Seek(msgspec.Struct, frozen=True):
    """Match the order book again, now, and report `CandidatesRanked`."""


PurchaseEffect: TypeAlias = PlaceBid | Countersign | RefuseAward | StartLease | Seek
PurchaseStep: TypeAlias = tuple[Purchase, tuple[PurchaseEffect, ...]]


def step(purchase: Purchase, event: PurchaseEvent, now: Millis) -> PurchaseStep:
    """Return the purchase after `event`, and the effects to carry out, in order."""
    match event:
        case CandidatesRanked():
            return _ranked(purchase, event, now)
        case BidSigned(bid):
            if purchase.phase is not Phase.SEEKING or bid.price > purchase.max_price:
                return purchase, ()
            deadline = Millis(now + ANSWER_MS)
            return msgspec.structs.replace(purchase, bid=bid, phase=Phase.BIDDING, deadline=deadline), ()
        case BidAcknowledged():
            if not _is_open(purchase, event.bid_id) or purchase.phase is not Phase.BIDDING:
                return purchase, ()
            closes_in_ms = min(max(0, event.closes_in_ms), 60_000)
            deadline = Millis(now + closes_in_ms + AWARD_SLACK_MS)
            return msgspec.structs.replace(purchase, phase=Phase.WAITING, deadline=deadline, note="bid placed"), ()
        case BidFailed():
            return _bid_failed(purchase, event, now)
        case AwardReceived():
            return _awarded(purchase, event, now)
        case GrantReceived(lease):
            return _granted(purchase, lease)
        case CountersignatureRefused(lease, detail):
            if purchase.phase is not Phase.COUNTERSIGNED or purchase.bid is None or purchase.bid.lease != lease:
                return purchase, ()
            return _seek_again(purchase, now, RETRY_MIN_MS, detail)
        case ProviderReached(provider):
            return _reached(purchase, provider)
        case TimePassed():
            return _time_passed(purchase, now)
        case Cancelled():
            if purchase.phase in (Phase.GRANTED, Phase.CANCELLED):
                return purchase, ()
            # A countersigned award binds; without a tunnel it costs nothing and ends by itself.
            return msgspec.structs.replace(purchase, phase=Phase.CANCELLED, deadline=None, note="cancelled"), ()
        case _:
            assert_never(event)


def _ranked(purchase: Purchase, event: CandidatesRanked, now: Millis) -> PurchaseStep:
    if purchase.phase is not Phase.SEEKING:
        return purchase, ()
    rests = tuple(rest for rest in purchase.rests if rest.until > now)
    purchase = msgspec.structs.replace(purchase, rests=rests)
    resting = {(rest.provider, rest.listing): rest for rest in rests}
    wake_at: list[int] = []
    for candidate in event.candidates:
        rest = resting.get((candidate.provider, candidate.listing))
        if rest is not None and rest.offer_id in (None, candidate.offer_id):
            wake_at.append(rest.until)
        elif candidate.price <= purchase.max_price:
            bidding = msgspec.structs.replace(purchase, attempts=purchase.attempts + 1, deadline=None)
            return bidding, (PlaceBid(candidate),)
        elif candidate.affordable_at is not None:
            wake_at.append(candidate.affordable_at)
    deadline = Millis(max(now + RETRY_MIN_MS, min(wake_at))) if wake_at else None
    note = _note(purchase, event, resting)
    return msgspec.structs.replace(purchase, deadline=deadline, note=note), ()


def _note(purchase: Purchase, event: CandidatesRanked, resting: dict[tuple[bytes, str], Rest]) -> str:
    if not event.candidates:
        return event.none_because or "no offer matches"
    if resting and purchase.note:
        return purchase.note
    if all(candidate.affordable_at is None for candidate in event.candidates):
        return "every matching offer's reserve price is above the highest price allowed"
    return "waiting for a matching offer's price to fall to the highest price allowed"


def _bid_failed(purchase: Purchase, event: BidFailed, now: Millis) -> PurchaseStep:
    if not _is_open(purchase, event.bid_id) or purchase.phase not in (
        Phase.BIDDING,
        Phase.WAITING,
        Phase.COUNTERSIGNED,
    ):
        return purchase, ()
    if event.reason is None:
        return _seek_again(purchase, now, REST_MS, event.detail, until_reached=True)
    if event.reason is RejectReason.STALE_OFFER:
        rest_ms = STALE_REST_MS
    elif event.retry_in_ms is not None:
        rest_ms = min(max(RETRY_MIN_MS, event.retry_in_ms), 3_600_000)
    elif event.reason is RejectReason.HOLD_LAPSED:
        rest_ms = RETRY_MIN_MS
    else:
        rest_ms = REST_MS
    why = f"{event.reason.value}: {event.detail}".rstrip(": ")
    return _seek_again(purchase, now, rest_ms, why, until_restocked=event.reason in STOCK_REASONS)


def _awarded(purchase: Purchase, event: AwardReceived, now: Millis) -> PurchaseStep:
    bid = purchase.bid
    if bid is None or not _is_open(purchase, event.bid_id) or purchase.phase not in (Phase.BIDDING, Phase.WAITING):
        return purchase, (RefuseAward(event.award_id, "not_wanted"),)
    if event.price > bid.price or event.price > purchase.max_price:
        refusal = RefuseAward(event.award_id, "price")
        purchase, effects = _seek_again(purchase, now, REST_MS, "the provider asked more than was bid")
        return purchase, (refusal, *effects)
    if event.objection:
        refusal = RefuseAward(event.award_id, "terms")
        purchase, effects = _seek_again(purchase, now, REST_MS, event.objection)
        return purchase, (refusal, *effects)
    taken = msgspec.structs.replace(
        purchase,
        phase=Phase.COUNTERSIGNED,
        deadline=Millis(now + GRANT_MS),
        note="won; the provider prepares the lease",
    )
    return taken, (Countersign(event.award_id, bid),)


def _granted(purchase: Purchase, lease: bytes) -> PurchaseStep:
    bid = purchase.bid
    if purchase.phase is not Phase.COUNTERSIGNED or bid is None or bid.lease != lease:
        return purchase, ()
    return msgspec.structs.replace(purchase, phase=Phase.GRANTED, deadline=None, note=""), (StartLease(bid),)


def _reached(purchase: Purchase, provider: bytes) -> PurchaseStep:
    rests = tuple(rest for rest in purchase.rests if not (rest.until_reached and rest.provider == provider))
    if rests == purchase.rests:
        return purchase, ()
    purchase = msgspec.structs.replace(purchase, rests=rests)
    if purchase.phase is not Phase.SEEKING:
        return purchase, ()
    return msgspec.structs.replace(purchase, deadline=None), (Seek(),)


def _time_passed(purchase: Purchase, now: Millis) -> PurchaseStep:
    if purchase.deadline is None or now < purchase.deadline:
        return purchase, ()
    match purchase.phase:
        case Phase.SEEKING:
            return msgspec.structs.replace(purchase, deadline=None), (Seek(),)
        case Phase.BIDDING:
            return _seek_again(purchase, now, REST_MS, "the provider did not answer the bid", until_reached=True)
        case Phase.WAITING:
            return _seek_again(purchase, now, RETRY_MIN_MS, "the provider's batch closed without an answer")
        case Phase.COUNTERSIGNED:
            return _seek_again(
                purchase, now, REST_MS, "the provider did not grant the lease in time", until_reached=True
            )
        case Phase.GRANTED | Phase.CANCELLED:
            return purchase, ()
        case _:
            assert_never(purchase.phase)


def _seek_again(
    purchase: Purchase,
    now: Millis,
    rest_ms: int,
    note: str,
    *,
    until_restocked: bool = False,
    until_reached: bool = False,
) -> PurchaseStep:
    bid = purchase.bid
    rests = purchase.rests
    note = note[:NOTE_SIZE_MAX]
    if bid is not None:
        offer_id = bid.offer_id if until_restocked else None
        rest = Rest(bid.provider, bid.listing, Millis(now + rest_ms), note, offer_id, until_reached)
        kept = tuple(other for other in rests if (other.provider, other.listing) != (bid.provider, bid.listing))
        rests = (rest, *kept)[:RESTS_MAX]
    seeking = msgspec.structs.replace(
        purchase, phase=Phase.SEEKING, bid=None, deadline=None, rests=rests, note=note
    )
    return seeking, (Seek(),)


def _is_open(purchase: Purchase, bid_id: bytes) -> bool:
    return purchase.bid is not None and purchase.bid.bid_id == bid_id
