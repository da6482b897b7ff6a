"""What a provider sells: the offer, its price curve, its terms; and the withdrawal of a listing."""

from typing import Annotated

import msgspec

from protocol.envelope import record
from protocol.records.fields import (
    DEVICES_MAX,
    LIST_MAX,
    Address,
    Count,
    DurationMs,
    Hash,
    Label,
    Mib,
    MillisField,
    Number,
    Permille,
    PriceField,
    Quantity,
    Token,
)

OFFER_LIFETIME_MAX_MS = 60 * 60 * 1000
"""Longest life of an offer; providers re-issue theirs every few minutes."""


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A falling price that everyone computes alike; `protocol.pricing.clock_price` evaluates it."""

    start: PriceField
    reserve: PriceField
    opened_at: MillisField
    opening_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 2000
    tick_ms: Annotated[int, msgspec.Meta(ge=50, le=60_000)] = 300
    halving_ms: Annotated[int, msgspec.Meta(ge=1000, le=30 * 24 * 3600 * 1000)] = 30 * 60 * 1000
    lift_permille: Permille = 100
    """By how much a sale of one unit lifts the clock (beta of the design), in thousandths."""

    def __post_init__(self) -> None:
        if self.reserve > self.start:
            raise ValueError("the reserve price is above the start price")


class DeviceSpec(msgspec.Struct, frozen=True):
    """What every device of a listing is."""

    vendor: Token
    model: Label
    memory_mib: Mib
    compute_capability: Annotated[int, msgspec.Meta(ge=0, le=9999)]
    """Major x 10 + minor: 80 for an A100. 0 where the notion does not apply."""
    driver: Label = ""
    cuda: Annotated[int, msgspec.Meta(ge=0, le=999_999)] = 0
    """As NVML reports it: 12040 is CUDA 12.4."""
    mig_profile: Label = ""
    interconnect: Label = ""


class HostSpec(msgspec.Struct, frozen=True):
    """What a lease may use of the host for each device."""

    cpus_milli: Count
    memory_mib: Mib
    disk_mib: Mib
    bandwidth_mbps: Count = 0
    """0: not measured."""


class Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What both sides can rely on. Embedded in the award: nobody is bound by terms it can't read."""

    lease_min_ms: DurationMs = 60_000
    lease_max_ms: DurationMs = 24 * 3600 * 1000
    notice_ms: DurationMs = 120_000
    checkpoint_ms: DurationMs = 60_000
    refund_permille: Permille = 0
    grace_ms: DurationMs = 600_000
    grace_price_permille: Permille = 1000
    """Price of a frozen job during grace, in thousandths of the lease's price."""
    staging_price_permille: Permille = 0
    retention_ms: DurationMs = 24 * 3600 * 1000
    disk_price: PriceField = 0
    voucher_interval_ms: Annotated[int, msgspec.Meta(ge=100, le=3_600_000)] = 10_000
    window_intervals: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 3
    """The job is frozen when vouchers lag by this many intervals."""
    isolation: Annotated[tuple[Token, ...], msgspec.Meta(min_length=1, max_length=8)] = ("bubblewrap",)
    network_modes: Annotated[tuple[Token, ...], msgspec.Meta(min_length=1, max_length=8)] = ("none",)
    power_limit_w: Count = 0
    """0: the card's own limit."""


class ChainHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest entry of one device's grant chain, as it was when the offer was signed."""

    key: Hash
    """Chain key: BLAKE3 of the provider's id and the parent GPU's UUID."""
    number: Number
    """Of the entry that comes next; 0 for a chain without entries."""
    head: Hash
    """Content id of the newest entry; GENESIS for a chain without entries."""


@record("offer")
class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A signed statement of a listing. Of two offers of a listing, the higher (epoch, sequence) stands."""

    listing: Token
    sequence: Number
    epoch: Number = 0
    device: DeviceSpec
    quantity: Quantity
    free: Annotated[int, msgspec.Meta(ge=0, le=DEVICES_MAX)]
    chain_heads: Annotated[tuple[ChainHead, ...], msgspec.Meta(max_length=DEVICES_MAX)] = ()
    host: HostSpec
    region: Label = ""
    site: Label = ""
    curve: Curve
    terms: Terms
    environments: Annotated[tuple[Token, ...], msgspec.Meta(max_length=LIST_MAX)] = ("host",)
    images: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=LIST_MAX)] = ()
    simulated: bool = False
    lottery_commitment: Hash
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=8)] = ()
    """Multiaddrs at which the provider's daemon may be dialled."""
    recovery_commitment: Hash | None = None
    issued_at: MillisField
    expires_at: MillisField

    def __post_init__(self) -> None:
        if self.free > self.quantity:
            raise ValueError("more devices free than there are")
        if not self.issued_at < self.expires_at <= self.issued_at + OFFER_LIFETIME_MAX_MS:
            raise ValueError("an offer lives between 1 ms and an hour")


@record("withdrawal")
class Withdrawal(msgspec.Struct, frozen=True, kw_only=True):
    """The listing is off the market; stands until `expires_at` against offers of a lower sequence."""

    listing: Token
    sequence: Number
    epoch: Number = 0
    issued_at: MillisField
    expires_at: MillisField

    def __post_init__(self) -> None:
        if not self.issued_at < self.expires_at <= self.issued_at + OFFER_LIFETIME_MAX_MS:
            raise ValueError("a withdrawal lives between 1 ms and an hour")
