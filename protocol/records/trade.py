"""From bid to lease: bid, its acknowledgement or rejection, award, countersignature."""

import enum
from typing import Annotated

import msgspec

from protocol.envelope import record
from protocol.records.fields import (
    DEVICES_MAX,
    AmountField,
    DurationMs,
    Hash,
    Key,
    LeaseId,
    MillisField,
    Nonce,
    Note,
    Number,
    PriceField,
    Quantity,
    Token,
)
from protocol.records.job import Resources
from protocol.records.offer import ChainHead, Terms

TRANSCRIPT_BIDS_MAX = 512


class RejectReason(enum.StrEnum):
    """Why a bid was not served. Losing is a value, never an exception."""

    PRICE_TOO_LOW = "price_too_low"
    SOLD_OUT = "sold_out"
    LOST_LOTTERY = "lost_lottery"
    STALE_OFFER = "stale_offer"
    CLOCK_SKEW = "clock_skew"
    EXPIRED = "expired"
    TERMS = "terms"
    CREDIT = "credit"
    DUPLICATE = "duplicate"
    BACKOFF = "backoff"
    PAUSED = "paused"
    SIMULATED = "simulated"
    WRONG_PROVIDER = "wrong_provider"
    OVERLOADED = "overloaded"
    HOLD_LAPSED = "hold_lapsed"
    PROVIDER_FAILED = "provider_failed"


@record("bid")
class Bid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A renter's wish to buy at the clock price it saw; names the keys of the lease it asks for."""

    offer_id: Hash
    listing: Token
    provider: Key
    nonce: Nonce
    price: PriceField
    quantity: Quantity
    duration_ms: DurationMs
    max_spend: AmountField
    """Cap of all vouchers of the lease."""
    job_hash: Hash
    resources: Resources
    isolation: Token
    network_mode: Token = "none"
    tunnel_key: Key
    """The renter's key of the lease's tunnel, delegated for this lease alone."""
    voucher_key: Key
    """The key that signs the lease's vouchers, delegated up to `max_spend`."""
    allow_simulated: bool = False
    signed_at: MillisField
    expires_at: MillisField


@record("bid_ack")
class BidAck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The provider has the bid, and in which batch; by the provider's clock."""

    bid_id: Hash
    batch: Number
    received_at: MillisField
    closes_at: MillisField


class Transcript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a loser needs to check a contended batch: rank = H(secret, batch, renter id), lowest first."""

    batch: Number
    secret: Hash
    """Opens the offer's `lottery_commitment`."""
    bid_hashes: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=TRANSCRIPT_BIDS_MAX)]
    """The ranked bids' record ids, hashed, in the order in which they were served."""
    served: Annotated[int, msgspec.Meta(ge=0, le=TRANSCRIPT_BIDS_MAX)]


@record("bid_rejected")
class BidRejected(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bid was not served; what the price is now, and when it pays to try again."""

    bid_id: Hash
    reason: RejectReason
    detail: Note = ""
    price_now: PriceField
    retry_at: MillisField | None = None
    transcript: Transcript | None = None


@record("award")
class Award(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A provider's hold for a bid, lapsing at `holds_until`. No lease, and no lift, before it is countersigned."""

    bid_id: Hash
    lease: LeaseId
    price: PriceField
    quantity: Quantity
    devices: Annotated[tuple[ChainHead, ...], msgspec.Meta(min_length=1, max_length=DEVICES_MAX)]
    """The devices held, by chain key, with the heads that the grant will continue."""
    terms: Terms
    tunnel_key: Key
    """The provider's key of the lease's tunnel."""
    simulated: bool
    holds_until: MillisField
    until: MillisField
    """When the lease ends at the latest."""
    transcript: Transcript | None = None


@record("countersignature")
class Countersignature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The renter takes the award: from here on both are bound."""

    award_id: Hash
    lease: LeaseId
    signed_at: MillisField
