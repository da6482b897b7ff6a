"""Price curves: what a listing costs at any moment, computed bit for bit alike by everyone.

An offer states a falling curve once, and the price falls without a message:

    start    ------.
                    `-.        .-.              a sale of k units lifts the clock by (1 + beta)^k,
                       `-.    /   `-.           at most to the start
                          `-./       `-.
    reserve  - - - - - - - - - - - - - -`------ the clock never goes below
             ^      ^        ^
             opened opening's sale
                    end

Everything is integer arithmetic on nano-credits and milliseconds; every rounding goes down, so that a curve that
was re-anchored (`lifted`, `repriced`) is never above the price it stands for. The formula of the start price
and the cost model of the reserve price are here too. Refuses floats, clocks, and to decide when a price changes.
"""

import msgspec

from protocol.device_models import device_model
from protocol.records.offer import Curve, DeviceSpec
from protocol.units import NANO, PRICE_MAX, SECONDS_PER_HOUR, Amount, Millis, Price

LOCATION_PERMILLE_MAX = 100_000
UNITS_MAX = 64
"""Most units in one sale: the most devices of a listing."""

TFLOPS_HOURLY = NANO * 2 // 100
"""Nano-credits per hour for one TFLOPS of FP32: the formula's a = 0.02."""
MEMORY_GB_HOURLY = NANO // 100
"""Nano-credits per hour for one GB of memory: the formula's b = 0.01."""


def clock_price(curve: Curve, at: Millis) -> Price:
    """Return the price of one device at the time `at`.

    The start price until the opening's end. Then, with t the time since, rounded down to the tick:
    `q, r = divmod(t, halving_ms); p = start >> q; price = max(reserve, p - p * r // (2 * halving_ms))`, which
    halves every `halving_ms`, linearly in between, and never rises.
    """
    return _price_after(curve, max(0, at - _anchor(curve)))


def time_of_price(curve: Curve, price: int) -> Millis | None:
    """Return the first moment at which the clock is at or below `price`; None when it never gets there.

    `opened_at` when the start price is low enough already. May lie in the past.
    """
    if price < curve.reserve:
        return None
    if price >= curve.start:
        return Millis(curve.opened_at)
    return Millis(_anchor(curve) + _elapsed_until(curve.start, price, curve.halving_ms, curve.tick_ms))


def lifted(curve: Curve, at: Millis, units: int) -> Curve:
    """Return the curve after a sale of `units` devices at the time `at`.

    The clock rises by (1 + lift_permille / 1000)^units, at most to the start price, and falls from there. The new
    curve has no opening: everyone has seen this listing. Raises ValueError for `units` outside 1..64.
    """
    if not 1 <= units <= UNITS_MAX:
        raise ValueError(f"a sale is of 1 to {UNITS_MAX} units, not {units}")
    price = int(clock_price(curve, at)) * (1000 + curve.lift_permille) ** units // 1000**units
    return _anchored(curve, at, min(price, curve.start))


def repriced(curve: Curve, at: Millis, start: Price, reserve: Price) -> Curve:
    """Return the curve with a new ceiling and floor, as of the time `at`.

    The clock goes on from its present value, clamped between the two: only a sale lifts it. The new curve has no
    opening. Raises ValueError when `reserve` is above `start` or a price is out of range.
    """
    if not 0 <= reserve <= start <= PRICE_MAX:
        raise ValueError(f"prices out of order: 0 <= {reserve} <= {start} <= {PRICE_MAX}")
    present = clock_price(curve, at)
    elapsed = max(0, at - _anchor(curve))
    if start == curve.start and present == _falling(start, elapsed, curve.halving_ms, curve.tick_ms):
        # Not on the floor, and the same slope: the clock just goes on. Searching the price again would lose the
        # phase within a tick, and at very small prices a plateau of many ticks.
        anchor = _anchor(curve)
        return msgspec.structs.replace(curve, reserve=int(reserve), opened_at=anchor, opening_ms=0)
    moved = msgspec.structs.replace(curve, start=int(start), reserve=int(reserve))
    return _anchored(moved, at, min(max(present, reserve), start))


def start_price(device: DeviceSpec, *, used: int, capacity: int, location_permille: int = 1000) -> Price | None:
    """Return the formula's start price for `device`, or None when its model is not in the table.

    `base = tflops * a + memory_gb * b; demand = 1 + used / capacity; start = base * demand * location`, with a and
    b weighted per model. `used` and `capacity` count the devices of the provider's whole site, else a single GPU
    would always have demand 1. None: the owner has to name a start price.
    """
    if not 0 <= used <= capacity or capacity < 1:
        raise ValueError(f"{used} of {capacity} devices in use")
    if not 1 <= location_permille <= LOCATION_PERMILLE_MAX:
        raise ValueError(f"a location factor of {location_permille} permille")
    model = device_model(device.model, device.mig_profile)
    if model is None:
        return None
    base = model.tflops_milli * TFLOPS_HOURLY // 1000 + model.memory_gb * MEMORY_GB_HOURLY
    hourly = base * model.weight_permille * (capacity + used) * location_permille // (capacity * 1_000_000)
    return Price(hourly // SECONDS_PER_HOUR)


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """What an hour of one device costs its owner. Amounts are nano-credits per hour where not said otherwise."""

    power_w: int
    pue_permille: int = 1000
    """Power usage effectiveness: power at the meter per power at the device, in thousandths."""
    tariff_per_kwh: Amount = Amount(0)
    """Nano-credits per kWh."""
    depreciation: Amount = Amount(0)
    bandwidth: Amount = Amount(0)
    commission: Amount = Amount(0)
    """Nobody takes one by default."""

    def __post_init__(self) -> None:
        if any(getattr(self, name) < 0 for name in self.__struct_fields__):
            raise ValueError("a cost must not be negative")


def reserve_price(costs: CostModel) -> Price:
    """Return the price at which a device earns its costs: electricity, depreciation, bandwidth, commission.

    Rounded down; raises ValueError when it is above `PRICE_MAX`.
    """
    electricity = costs.power_w * costs.pue_permille * costs.tariff_per_kwh // 1_000_000
    hourly = electricity + costs.depreciation + costs.bandwidth + costs.commission
    price = hourly // SECONDS_PER_HOUR
    if price > PRICE_MAX:
        raise ValueError("the costs are larger than any price")
    return Price(price)


def _anchor(curve: Curve) -> int:
    """Return when the fall begins: the opening's end."""
    return curve.opened_at + curve.opening_ms


def _price_after(curve: Curve, elapsed_ms: int) -> Price:
    return Price(max(curve.reserve, _falling(curve.start, elapsed_ms, curve.halving_ms, curve.tick_ms)))


def _falling(start: int, elapsed_ms: int, halving_ms: int, tick_ms: int) -> int:
    """Return the curve without its floor."""
    halvings, rest = divmod(elapsed_ms - elapsed_ms % tick_ms, halving_ms)
    price = start >> halvings
    return price - price * rest // (2 * halving_ms)


def _elapsed_until(start: int, price: int, halving_ms: int, tick_ms: int) -> int:
    """Return the first whole tick, in ms since the fall began, at which the floorless curve is <= `price`."""
    if price >= start:
        return 0
    # The last halving that begins above `price`: start >> q > price if and only if start // (price + 1) >= 2^q.
    halvings = (start // (price + 1)).bit_length() - 1
    top = start >> halvings
    # top - top * r // (2 * halving) <= price if and only if r >= 2 * halving * (top - price) / top.
    rest = min(-(-2 * halving_ms * (top - price) // top), halving_ms)
    elapsed = halvings * halving_ms + rest
    return -(-elapsed // tick_ms) * tick_ms


def _anchored(curve: Curve, at: Millis, price: int) -> Curve:
    """Return `curve` moved in time so that its clock stands at `price`, or one tick below, at the time `at`."""
    opened_at = at - _elapsed_until(curve.start, price, curve.halving_ms, curve.tick_ms)
    if opened_at < 0:
        raise ValueError(f"a curve that stands at {price} at {at} would have opened before 1970")
    return msgspec.structs.replace(curve, opened_at=opened_at, opening_ms=0)
