"""How lengths of time, sizes and money are read and written."""

from pathlib import Path

import pytest

from node.config import text
from protocol.units import DAY_MS, HOUR_MS, MINUTE_MS, price_from_hourly


@pytest.mark.parametrize(
    ("written", "duration_ms"),
    [
        ("0s", 0),
        ("300ms", 300),
        ("10s", 10_000),
        ("15m", 15 * MINUTE_MS),
        ("1h30m", 90 * MINUTE_MS),
        ("2d", 2 * DAY_MS),
        ("1d2h3m4s5ms", DAY_MS + 2 * HOUR_MS + 3 * MINUTE_MS + 4005),
    ],
)
def test_duration_is_read_and_written(written: str, duration_ms: int) -> None:
    assert text.parse_duration(written) == duration_ms
    assert text.parse_duration(text.write_duration(duration_ms)) == duration_ms


@pytest.mark.parametrize(
    "written", ["", "15", 15, "15 m", "1.5h", "-1s", "30m1h", "1h1h", "1y", None, True, "1m\n"]
)
def test_duration_without_a_clear_unit_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="length of time"):
        text.parse_duration(written)


@pytest.mark.parametrize(
    ("written", "size_mib"),
    [("512M", 512), ("40G", 40_960), ("40GiB", 40_960), ("80GB", 81_920), ("1T", 1_048_576)],
)
def test_size_is_read_and_written(written: str, size_mib: int) -> None:
    assert text.parse_size(written) == size_mib
    assert text.parse_size(text.write_size(size_mib)) == size_mib


@pytest.mark.parametrize("written", ["", "40", 40, "40g", "1.5G", "40K", "-1G", None])
def test_size_without_a_clear_unit_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="size such as"):
        text.parse_size(written)


@pytest.mark.parametrize("written", ["0.40", "0.38", "1", "0", "2.199", "0.0001"])
def test_price_is_read_exactly_and_written_shortest(written: str) -> None:
    price = text.parse_price(written)
    assert price == price_from_hourly(written)
    assert text.parse_price(float(written)) == price
    assert text.parse_price(text.write_price(price)) == price
    assert len(text.write_price(price)) <= len(written)


@pytest.mark.parametrize("written", ["", "free", "-0.1", "nan", "inf", True, None, [1], "1" * 50])
def test_price_that_is_no_number_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="dollars per GPU-hour"):
        text.parse_price(written)


@pytest.mark.parametrize(("written", "thousandths"), [(0.1, 100), ("1.234", 1234), (1, 1000), ("1000", 1_000_000)])
def test_thousandths_are_read_and_written(written: object, thousandths: int) -> None:
    assert text.parse_thousandths(written) == thousandths
    assert text.parse_thousandths(text.write_thousandths(thousandths)) == thousandths


@pytest.mark.parametrize("written", ["0.0001", -0.1, "nan", "inf", "x", None, False, "1e30"])
def test_finer_or_wrong_thousandths_are_refused(written: object) -> None:
    with pytest.raises(ValueError, match="at most three decimals"):
        text.parse_thousandths(written)


def test_credits_and_versions_are_read_and_written() -> None:
    assert text.parse_credits("0.25") == 250_000_000
    assert text.write_credits(100_000_000_000) == "100"
    assert text.write_credits(250_000_000) == "0.25"
    assert text.parse_compute_capability("8.9") == 89
    assert text.write_compute_capability(100) == "10.0"
    assert text.parse_cuda("12.4") == 12040
    assert text.write_cuda(13020) == "13.2"


@pytest.mark.parametrize("written", ["8", 8.0, "8.10", "eight", None])
def test_wrong_compute_capability_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="version"):
        text.parse_compute_capability(written)


def test_path_is_absolute_or_of_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert text.parse_path("~/x") == Path("/home/someone/x")
    assert text.parse_path(Path("/a")) == Path("/a")
    for wrong in ("x/y", "", 3, "/a\0b", "~no-such-user-here/x"):
        with pytest.raises(ValueError, match="path"):
            text.parse_path(wrong)


def test_secret_is_never_printed() -> None:
    secret = text.Secret("correct horse battery")
    assert "horse" not in repr(secret) + str(secret) + f"{secret}"
    assert secret.reveal() == b"correct horse battery"
    assert secret == text.Secret("correct horse battery") != text.Secret("another horse battery")
    with pytest.raises(TypeError, match="pickled"):
        secret.__reduce__()


@pytest.mark.parametrize("wrong", ["short", "x" * 129, "line\nbreak in the middle", "größer als sechzehn"])
def test_secret_that_is_weak_or_unprintable_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="16 to 128 printable ASCII"):
        text.Secret(wrong)
