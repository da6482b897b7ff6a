"""The falling price: the design's formula, its inverse, lifts and repricings, on readable numbers."""

import msgspec
import pytest

from protocol.bidding import BidNow, Unaffordable, WaitUntil, decide, next_bid_at
from protocol.pricing import UNITS_MAX, clock_price, lifted, repriced, time_of_price
from protocol.records import Curve
from protocol.units import PRICE_MAX, Millis, Price, price_from_hourly

OPENED = 1_790_000_000_000
HALVING = 30 * 60_000
CURVE = Curve(
    start=price_from_hourly("1.58"),
    reserve=price_from_hourly("0.38"),
    opened_at=OPENED,
    opening_ms=2000,
    tick_ms=300,
)
FALL = OPENED + 2000
"""When the price begins to fall."""


def price(curve: Curve, at: int) -> int:
    return clock_price(curve, Millis(at))


def test_the_price_is_the_start_price_until_the_opening_ends() -> None:
    for at in (0, OPENED - 1, OPENED, FALL - 1, FALL, FALL + 299):
        assert price(CURVE, at) == CURVE.start == 438_888


def test_the_price_halves_every_halving_and_is_linear_in_between() -> None:
    round_curve = msgspec.structs.replace(CURVE, start=1_000_000, reserve=0)
    assert [price(round_curve, FALL + part * HALVING // 4) for part in range(9)] == [
        1_000_000, 875_000, 750_000, 625_000, 500_000, 437_500, 375_000, 312_500, 250_000,
    ]  # fmt: skip


def test_the_price_steps_at_the_tick_only() -> None:
    # 438888 * 300 // (2 * 1800000) = 36 for the first tick.
    assert price(CURVE, FALL + 300) == price(CURVE, FALL + 599) == 438_888 - 36
    assert price(CURVE, FALL + 600) == 438_888 - 73


def test_the_price_ends_at_the_reserve() -> None:
    assert price(CURVE, FALL + 2 * HALVING) == 109_722
    assert price(CURVE, FALL + 2 * HALVING + HALVING // 4) == CURVE.reserve == 105_555
    assert price(CURVE, FALL + 10**15) == CURVE.reserve


def test_a_price_of_nothing_is_reached_and_stays() -> None:
    free = msgspec.structs.replace(CURVE, reserve=0)
    at = time_of_price(free, 0)
    assert at is not None
    assert price(free, at) == 0 < price(free, at - 1)
    assert price(free, 4_102_444_800_000) == 0


@pytest.mark.parametrize(("wanted", "after"), [(438_888, None), (438_887, 300), (438_852, 300), (438_851, 600)])
def test_the_time_of_a_price_is_the_first_tick_at_or_below_it(wanted: int, after: int | None) -> None:
    assert time_of_price(CURVE, wanted) == (OPENED if after is None else FALL + after)


def test_a_price_below_the_reserve_has_no_time() -> None:
    assert time_of_price(CURVE, CURVE.reserve - 1) is None
    at = time_of_price(CURVE, CURVE.reserve)
    assert at is not None
    assert price(CURVE, at) == CURVE.reserve < price(CURVE, at - 1)


def test_a_sale_lifts_the_clock_by_beta_for_each_unit() -> None:
    # Re-anchored to a whole tick, which here is worth at most 300 / 1800000 of the price, and always below.
    at = Millis(FALL + HALVING)
    before = price(CURVE, at)
    assert before == 219_444
    for units, exact in ((1, 241_388), (2, 265_527), (4, 321_287)):
        after = lifted(CURVE, at, units)
        assert exact - exact // 5000 < price(after, at) <= exact
        assert (after.start, after.reserve, after.opening_ms) == (CURVE.start, CURVE.reserve, 0)


def test_a_lift_ends_at_the_start_price_and_opens_nothing() -> None:
    at = Millis(FALL + 60_000)
    top = lifted(CURVE, at, 64)
    assert top == msgspec.structs.replace(CURVE, opened_at=at, opening_ms=0)
    assert price(top, at + 300) < CURVE.start


def test_a_sale_on_the_floor_lifts_from_the_floor() -> None:
    at = Millis(FALL + 50 * HALVING)
    lifted_once = lifted(CURVE, at, 1)
    assert 116_100 < price(lifted_once, at) <= 116_110
    assert price(lifted_once, at + HALVING) == CURVE.reserve


def test_a_lift_of_nothing_changes_no_price() -> None:
    flat = msgspec.structs.replace(CURVE, lift_permille=0)
    at = Millis(FALL + 700_000)
    after = lifted(flat, at, 3)
    assert [price(after, at + ms) for ms in (0, 300, 10**6)] == [
        price(flat, at + ms - 100) for ms in (0, 300, 10**6)
    ]


@pytest.mark.parametrize("units", [0, -1, UNITS_MAX + 1])
def test_a_sale_is_of_some_units(units: int) -> None:
    with pytest.raises(ValueError, match="1 to 64 units"):
        lifted(CURVE, Millis(FALL), units)


def test_repricing_moves_the_bounds_and_lets_the_clock_go_on() -> None:
    at = Millis(FALL + HALVING + 12_345)
    before = price(CURVE, at)
    higher = repriced(CURVE, at, Price(800_000), Price(100_000))
    assert before - before // 5000 < price(higher, at) <= before
    lower = repriced(CURVE, at, Price(200_000), Price(50_000))
    assert price(lower, at) == 200_000
    raised_floor = repriced(CURVE, at, CURVE_START, Price(300_000))
    assert price(raised_floor, at) == 300_000
    assert all(curve.opening_ms == 0 for curve in (higher, lower, raised_floor))


CURVE_START = Price(CURVE.start)


def test_repricing_to_the_same_bounds_changes_no_price_ever() -> None:
    curve = CURVE
    for at in range(OPENED, OPENED + 2 * HALVING, 299_999):
        curve = repriced(curve, Millis(at), CURVE_START, Price(CURVE.reserve))
    for at in range(OPENED, OPENED + 3 * HALVING, 100_003):
        assert price(curve, at) == price(CURVE, at)


def test_a_lower_reserve_is_approached_and_not_jumped_to() -> None:
    at = Millis(FALL + 20 * HALVING)
    assert price(CURVE, at) == 105_555
    after = repriced(CURVE, at, CURVE_START, Price(10_000))
    assert 105_540 < price(after, at) <= 105_555
    assert price(after, at + HALVING) <= 105_555 // 2 + 1
    assert price(after, at + 10 * HALVING) == 10_000


@pytest.mark.parametrize(("start", "reserve"), [(1, 2), (-1, -1), (PRICE_MAX + 1, 0), (5, -1)])
def test_prices_out_of_order_are_refused(start: int, reserve: int) -> None:
    with pytest.raises(ValueError, match="out of order"):
        repriced(CURVE, Millis(FALL), Price(start), Price(reserve))


def test_a_curve_does_not_open_before_1970() -> None:
    young = msgspec.structs.replace(CURVE, opened_at=0, reserve=0)
    with pytest.raises(ValueError, match="before 1970"):
        repriced(young, Millis(1), PRICE_MAX, Price(0))


def test_the_bidder_buys_at_the_first_price_within_its_cap() -> None:
    cap = Price(300_000)
    reached = next_bid_at(CURVE, cap, Millis(OPENED))
    assert reached is not None
    assert decide(CURVE, cap, Millis(OPENED)) == WaitUntil(reached)
    assert decide(CURVE, cap, Millis(reached - 1)) == WaitUntil(reached)
    assert decide(CURVE, cap, reached) == BidNow(clock_price(CURVE, reached))
    later = Millis(reached + HALVING)
    assert next_bid_at(CURVE, cap, later) == later
    assert decide(CURVE, cap, later) == BidNow(clock_price(CURVE, later))


def test_the_bidder_knows_a_cap_that_is_never_reached() -> None:
    cap = Price(CURVE.reserve - 1)
    assert next_bid_at(CURVE, cap, Millis(OPENED)) is None
    assert decide(CURVE, cap, Millis(OPENED)) == Unaffordable(Price(CURVE.reserve))


def test_the_bidder_takes_the_opening_price_within_its_cap() -> None:
    assert decide(CURVE, CURVE_START, Millis(OPENED)) == BidNow(CURVE_START)
