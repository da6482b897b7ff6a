"""Money and time: exact in, rounded down once, readable out."""

import pytest

from protocol.units import (
    AMOUNT_MAX,
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    PRICE_MAX,
    Price,
    amount_from_credits,
    cost,
    format_amount,
    format_duration,
    format_price,
    price_from_hourly,
)


@pytest.mark.parametrize(
    ("text", "price"),
    [
        ("0", 0), ("3.6", 1_000_000), ("0.36", 100_000), ("0.40", 111_111), ("0.38", 105_555), (0.4, 111_111),
        (0.1 + 0.2, 83_333), ("1e-3", 277), (3600, 1_000_000_000), ("3600000000", 10**15), ("0.0000035999", 0),
    ],
)  # fmt: skip
def test_a_price_an_hour_becomes_one_a_second_rounded_down(text: str, price: int) -> None:
    assert price_from_hourly(text) == price


@pytest.mark.parametrize(
    "text",
    ["", "x", "-1", "-0.0001", "nan", "sNaN", "inf", "-inf", "1e999", "1e999999", "1e9999999999999999999",
     "3600000004", "0x10", "1,5", "$1", float("nan"), float("inf"), "9" * 5000],
)  # fmt: skip
def test_what_is_no_price(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a|is too large") as caught:
        price_from_hourly(text)
    assert len(str(caught.value)) < 200


def test_credits_are_exact_to_the_nano() -> None:
    assert amount_from_credits("1") == 10**9
    assert amount_from_credits("0.123456789") == 123_456_789
    assert amount_from_credits("0.1234567899") == 123_456_789
    assert amount_from_credits("4611686018.427387904") == AMOUNT_MAX
    with pytest.raises(ValueError, match="too large"):
        amount_from_credits("4611686018.427387905")


@pytest.mark.parametrize("text", ["0.38", "0.40", "0.79", "1.58", "2.5", "0.0001", "123.4567", "0.3333"])
def test_a_price_reads_as_it_was_written(text: str) -> None:
    assert format_price(price_from_hourly(text)) == f"${float(text):.4f}/h"


def test_amounts_read_as_credits() -> None:
    assert format_amount(123_999) == "$0.000123"
    assert format_amount(-123_999) == "-$0.000123"
    assert format_amount(12_345_678_900_000) == "$12345.678900"
    assert format_amount(0) == "$0.000000"


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [
        (0, "0.0s"), (4200, "4.2s"), (59_949, "59.9s"), (MINUTE_MS, "1m 00s"), (200_000, "3m 20s"),
        (HOUR_MS - 1, "59m 59s"), (HOUR_MS, "1h 00m"), (62 * MINUTE_MS, "1h 02m"), (3 * DAY_MS, "72h 00m"),
    ],
)  # fmt: skip
def test_durations_read_as_two_units(duration_ms: int, text: str) -> None:
    assert format_duration(duration_ms) == text


def test_the_last_tenth_below_a_minute_is_no_sixty_seconds() -> None:
    assert format_duration(59_999) == "59.9s"


def test_cost_is_price_times_devices_times_time_rounded_down() -> None:
    assert cost(Price(105_555), 2, HOUR_MS) == 105_555 * 2 * 3600
    assert cost(Price(1), 1, 999) == 0
    assert cost(Price(1), 1, 1999) == 1
    assert cost(PRICE_MAX, 64, 0) == 0


@pytest.mark.parametrize("arguments", [(-1, 1, 1), (1, -1, 1), (1, 1, -1)])
def test_nothing_costs_less_than_nothing(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        cost(Price(arguments[0]), arguments[1], arguments[2])
