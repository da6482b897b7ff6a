"""Bidding: when to buy at a falling price.

The default, for a renter that knows no more than the curve and its cap: buy at the first price at or below the
cap. Waiting longer would save money only if nobody else bought first, which a curve doesn't tell.

Refuses ever to name a price above the cap.
"""

import msgspec

from protocol.pricing import clock_price, time_of_price
from protocol.records.offer import Curve
from protocol.units import Millis, Price


class BidNow(msgspec.Struct, frozen=True):
    """The clock is at or below the cap: bid its price, now."""

    price: Price


class WaitUntil(msgspec.Struct, frozen=True):
    """The clock reaches the cap at `at`, if nobody buys before."""

    at: Millis


class Unaffordable(msgspec.Struct, frozen=True):
    """The clock never reaches the cap: the reserve is above it."""

    reserve: Price


Decision = BidNow | WaitUntil | Unaffordable


def next_bid_at(curve: Curve, cap: Price, now: Millis) -> Millis | None:
    """Return the first moment from `now` on at which the clock is at or below `cap`; None when it never is."""
    return now if clock_price(curve, now) <= cap else time_of_price(curve, cap)


def decide(curve: Curve, cap: Price, now: Millis) -> Decision:
    """Return what to do about an offer with `curve` at the time `now`, under the hard cap `cap`.

    The price is the clock's: a bid above it gains nothing, since a provider serves it at its own clock price.
    """
    at = next_bid_at(curve, cap, now)
    if at is None:
        return Unaffordable(Price(curve.reserve))
    if at > now:
        return WaitUntil(at)
    return BidNow(clock_price(curve, now))
