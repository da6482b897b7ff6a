"""quote and offers.*: what can be bought, at which price, and why not more."""

from typing import Annotated

import msgspec

from node.rpc.fields import (
    DEVICES_MAX,
    Amount,
    Count,
    CpusMilli,
    Cuda,
    DurationMs,
    Hex32,
    Label,
    Mib,
    Millis,
    PeerId,
    Price,
    Quantity,
    Token,
)
from node.rpc.method import Call, Params


class Requirement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a renter needs. Every field left out accepts anything."""

    quantity: Quantity = 1
    """Devices, all of one provider."""
    model: Label = ""
    """As people write it ("A100", "rtx 4090"): case and punctuation do not matter, every word must occur."""
    gpu_memory_mib: Mib = 0
    """At least, of each device."""
    cuda: Cuda = 0
    """At least, as the provider's driver reports it."""
    compute_capability: Annotated[int, msgspec.Meta(ge=0, le=9999)] = 0
    """At least; 80 is 8.0."""
    cpus_milli: CpusMilli | None = None
    """For all devices together; None: the share of its host that the chosen offer gives with its devices."""
    memory_mib: Mib | None = None
    disk_mib: Mib | None = None
    shm_mib: Mib = 0
    """/dev/shm; 0: half of the memory."""
    isolation: Token = ""
    """The least tier; "": the network's default."""
    network_mode: Token = "none"
    provider: PeerId | None = None
    region: Label = ""
    max_price: Price | None = None
    """Hard cap; None: the price of the best candidate when the plan is made."""
    allow_simulated: bool = False


class OfferEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A live offer, as this node knows it."""

    offer: Hex32
    provider: PeerId
    listing: str
    vendor: str
    model: str
    memory_mib: Mib
    compute_capability: int
    cuda: Cuda
    mig_profile: str
    quantity: Quantity
    free: Annotated[int, msgspec.Meta(ge=0, le=DEVICES_MAX)]
    start: Price
    reserve: Price
    price_now: Price
    """The clock price when the reply was made."""
    region: str
    site: str
    isolation: tuple[str, ...]
    lease_max_ms: DurationMs
    notice_ms: DurationMs
    bandwidth_mbps: Count
    """0: not measured."""
    expires_at: Millis
    simulated: bool
    own: bool
    """One of this node's own: shown, never bid on."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An offer that matches a requirement, priced for it."""

    offer: OfferEntry
    hourly: Amount
    """price_now x quantity for one hour."""
    total: Amount
    """price_now x quantity x duration."""
    affordable: bool
    """Whether price_now is at or below the requirement's max_price."""
    affordable_at: Millis | None = None
    """When the falling price reaches max_price, if it will before the offer expires."""


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """A reason for which offers do not match, and the smallest change that would have matched one."""

    reason: str
    """A stable short word: "model", "gpu_memory", "price", "free", "isolation", "simulated", "own" ..."""
    offers: Count
    detail: str
    """For people: "3 offers have 24 GiB or less"."""
    change: str
    """For people: "--gpu-memory 24G"; "" when no change of the requirement helps."""


class QuoteParams(Params, frozen=True, kw_only=True):
    """What is needed, and for how long."""

    requirement: Requirement
    duration_ms: DurationMs


class QuoteResult(msgspec.Struct, frozen=True, kw_only=True):
    """A priced plan: it binds nobody, prices fall and offers are sold."""

    quoted_at: Millis
    candidates: tuple[Candidate, ...]
    """Best first."""
    max_price: Price | None
    """What `jobs.run` would use when the requirement names none: the first candidate's price; None without one."""
    max_spend: Amount | None
    """max_price x quantity x duration."""
    rejections: tuple[Rejection, ...]
    offers_known: Count


class OffersListParams(Params, frozen=True, kw_only=True):
    """Which offers to show."""

    model: Label = ""
    simulated: bool = True


class OffersListResult(msgspec.Struct, frozen=True, kw_only=True):
    """Live offers, cheapest first."""

    listed_at: Millis
    offers: tuple[OfferEntry, ...]


QUOTE = Call(name="quote", params=QuoteParams, result=QuoteResult, doc="Price a requirement without buying.")
OFFERS = Call(name="offers.list", params=OffersListParams, result=OffersListResult, doc="List the live offers.")
METHODS = (QUOTE, OFFERS)
