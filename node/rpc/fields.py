"""The field types of the RPC, each with its unit and its range; JSON Schema shows both.

On this interface a node is its peer id (text), a hash or lease is hex, bytes are base64, money and prices are
integers as in `protocol.units`. Refuses floats.
"""

from typing import Annotated

import msgspec

from protocol.units import AMOUNT_MAX, DAY_MS, PRICE_MAX

DEVICES_MAX = 64
LIST_MAX = 64
COMMAND_MAX = 4096
"""Most arguments of one command."""

Price = Annotated[
    int, msgspec.Meta(ge=0, le=int(PRICE_MAX), description="nano-credits per device-second", title="Price")
]
Amount = Annotated[
    int, msgspec.Meta(ge=0, le=int(AMOUNT_MAX), description="nano-credits (10^-9 dollar)", title="Amount")
]
SignedAmount = Annotated[
    int,
    msgspec.Meta(
        ge=-int(AMOUNT_MAX), le=int(AMOUNT_MAX), description="nano-credits, signed", title="SignedAmount"
    ),
]
Millis = Annotated[int, msgspec.Meta(ge=0, le=4_102_444_800_000, description="Unix time in ms", title="Millis")]
DurationMs = Annotated[
    int, msgspec.Meta(ge=0, le=366 * DAY_MS, description="a length of time in ms", title="DurationMs")
]
Size = Annotated[int, msgspec.Meta(ge=0, lt=2**62, description="bytes", title="Size")]
Mib = Annotated[int, msgspec.Meta(ge=0, le=2**40, description="MiB", title="Mib")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31, title="Count")]
CpusMilli = Annotated[
    int, msgspec.Meta(ge=0, le=2**31, description="thousandths of a CPU core", title="CpusMilli")
]
Quantity = Annotated[int, msgspec.Meta(ge=1, le=DEVICES_MAX, description="number of devices", title="Quantity")]
Cuda = Annotated[int, msgspec.Meta(ge=0, le=999_999, description="12040 is CUDA 12.4; 0: any", title="Cuda")]

Hex32 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", description="32 bytes as hex", title="Hash")]
LeaseHex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", description="lease id as hex", title="Lease")]
PeerId = Annotated[
    str,
    msgspec.Meta(pattern="^[1-9A-HJ-NP-Za-km-z]{2,64}$", description="a node's libp2p peer id", title="PeerId"),
]
Token = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^([A-Za-z0-9][A-Za-z0-9._+:-]*)?$")]
"""A short machine word (a tier, a network mode), or "" where none is asked for."""
Label = Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A line for people, without control characters."""
Note = Annotated[str, msgspec.Meta(max_length=1024, pattern=r"^[^\x00-\x08\x0b-\x1f\x7f]*$")]

JobName = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")]
JobRef = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=64,
        pattern=r"^(-|[A-Za-z0-9][A-Za-z0-9._-]*)$",
        description="a job's id or name, a unique prefix of either, or '-' for the caller's last job",
        title="JobRef",
    ),
]
Argument = Annotated[str, msgspec.Meta(max_length=128 * 1024, pattern=r"^[^\x00]*$")]
Command = Annotated[tuple[Argument, ...], msgspec.Meta(min_length=1, max_length=COMMAND_MAX)]
VariableName = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
RelativePath = Annotated[
    str,
    msgspec.Meta(
        min_length=1, max_length=1024, pattern=r"^[^/\x00][^\x00]*$", description="below the job's directory"
    ),
]
LocalPath = Annotated[
    str,
    msgspec.Meta(
        min_length=1, max_length=4096, pattern=r"^/[^\x00]*$", description="an absolute path of the caller's"
    ),
]
"""The daemon never trusts it: files are read and written as the caller's uid."""
IGNORE_PATTERNS_MAX = 256
"""Most patterns of one input."""
IGNORE_PATTERN_SIZE_MAX = 256
"""Longest pattern in characters."""
IgnorePattern = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=IGNORE_PATTERN_SIZE_MAX,
        pattern=r"^[^\x00\n]*$",
        description="what to leave out, as in .gpunodeignore",
    ),
]
DeviceRefs = Annotated[
    tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=96)], ...],
    msgspec.Meta(max_length=DEVICES_MAX, description="UUIDs, unique prefixes of UUIDs, or indices; empty: all"),
]
Multiaddr = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]*$")]
