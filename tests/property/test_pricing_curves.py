"""Curves of every shape: never rising, never out of bounds, inverted exactly, re-anchored without a jump."""

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.strategies import NOW, curves

from protocol.bidding import BidNow, decide
from protocol.pricing import clock_price, lifted, repriced, time_of_price
from protocol.records import Curve
from protocol.units import Millis, Price

TIMES = st.one_of(st.integers(NOW - 10**8, NOW + 10**8), st.integers(NOW, NOW + 10**12))
EXAMPLES = settings(max_examples=150, deadline=None)


def one_tick_up(curve: Curve, at: int) -> int:
    """Return the price of the tick before `at`."""
    return clock_price(curve, Millis(at - curve.tick_ms))


@EXAMPLES
@given(curve=curves(), times=st.tuples(TIMES, TIMES))
def test_a_price_never_rises_and_stays_in_bounds(curve: Curve, times: tuple[int, int]) -> None:
    early, late = (clock_price(curve, Millis(at)) for at in sorted(times))
    assert curve.reserve <= late <= early <= curve.start


@EXAMPLES
@given(curve=curves(), at=TIMES)
def test_the_price_is_the_formula_of_the_specification(curve: Curve, at: int) -> None:
    t = max(0, at - curve.opened_at - curve.opening_ms)
    t -= t % curve.tick_ms
    q, r = divmod(t, curve.halving_ms)
    p = curve.start >> q
    assert clock_price(curve, Millis(at)) == max(curve.reserve, p - p * r // (2 * curve.halving_ms))


@EXAMPLES
@given(curve=curves(), price=st.one_of(st.integers(0, 10**15), st.integers(0, 5000)))
@example(curve=Curve(1, 0, NOW, 0, 300, 1000), price=0)
def test_the_time_of_a_price_is_the_exact_inverse(curve: Curve, price: int) -> None:
    at = time_of_price(curve, price)
    if at is None:
        assert price < curve.reserve
        return
    assert clock_price(curve, at) <= price
    if at == curve.opened_at:
        assert price >= curve.start
    else:
        assert clock_price(curve, Millis(at - 1)) > price
        assert (at - curve.opened_at - curve.opening_ms) % curve.tick_ms == 0


@EXAMPLES
@given(curve=curves(), at=TIMES)
def test_the_time_of_every_price_on_the_curve(curve: Curve, at: int) -> None:
    price = clock_price(curve, Millis(at))
    reached = time_of_price(curve, price)
    assert reached is not None
    assert reached <= max(at, curve.opened_at)
    assert clock_price(curve, reached) == price


@EXAMPLES
@given(curve=curves(), at=TIMES, units=st.integers(1, 64))
def test_a_lift_is_exact_to_a_tick(curve: Curve, at: int, units: int) -> None:
    before = clock_price(curve, Millis(at))
    exact = min(curve.start, before * (1000 + curve.lift_permille) ** units // 1000**units)
    after = lifted(curve, Millis(at), units)
    assert (after.start, after.reserve, after.opening_ms) == (curve.start, curve.reserve, 0)
    assert curve.reserve <= clock_price(after, Millis(at)) <= exact
    assert exact == curve.start or one_tick_up(after, at) > exact


@EXAMPLES
@given(curve=curves(), at=TIMES, bounds=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)))
def test_a_repriced_clock_goes_on_from_where_it_is(curve: Curve, at: int, bounds: tuple[int, int]) -> None:
    reserve, start = sorted(bounds)
    target = min(max(clock_price(curve, Millis(at)), reserve), start)
    after = repriced(curve, Millis(at), Price(start), Price(reserve))
    assert (after.start, after.reserve, after.opening_ms) == (start, reserve, 0)
    assert reserve <= clock_price(after, Millis(at)) <= target
    assert target == start or one_tick_up(after, at) >= target


@EXAMPLES
@given(
    curve=curves(),
    at=TIMES,
    later=st.integers(0, 10**9),
    reserve_permille=st.integers(0, 1000),
)
def test_the_same_start_keeps_the_slope(curve: Curve, at: int, later: int, reserve_permille: int) -> None:
    """A clock off its floor isn't disturbed when only the floor moves, and moves below it."""
    present = clock_price(curve, Millis(at))
    if present == curve.reserve:
        return
    reserve = present * reserve_permille // 1000
    after = repriced(curve, Millis(at), Price(curve.start), Price(reserve))
    bare = msgspec.structs.replace(curve, reserve=0)
    assert clock_price(after, Millis(at + later)) == max(reserve, clock_price(bare, Millis(at + later)))


@EXAMPLES
@given(curve=curves(), at=TIMES, cap=st.integers(0, 10**15))
def test_no_bid_is_above_the_cap(curve: Curve, at: int, cap: int) -> None:
    decision = decide(curve, Price(cap), Millis(at))
    if isinstance(decision, BidNow):
        assert decision.price == clock_price(curve, Millis(at)) <= cap
    else:
        assert clock_price(curve, Millis(at)) > cap
