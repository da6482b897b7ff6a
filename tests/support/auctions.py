"""An auction of a few devices, and the bids that come to it, for tests of the machine alone."""

from typing import Any

from support.offers import NOW, a_curve

from protocol.identity import NodeId, hash_bytes
from protocol.machines.auction import step
from protocol.machines.auction_types import (
    Auction,
    AuctionEffect,
    AuctionEvent,
    BidReceived,
    CountersignatureReceived,
    Listing,
    ListingChanged,
    OfferSigned,
    TimeReached,
    Unit,
)
from protocol.records import Bid, ChainHead, DeviceSpec, HostSpec, Resources, Terms
from protocol.records.lease import GENESIS
from protocol.units import MINUTE_MS, Millis

PROVIDER = hash_bytes(b"provider")
OFFER = hash_bytes(b"the current offer")
SECRET = hash_bytes(b"secret")
FRESH = hash_bytes(b"fresh secret")


def renter(number: int) -> NodeId:
    """Return the id of renter `number`."""
    return NodeId(hash_bytes(f"renter {number}".encode()))


def key(number: int) -> bytes:
    """Return the chain key of device `number`."""
    return hash_bytes(f"device {number}".encode())


def fresh_units(count: int, first: int = 0) -> dict[bytes, Unit]:
    """Return devices without a history, as the shell reports them."""
    keys = [key(number) for number in range(first, first + count)]
    return {name: Unit(name, 0, GENESIS, True) for name in keys}


def a_listing(**fields: Any) -> Listing:
    """Return a listing of A100s, with `fields` changed."""
    usual: dict[str, Any] = {
        "name": "a100",
        "device": DeviceSpec("nvidia", "NVIDIA A100-SXM4-40GB", 40_960, 80),
        "host": HostSpec(cpus_milli=8000, memory_mib=65_536, disk_mib=200_000),
        "terms": Terms(isolation=("bubblewrap",), network_modes=("none", "internet")),
    }
    return Listing(**(usual | fields))


def an_auction(devices: int = 2, **fields: Any) -> Auction:
    """Return an auction past its opening, with `devices` free and one offer out."""
    usual: dict[str, Any] = {
        "provider": PROVIDER,
        "listing": a_listing(),
        "curve": a_curve(),
        "units": tuple(fresh_units(devices).values()),
        "secret": SECRET,
        "recent_offers": (OFFER,),
        "sequence": 1,
    }
    return Auction(**(usual | fields))


def a_bid(number: int, *, at: int = NOW, **fields: Any) -> Bid:
    """Return a bid of renter `number` that is good at `at`, with `fields` changed."""
    usual: dict[str, Any] = {
        "offer_id": OFFER,
        "listing": "a100",
        "provider": PROVIDER,
        "nonce": hash_bytes(f"nonce {number} {at} {fields.get('quantity', 1)}".encode())[:16],
        "price": 438_888,
        "quantity": 1,
        "duration_ms": 10 * MINUTE_MS,
        "max_spend": 10**9,
        "job_hash": hash_bytes(b"job"),
        "resources": Resources(cpus_milli=1000, memory_mib=1024, disk_mib=1024),
        "isolation": "bubblewrap",
        "tunnel_key": hash_bytes(b"tunnel"),
        "voucher_key": hash_bytes(b"voucher"),
        "signed_at": at,
        "expires_at": at + 10_000,
    }
    return Bid(**(usual | fields))


def a_bid_event(
    number: int, *, at: int = NOW, credit: int = 10**12, address_prefix: str = "", **fields: Any
) -> BidReceived:
    """Return the event that renter `number`'s bid makes when it comes in at `at`."""
    bid = a_bid(number, at=at, **fields)
    return BidReceived(hash_bytes(bid.nonce), renter(number), bid, Millis(at), credit, address_prefix)


class Table:
    """An auction at a clock that the test sets, and everything it has asked for so far."""

    def __init__(self, auction: Auction | None = None, now: int = NOW) -> None:
        self.auction = an_auction() if auction is None else auction
        self.now = Millis(now)
        self.effects: list[AuctionEffect] = []

    def apply(self, event: AuctionEvent) -> tuple[AuctionEffect, ...]:
        """Step, remember and return the effects."""
        self.auction, effects = step(self.auction, event, self.now)
        self.effects.extend(effects)
        return effects

    def bid(self, number: int, **fields: Any) -> tuple[AuctionEffect, ...]:
        """Let renter `number` bid now."""
        return self.apply(a_bid_event(number, at=self.now, **fields))

    def wait(self, ms: int) -> None:
        """Let time pass."""
        self.now = Millis(self.now + ms)

    def list_devices(self, *numbers: int, sellable: tuple[int, ...] | None = None) -> tuple[AuctionEffect, ...]:
        """Measure the machine again: it has devices `numbers`."""
        present = {key(number): Unit(key(number), 0, GENESIS, True) for number in numbers}
        chosen = numbers if sellable is None else sellable
        event = ListingChanged(self.auction.listing, present, frozenset(key(number) for number in chosen))
        return self.apply(event)

    def close_batch(self) -> tuple[AuctionEffect, ...]:
        """Let the open batch's time come."""
        if self.auction.batch is not None:
            self.now = Millis(max(self.now, self.auction.batch.closes_at))
        return self.tick()

    def tick(self) -> tuple[AuctionEffect, ...]:
        """Tell the auction that it is later."""
        return self.apply(TimeReached(FRESH))

    def heads(self, *numbers: int) -> tuple[ChainHead, ...]:
        """Return the chain heads of devices."""
        units = {unit.key: unit for unit in self.auction.units}
        found = [units[key(number)] for number in numbers]
        return tuple(ChainHead(unit.key, unit.number, unit.head) for unit in found)

    def countersign(self, lease: bytes) -> tuple[AuctionEffect, ...]:
        """Let the renter of a held or sold lease countersign it."""
        who = next(found.renter for found in (*self.auction.holds, *self.auction.leases) if found.lease == lease)
        return self.apply(CountersignatureReceived(lease, who, hash_bytes(b"countersigned" + lease)))

    def publish(self, offer_id: bytes) -> None:
        """Let the shell have signed an offer."""
        self.apply(OfferSigned(offer_id, self.auction.sequence + 1))

    def of(self, kind: type[Any]) -> list[Any]:
        """Return every effect of a kind so far, in order."""
        return [effect for effect in self.effects if isinstance(effect, kind)]
