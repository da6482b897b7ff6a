"""What the auction machine is made of: its state, the events it takes, the effects it asks for.

Only shapes, and the few questions that admission, clearing and the machine all ask. The state is persisted as
it stands here, so that a daemon killed at any point goes on from the last transaction.
"""

import enum
from typing import TypeAlias

import msgspec

from protocol.pricing import clock_price, time_of_price
from protocol.records import (
    Bid,
    BidAck,
    BidRejected,
    ChainHead,
    Curve,
    DeviceSpec,
    Grant,
    HostSpec,
    Offer,
    RejectReason,
    Release,
    Terms,
    Transcript,
)
from protocol.units import Millis

HOLD_MS = 2000
"""How long an award waits for its countersignature."""
WAITING_BIDS_MAX = 256
"""Most bids of one auction that wait for an award, so that its state always fits one record of the store."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What is sold, apart from price and availability."""

    name: str
    device: DeviceSpec
    host: HostSpec
    """The share of one device; a lease of k devices gets k times as much."""
    terms: Terms
    region: str = ""
    site: str = ""
    environments: tuple[str, ...] = ("host",)
    simulated: bool = False


class Unit(msgspec.Struct, frozen=True):
    """One device: its chain key, the number and previous hash of its next chain entry, and its availability."""

    key: bytes
    number: int
    head: bytes
    available: bool


class BidReceived(msgspec.Struct, frozen=True):
    """A verified bid came in."""

    bid_id: bytes
    renter: bytes
    bid: Bid
    received_at: Millis
    credit: int
    """What the ledger lets this renter still owe, in nano-credits."""
    address_prefix: str = ""
    """The renter's network (one hold each); "" for private addresses, where many honest nodes share one."""
    pays: int = 0
    """The price if it is served: set when it is admitted, so that no later sale or repricing changes it."""


class OpenBatch(msgspec.Struct, frozen=True):
    """Bids that are cleared together."""

    number: int
    closes_at: Millis
    bids: tuple[BidReceived, ...]


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Devices kept for an award until it is countersigned or lapses."""

    lease: bytes
    bid_id: bytes
    renter: bytes
    price: int
    keys: tuple[bytes, ...]
    until: Millis
    lapses_at: Millis
    address_prefix: str


class LeasePhase(enum.StrEnum):
    """Whether the lease's grant is in the chain yet."""

    GRANTING = "granting"
    LEASED = "leased"


class SoldLease(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that are sold."""

    lease: bytes
    renter: bytes
    bid_id: bytes
    price: int
    keys: tuple[bytes, ...]
    until: Millis
    countersignature_id: bytes
    phase: LeasePhase


class Lapse(msgspec.Struct, frozen=True):
    """A renter that let holds lapse, and until when it may not bid."""

    renter: bytes
    count: int
    blocked_until: Millis


class RunnersUp(msgspec.Struct, frozen=True):
    """Bids of a contended batch that wait for a hold of that batch to lapse, in rank order."""

    bids: tuple[BidReceived, ...]
    transcript: Transcript


class Auction(msgspec.Struct, frozen=True, kw_only=True):
    """The whole state of one listing's auction."""

    provider: bytes
    listing: Listing
    curve: Curve
    units: tuple[Unit, ...]
    retired: tuple[Unit, ...] = ()
    """Devices that are not here now. Forgetting one would begin its chain anew when it comes back."""
    secret: bytes
    """The lottery secret that the current offer commits to."""
    sequence: int = 0
    epoch: int = 0
    sells_from: Millis = Millis(0)
    paused: bool = False
    batch: OpenBatch | None = None
    batch_number: int = 0
    holds: tuple[Hold, ...] = ()
    leases: tuple[SoldLease, ...] = ()
    runners_up: tuple[RunnersUp, ...] = ()
    recent_offers: tuple[bytes, ...] = ()
    lapses: tuple[Lapse, ...] = ()

    def rejection(
        self,
        bid_id: bytes,
        reason: RejectReason,
        now: Millis,
        *,
        detail: str = "",
        retry_at: Millis | None = None,
        transcript: Transcript | None = None,
    ) -> BidRejected:
        """Return a rejection that states the price now."""
        return BidRejected(
            bid_id=bid_id,
            reason=reason,
            detail=detail,
            price_now=clock_price(self.curve, now),
            retry_at=retry_at,
            transcript=transcript,
        )

    def retry_when_free(self, now: Millis) -> Millis | None:
        """Return the earliest time at which a device may come free, or None when nothing says so."""
        times = [hold.lapses_at for hold in self.holds] + [lease.until for lease in self.leases]
        return Millis(max(now, min(times))) if times else None

    def retry_when_decided(self, now: Millis) -> Millis | None:
        """Return the earliest time at which a waiting bid or a hold is decided, or None when there is none."""
        times = [hold.lapses_at for hold in self.holds]
        if self.batch is not None:
            times.append(Millis(self.batch.closes_at + 1))
        return Millis(max(now, min(times))) if times else None

    def waiting(self) -> tuple[BidReceived, ...]:
        """Return the bids that may still be awarded: those of the open batch and the runners-up."""
        batch = self.batch.bids if self.batch is not None else ()
        return (*batch, *(bid for group in self.runners_up for bid in group.bids))

    def is_selling(self, now: Millis) -> bool:
        """Return whether anything may be sold: not paused, and no forgotten lease may be out."""
        return not self.paused and now >= self.sells_from

    def time_of(self, price: int, now: Millis) -> Millis | None:
        """Return when the clock will be at or below `price`; None when the reserve is above it."""
        at = time_of_price(self.curve, price)
        return None if at is None else Millis(max(now, at))


# --- events -------------------------------------------------------------------------------------------------


class TimeReached(msgspec.Struct, frozen=True):
    """It is `next_time` or later. `fresh_secret` (32 random bytes) replaces a revealed lottery secret."""

    fresh_secret: bytes


class CountersignatureReceived(msgspec.Struct, frozen=True):
    """A verified countersignature of our award came in."""

    lease: bytes
    renter: bytes
    countersignature_id: bytes


class KeeperReady(msgspec.Struct, frozen=True):
    """The lease's keeper listens; the grant may be signed. `commitment` hides renter, price and job."""

    lease: bytes
    commitment: bytes


class KeeperFailed(msgspec.Struct, frozen=True):
    """The lease's keeper could not be started."""

    lease: bytes
    detail: str


class LeaseEnded(msgspec.Struct, frozen=True):
    """The lease's job is gone from its devices: group empty, no process, memory at its baseline."""

    lease: bytes
    reason: str


class Repriced(msgspec.Struct, frozen=True):
    """The formula gave a new start and reserve price."""

    start: int
    reserve: int


class ListingChanged(msgspec.Struct, frozen=True):
    """The devices were measured again."""

    listing: Listing
    present: dict[bytes, Unit]
    """Every device of the listing that exists, by chain key; used for those not known yet."""
    sellable: frozenset[bytes]


class PauseChanged(msgspec.Struct, frozen=True):
    """The owner paused or resumed lending."""

    paused: bool


class OfferRefreshed(msgspec.Struct, frozen=True):
    """The offer is about to expire."""


class Resumed(msgspec.Struct, frozen=True):
    """The provider's daemon was away until now: renters could reach nobody, and may have heard nothing."""


class OfferSigned(msgspec.Struct, frozen=True):
    """The shell signed the offer that `PublishOffer` asked for."""

    offer_id: bytes
    sequence: int


class EpochOpened(msgspec.Struct, frozen=True):
    """The store was found to be an old copy: peers hold newer records of ours than we do."""

    epoch: int
    sells_from: Millis


AuctionEvent: TypeAlias = (
    BidReceived
    | TimeReached
    | CountersignatureReceived
    | KeeperReady
    | KeeperFailed
    | LeaseEnded
    | Repriced
    | ListingChanged
    | PauseChanged
    | OfferRefreshed
    | Resumed
    | OfferSigned
    | EpochOpened
)

# --- effects ------------------------------------------------------------------------------------------------


class Acknowledge(msgspec.Struct, frozen=True):
    """Answer the bid with this acknowledgement."""

    ack: BidAck


class Reject(msgspec.Struct, frozen=True):
    """Tell the renter why its bid was not served."""

    renter: bytes
    rejection: BidRejected


class SendAward(msgspec.Struct, frozen=True):
    """Sign and send an award for this hold; the shell makes the tunnel key."""

    hold: Hold
    devices: tuple[ChainHead, ...]
    transcript: Transcript | None


class RefuseCountersignature(msgspec.Struct, frozen=True):
    """The hold has lapsed or never was."""

    lease: bytes
    countersignature_id: bytes


class StartKeeper(msgspec.Struct, frozen=True):
    """Start the lease's keeper, then report `KeeperReady` or `KeeperFailed`."""

    lease: bytes


class SendGrant(msgspec.Struct, frozen=True):
    """Sign the grant and deliver it."""

    renter: bytes
    grant: Grant


class SendRelease(msgspec.Struct, frozen=True):
    """Sign the release and send it to the renter, who is the witness of this part of the chain."""

    renter: bytes
    release: Release


class ForgetLease(msgspec.Struct, frozen=True):
    """Note that the lease never began: its hold lapsed, or its keeper could not be started."""

    lease: bytes


class PublishOffer(msgspec.Struct, frozen=True):
    """Sign and gossip the offer as `offer_of` gives it, then report `OfferSigned`."""


class WithdrawOffer(msgspec.Struct, frozen=True):
    """Sign and gossip the withdrawal of the listing."""


AuctionEffect: TypeAlias = (
    Acknowledge
    | Reject
    | SendAward
    | RefuseCountersignature
    | StartKeeper
    | SendGrant
    | SendRelease
    | ForgetLease
    | PublishOffer
    | WithdrawOffer
)
AuctionStep: TypeAlias = tuple[Auction, tuple[AuctionEffect, ...]]


def free_units(auction: Auction) -> tuple[Unit, ...]:
    """Return the devices that can be held now, in the listing's order."""
    taken = {key for hold in auction.holds for key in hold.keys} | {
        key for lease in auction.leases for key in lease.keys
    }
    return tuple(unit for unit in auction.units if unit.available and unit.key not in taken)


def publishing(auction: Auction) -> tuple[AuctionEffect, ...]:
    """Return the effect that states the auction anew; none while there is nothing to state."""
    return () if auction.paused or not auction.units else (PublishOffer(),)


def offer_of(
    auction: Auction,
    *,
    sequence: int,
    lottery_commitment: bytes,
    addresses: tuple[str, ...],
    now: Millis,
    lifetime_ms: int,
) -> Offer:
    """Return the offer that states the auction as it is at `now`."""
    listing = auction.listing
    return Offer(
        listing=listing.name,
        sequence=sequence,
        epoch=auction.epoch,
        device=listing.device,
        quantity=len(auction.units),
        # A hold is no sale: it may lapse within seconds, and nobody would hear of that.
        free=0 if now < auction.sells_from else len(free_units(msgspec.structs.replace(auction, holds=()))),
        chain_heads=tuple(ChainHead(unit.key, unit.number, unit.head) for unit in auction.units),
        host=listing.host,
        region=listing.region,
        site=listing.site,
        curve=auction.curve,
        terms=listing.terms,
        environments=listing.environments,
        simulated=listing.simulated,
        lottery_commitment=lottery_commitment,
        addresses=addresses,
        issued_at=now,
        expires_at=Millis(now + lifetime_ms),
    )
