"""The field types that records are made of: each with its range, so that decoding checks it."""

from typing import Annotated

import msgspec

from protocol.identity import HASH_SIZE, KEY_SIZE, LEASE_ID_SIZE
from protocol.units import AMOUNT_MAX, DAY_MS, PRICE_MAX

MILLIS_MAX = 4_102_444_800_000
"""2100-01-01, in Unix ms: a date beyond it is nonsense."""
DURATION_MAX_MS = 366 * DAY_MS
DEVICES_MAX = 64
"""Most devices in one listing."""
LIST_MAX = 64
PERMILLE = 1000

Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_SIZE, max_length=HASH_SIZE)]
Key = Annotated[bytes, msgspec.Meta(min_length=KEY_SIZE, max_length=KEY_SIZE)]
LeaseId = Annotated[bytes, msgspec.Meta(min_length=LEASE_ID_SIZE, max_length=LEASE_ID_SIZE)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
PriceField = Annotated[int, msgspec.Meta(ge=0, le=int(PRICE_MAX))]
AmountField = Annotated[int, msgspec.Meta(ge=0, le=int(AMOUNT_MAX))]
SignedAmountField = Annotated[int, msgspec.Meta(ge=-int(AMOUNT_MAX), le=int(AMOUNT_MAX))]
MillisField = Annotated[int, msgspec.Meta(ge=0, le=MILLIS_MAX)]
DurationMs = Annotated[int, msgspec.Meta(ge=0, le=DURATION_MAX_MS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Quantity = Annotated[int, msgspec.Meta(ge=1, le=DEVICES_MAX)]
Mib = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Permille = Annotated[int, msgspec.Meta(ge=0, le=PERMILLE)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Token = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+:-]*$(?!\n)")]
"""A short machine word: a listing, a tier, an environment, a network mode."""
# `$` alone also matches before a last newline. Left out of lines for people: controls (C0, DEL, C1), line and
# paragraph separators, and the marks that turn the direction of text around.
Label = Annotated[
    str,
    msgspec.Meta(
        max_length=128,
        pattern=r"^[^\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]*$(?!\n)",
    ),
]
"""A line for people: nothing in it that a terminal would obey."""
Note = Annotated[
    str,
    msgspec.Meta(
        max_length=1024,
        pattern=r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]*$",
    ),
]
"""Lines for people: a `Label` that may hold newlines and tabs."""
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]*$(?!\n)")]
"""A multiaddr or a host:port, printable ASCII."""
