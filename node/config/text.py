"""How people write lengths of time, sizes, money and versions, and how the program holds them: as integers.

Each reader takes what TOML, an environment variable or a flag gives (text or a number), returns an integer in the
unit that its name says, and raises ValueError with what is allowed. Each writer is its reader's inverse. Refuses
to guess: a length of time without a unit is none.
"""

import re
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from pathlib import Path

from protocol.units import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    NANO,
    SECOND_MS,
    SECONDS_PER_HOUR,
    amount_from_credits,
    price_from_hourly,
)

_DURATION_UNITS = {"d": DAY_MS, "h": HOUR_MS, "m": MINUTE_MS, "s": SECOND_MS, "ms": 1}
_DURATION = re.compile(
    r"(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?(?:([0-9]{1,12})ms)?"
)
_SIZE_UNITS = {"T": 1024 * 1024, "G": 1024, "M": 1}
_SIZE = re.compile(r"([0-9]{1,9})([MGT])(?:i?B)?")
_VERSION = re.compile(r"([0-9]{1,2})\.([0-9]{1,2})")
SECRET_SIZE_MIN = 16
SECRET_SIZE_MAX = 128


class Secret:
    """A text that is never printed: its repr hides it, and it can't be pickled."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        if not SECRET_SIZE_MIN <= len(text) <= SECRET_SIZE_MAX or not text.isprintable() or not text.isascii():
            raise ValueError(f"{SECRET_SIZE_MIN} to {SECRET_SIZE_MAX} printable ASCII characters")
        self._text = text

    def reveal(self) -> bytes:
        """Return the secret itself."""
        return self._text.encode()

    def __repr__(self) -> str:
        return "Secret(not shown)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled")


def parse_duration(value: object) -> int:
    """Return the milliseconds of a text such as "15m", "1h30m" or "300ms" (units d, h, m, s, ms)."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) and value else None
    if match is None:
        raise ValueError('a length of time such as "15m" or "1h30m" (units d, h, m, s, ms)')
    return sum(
        int(part) * unit for part, unit in zip(match.groups(), _DURATION_UNITS.values(), strict=True) if part
    )


def write_duration(duration_ms: int) -> str:
    """Return the shortest text that `parse_duration` reads as `duration_ms`."""
    text = ""
    for unit, size_ms in _DURATION_UNITS.items():
        count, duration_ms = divmod(duration_ms, size_ms)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def parse_size(value: object) -> int:
    """Return the MiB of a text such as "512M", "40G" or "1T" (binary: 1G is 1024 MiB)."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError('a size such as "512M", "40G" or "1T"')
    return int(match[1]) * _SIZE_UNITS[match[2]]


def write_size(size_mib: int) -> str:
    """Return the shortest text that `parse_size` reads as `size_mib`."""
    unit = next(unit for unit, mib in _SIZE_UNITS.items() if size_mib % mib == 0 and (size_mib or mib == 1))
    return f"{size_mib // _SIZE_UNITS[unit]}{unit}"


def parse_price(value: object) -> int:
    """Return the nano-credits per second of a number (or a text of one) of dollars per GPU-hour."""
    try:
        return price_from_hourly(_number_text(value))
    except ValueError:
        raise ValueError('dollars per GPU-hour, such as 0.40 or "0.40"') from None


def write_price(price: int) -> str:
    """Return the shortest decimal of dollars per GPU-hour that `parse_price` reads as `price`."""
    hourly = Decimal(price * SECONDS_PER_HOUR) / NANO
    # parse_price rounds down: of all the decimals in [hourly, hourly + 1 nano-credit per second), the shortest.
    for digits in range(10):
        rounded = hourly.quantize(Decimal(1).scaleb(-digits), ROUND_CEILING)
        if price_from_hourly(str(rounded)) == price:
            return f"{rounded:f}"
    return f"{hourly:f}"


def parse_credits(value: object) -> int:
    """Return the nano-credits of a number (or a text of one) of dollars."""
    try:
        return amount_from_credits(_number_text(value))
    except ValueError:
        raise ValueError('an amount of dollars such as 100 or "0.25"') from None


def write_credits(amount: int) -> str:
    """Return the shortest decimal that `parse_credits` reads as `amount`."""
    return _plain(Decimal(amount) / NANO)


def parse_thousandths(value: object) -> int:
    """Return 1000 times a number (or a text of one) that has at most three decimals."""
    try:
        scaled = Decimal(_number_text(value)) * 1000
    except (InvalidOperation, ValueError):
        scaled = Decimal(-1)
    if not scaled.is_finite() or not 0 <= scaled <= NANO or scaled != scaled.to_integral_value():
        raise ValueError("a number with at most three decimals, such as 0.1")
    return int(scaled)


def write_thousandths(value: int) -> str:
    """Return the shortest decimal that `parse_thousandths` reads as `value`."""
    return _plain(Decimal(value) / 1000)


def parse_compute_capability(value: object) -> int:
    """Return major x 10 + minor of a text such as "8.0"."""
    major, minor = _parse_version(value, "8.0")
    if minor > 9:
        raise ValueError('a version such as "8.0"')
    return major * 10 + minor


def write_compute_capability(value: int) -> str:
    """Return the text that `parse_compute_capability` reads as `value`."""
    return f"{value // 10}.{value % 10}"


def parse_cuda(value: object) -> int:
    """Return major x 1000 + minor x 10 of a text such as "12.4", as NVML counts CUDA versions."""
    major, minor = _parse_version(value, "12.4")
    return major * 1000 + minor * 10


def write_cuda(value: int) -> str:
    """Return the text that `parse_cuda` reads as `value`."""
    return f"{value // 1000}.{value % 1000 // 10}"


def parse_path(value: object) -> Path:
    """Return an absolute path; "~" is the home directory."""
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str) and value and "\0" not in value:
        try:
            path = Path(value).expanduser()
        except RuntimeError:
            raise ValueError("a path of a home directory that exists") from None
        if path.is_absolute():
            return path
    raise ValueError('an absolute path, or one that begins with "~"')


def parse_secret(value: object) -> Secret:
    """Return a secret text of 16 to 128 printable ASCII characters."""
    return Secret(value if isinstance(value, str) else "")


def _parse_version(value: object, example: str) -> tuple[int, int]:
    match = _VERSION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f'a version such as "{example}"')
    return int(match[1]), int(match[2])


def _number_text(value: object) -> str:
    """Return the decimal text of a number; ValueError for anything else (True is no number here)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str) or len(str(value)) > 40:
        raise ValueError("not a number")
    return str(value)


def _plain(number: Decimal) -> str:
    """Return a decimal without exponent and trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
