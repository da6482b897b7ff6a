"""Money and time as integers.

`Price` is nano-credits per device-second, `Amount` nano-credits, `Millis` Unix milliseconds (or a length of
time in milliseconds where the name ends in `_ms`). One credit is one US dollar unless a network says
otherwise. Money is never a float: it is rounded once, here, and always down; only what people read is rounded
to the nearest.
"""

from typing import NewType

Price = NewType("Price", int)
Amount = NewType("Amount", int)
Millis = NewType("Millis", int)

NANO = 1_000_000_000
SECONDS_PER_HOUR = 3600

SECOND_MS = 1000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

PRICE_MAX = Price(10**15)
"""Upper bound of a price: a million credits per device-second."""
AMOUNT_MAX = Amount(2**62)
"""Upper bound of an amount, so that the sum of two still fits the codec's 63-bit integers."""


def cost(price: Price, devices: int, duration_ms: int) -> Amount:
    """Return what `devices` devices cost for `duration_ms` at `price`, in nano-credits, rounded down."""
    if price < 0 or devices < 0 or duration_ms < 0:
        raise ValueError("price, devices and duration must not be negative")
    return Amount(price * devices * duration_ms // 1000)


def price_from_hourly(dollars_per_hour: float | str) -> Price:
    """Return the `Price` of `dollars_per_hour` credits per device-hour, rounded down.

    A text is read as a decimal number, so that "0.40" is exactly 0.4. Raises ValueError for anything that is
    not a finite, non-negative number within `PRICE_MAX`.
    """
    return Price(_nano_from_decimal(dollars_per_hour, SECONDS_PER_HOUR, PRICE_MAX))


def amount_from_credits(credits: float | str) -> Amount:
    """Return the `Amount` of a decimal number of credits, rounded down; ValueError as `price_from_hourly`."""
    return Amount(_nano_from_decimal(credits, 1, AMOUNT_MAX))


def format_price(price: int) -> str:
    """Return `price` as dollars per GPU-hour, for people: "$0.3800/h".

    Rounded to the nearest: 0.38 an hour is 105555.5 nano-credits a second, and must not read 0.3799.
    """
    tenth_mills = (price * SECONDS_PER_HOUR * 10_000 + NANO // 2) // NANO
    return f"${tenth_mills // 10_000}.{tenth_mills % 10_000:04d}/h"


def format_amount(amount: int) -> str:
    """Return `amount` as credits with six decimals, for people: "$0.000123"; rounded towards zero."""
    sign = "-" if amount < 0 else ""
    micro = abs(amount) // 1000
    return f"{sign}${micro // 1_000_000}.{micro % 1_000_000:06d}"


def format_duration(duration_ms: int) -> str:
    """Return a length of time for people, rounded down: "1h 02m", "3m 20s", "4.2s"."""
    if duration_ms < MINUTE_MS:
        return f"{duration_ms // 1000}.{duration_ms % 1000 // 100}s"
    if duration_ms < HOUR_MS:
        return f"{duration_ms // MINUTE_MS}m {duration_ms % MINUTE_MS // 1000:02d}s"
    return f"{duration_ms // HOUR_MS}h {duration_ms % HOUR_MS // MINUTE_MS:02d}m"


def _nano_from_decimal(value: float | str, divisor: int, bound: int) -> int:
    from decimal import Decimal, InvalidOperation  # noqa: PLC0415 - costs 5 ms, and only people's input needs it

    shown = repr(value)[:80]
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        raise ValueError(f"{shown} is not a number") from None
    if not number.is_finite() or number < 0:
        raise ValueError(f"{shown} is not a finite, non-negative number")
    # Before the arithmetic: 1e999999 is a number too, and its integer has a million digits.
    if number > bound:
        raise ValueError(f"{shown} is too large")
    nano = int(number * NANO / divisor)
    if nano > bound:
        raise ValueError(f"{shown} is too large")
    return nano
