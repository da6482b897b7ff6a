"""lend.*: the provider's side: which devices are sold, at which price, and taking them back."""

import enum

import msgspec

from node.rpc.fields import (
    Amount,
    Count,
    Cuda,
    DeviceRefs,
    DurationMs,
    Label,
    LeaseHex,
    Mib,
    Millis,
    PeerId,
    Price,
)
from node.rpc.method import Access, Call, Nothing, Params


class LendState(enum.StrEnum):
    """Whether this node sells."""

    ON = "on"
    OFF = "off"
    """Not selling, and the devices are not claimed; stays so across restarts."""
    PAUSED = "paused"
    """Not selling for a while; running leases go on."""


class DeviceUse(enum.StrEnum):
    """What a device is doing."""

    OFFERED = "offered"
    HELD = "held"
    """Awarded, not yet countersigned."""
    LEASED = "leased"
    RELEASING = "releasing"
    """Its lease ended; not free until its processes are gone and its memory is back at rest."""
    NOT_OFFERED = "not_offered"
    """See the device's `problem` or the lending state."""


class LeaseEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A lease of ours to somebody."""

    lease: LeaseHex
    renter: PeerId
    state: str
    """The keeper's phase: "staging", "running", "collecting" ..."""
    price: Price
    quantity: Count
    since: Millis
    until: Millis
    metered_ms: DurationMs
    paid: Amount
    """The highest voucher held."""


class DeviceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A device of this machine."""

    uuid: str
    index: int
    vendor: str
    model: str
    memory_mib: Mib
    memory_used_mib: Mib
    utilisation_percent: int | None
    temperature_c: int | None
    power_w: int | None
    driver: str
    cuda: Cuda
    health: str
    """"ok", "busy", "quarantined", "unsupported"."""
    problem: str
    """Why it is not ok or not offered, and what to do; ""."""
    simulated: bool
    use: DeviceUse
    listing: str
    """"" when it is in none."""
    price_now: Price | None
    reserve: Price | None
    lease: LeaseEntry | None


class LendStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The provider's side at a glance."""

    state: LendState
    detail: str
    devices: tuple[DeviceEntry, ...]
    leases: tuple[LeaseEntry, ...]
    isolation: tuple[str, ...]
    """Tiers that work here and are offered."""
    earned: Amount
    """By accepted receipts, ever."""


class DevicesResult(msgspec.Struct, frozen=True, kw_only=True):
    """Every device of this machine, measured now."""

    devices: tuple[DeviceEntry, ...]
    problem: str
    """Why there are none; ""."""


class DevicesParams(Params, frozen=True, kw_only=True):
    """Which devices."""

    devices: DeviceRefs = ()


class PauseParams(Params, frozen=True, kw_only=True):
    """For how long to sell nothing."""

    duration_ms: DurationMs | None = None
    """None: until lend.on."""


class ReclaimParams(Params, frozen=True, kw_only=True):
    """Which devices to take back."""

    devices: DeviceRefs = ()
    now: bool = False
    """Without the notice that the terms promise: the renters get the refund that the offer states."""


class ReclaimResult(msgspec.Struct, frozen=True, kw_only=True):
    """Leases that are being interrupted; the devices are free by `free_at`, and not offered until lend.on."""

    leases: tuple[LeaseHex, ...]
    free_at: Millis | None


class PriceParams(Params, frozen=True, kw_only=True):
    """Show prices, or set them for a model. Prices set by hand hold until `automatic`."""

    model: Label = ""
    """As in a requirement; "": every model. Must match exactly one listing to set a price."""
    start: Price | None = None
    reserve: Price | None = None
    automatic: bool = False
    """Go back to the formula; refused together with a price."""


class PriceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What one listing costs."""

    listing: str
    model: str
    quantity: Count
    free: Count
    start: Price
    reserve: Price
    price_now: Price
    automatic: bool
    """Whether the formula sets it."""
    simulated: bool


class PriceResult(msgspec.Struct, frozen=True, kw_only=True):
    """The prices after the call."""

    prices: tuple[PriceEntry, ...]


STATUS = Call(
    name="lend.status", params=Nothing, result=LendStatus, doc="Say what is lent, to whom, at what price."
)
ON = Call(
    name="lend.on",
    params=DevicesParams,
    result=LendStatus,
    doc="Sell these devices (or all).",
    access=Access.ADMIN,
)
OFF = Call(
    name="lend.off",
    params=DevicesParams,
    result=LendStatus,
    doc="Sell these devices (or all) no more; running leases go on to their end.",
    access=Access.ADMIN,
)
PAUSE = Call(
    name="lend.pause", params=PauseParams, result=LendStatus, doc="Sell nothing for a while.", access=Access.ADMIN
)
RECLAIM = Call(
    name="lend.reclaim",
    params=ReclaimParams,
    result=ReclaimResult,
    doc="Take devices back from their renters, with the notice of the terms.",
    access=Access.ADMIN,
)
DEVICES = Call(name="lend.devices", params=Nothing, result=DevicesResult, doc="Show this machine's devices.")
PRICE = Call(
    name="lend.price",
    params=PriceParams,
    result=PriceResult,
    doc="Show the prices of what is lent, or set them.",
    access=Access.ADMIN,
)
METHODS = (STATUS, ON, OFF, PAUSE, RECLAIM, DEVICES, PRICE)
