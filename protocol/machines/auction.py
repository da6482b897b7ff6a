"""The provider's auction of one listing: who gets which devices, and at what price.

      bid ─▶ batch ─(tick)─▶ ranked ─▶ HELD ─(countersigned)─▶ GRANTING ─(keeper ready)─▶ LEASED ─(ended)─▶ free
        │                       │        │ lapsed: runner-up      │ keeper failed: free
        ▼                       ▼        ▼ promoted, same price   ▼ no entry in the chain
     rejected            lost_lottery   hold_lapsed        provider_failed

Rules. A unit (device) is in at most one hold or lease. A bid is served at min(its price, the clock at its
receipt). Nothing is lifted before a countersignature. A grant continues each device's chain by exactly one
entry, and so does its release. One hold per renter and per address prefix. When a batch asks for more than
there is, the order is H(secret, batch, renter), the secret is revealed in the transcript and replaced. Who lets a
hold lapse is told so, and passed over for a while; but not for what lapsed while the provider itself was away.

Refuses to sign, to send, to read a clock or to draw randomness: those come in events and go out as effects.
"""

from typing import assert_never

import msgspec

from protocol.envelope import content_id_of
from protocol.machines.admission import objection
from protocol.machines.auction_types import (
    Acknowledge,
    Auction,
    AuctionEffect,
    AuctionEvent,
    AuctionStep,
    BidReceived,
    CountersignatureReceived,
    EpochOpened,
    ForgetLease,
    Hold,
    KeeperFailed,
    KeeperReady,
    Lapse,
    LeaseEnded,
    LeasePhase,
    ListingChanged,
    OfferRefreshed,
    OfferSigned,
    OpenBatch,
    PauseChanged,
    RefuseCountersignature,
    Reject,
    Repriced,
    Resumed,
    SendGrant,
    SendRelease,
    SoldLease,
    StartKeeper,
    TimeReached,
    Unit,
    WithdrawOffer,
    free_units,
    publishing,
)
from protocol.machines.clearing import clear_batch, promote_runners_up, reject_runners_up
from protocol.pricing import clock_price, lifted, repriced
from protocol.records import BidAck, ChainEntry, Grant, RejectReason, Release
from protocol.units import Millis, Price

RECENT_OFFERS_MAX = 16
BACKOFF_BASE_MS = 1_000
"""For the first lapse, which a restart or a lost connection of an honest renter explains."""
BACKOFF_DOUBLINGS_MAX = 9
LAPSES_MAX = 256
"""Most renters remembered for having let a hold lapse."""


def step(auction: Auction, event: AuctionEvent, now: Millis) -> AuctionStep:
    """Return the auction after `event`, and the effects to carry out, in order."""
    match event:
        case BidReceived():
            return _bid_received(auction, event, now)
        case TimeReached():
            return _time_reached(auction, event, now)
        case CountersignatureReceived():
            return _countersigned(auction, event, now)
        case KeeperReady():
            return _keeper_ready(auction, event, now)
        case KeeperFailed():
            return _keeper_failed(auction, event, now)
        case LeaseEnded():
            return _lease_ended(auction, event, now)
        case Repriced(start, reserve):
            curve = repriced(auction.curve, now, Price(start), Price(reserve))
            if (curve.start, curve.reserve) == (auction.curve.start, auction.curve.reserve):
                return auction, ()
            auction = msgspec.structs.replace(auction, curve=curve)
            return auction, publishing(auction)
        case ListingChanged():
            return _listing_changed(auction, event)
        case PauseChanged(paused):
            if paused == auction.paused:
                return auction, ()
            auction = msgspec.structs.replace(auction, paused=paused)
            return auction, (WithdrawOffer(),) if paused else publishing(auction)
        case OfferRefreshed():
            return auction, publishing(auction)
        case Resumed():
            return _resumed(auction, now)
        case OfferSigned(offer_id, sequence):
            recent = (offer_id, *auction.recent_offers)[:RECENT_OFFERS_MAX]
            return msgspec.structs.replace(auction, recent_offers=recent, sequence=sequence), ()
        case EpochOpened(epoch, sells_from):
            return _epoch_opened(auction, epoch, sells_from)
        case _:
            assert_never(event)


def next_time(auction: Auction) -> Millis | None:
    """Return when the auction wants `TimeReached`, or None when it waits for others only."""
    times = [hold.lapses_at for hold in auction.holds]
    if auction.batch is not None:
        times.append(auction.batch.closes_at)
    return Millis(min(times)) if times else None


def _bid_received(auction: Auction, event: BidReceived, now: Millis) -> AuctionStep:
    rejection = objection(auction, event, now)
    if rejection is not None:
        return auction, (Reject(event.renter, rejection),)
    batch = auction.batch
    if batch is None:
        curve = auction.curve
        opening_ends = curve.opened_at + curve.opening_ms
        batch = OpenBatch(
            number=auction.batch_number + 1, closes_at=Millis(max(opening_ends, now + curve.tick_ms)), bids=()
        )
    pays = min(event.bid.price, clock_price(auction.curve, event.received_at))
    admitted = msgspec.structs.replace(event, pays=pays)
    batch = msgspec.structs.replace(batch, bids=(*batch.bids, admitted))
    auction = msgspec.structs.replace(auction, batch=batch, batch_number=batch.number)
    ack = BidAck(bid_id=event.bid_id, batch=batch.number, received_at=event.received_at, closes_at=batch.closes_at)
    return auction, (Acknowledge(ack),)


def _time_reached(auction: Auction, event: TimeReached, now: Millis) -> AuctionStep:
    auction, effects = _lapse_holds(auction, now)
    if auction.batch is not None and now >= auction.batch.closes_at:
        auction, cleared = clear_batch(auction, event.fresh_secret, now)
        effects = (*effects, *cleared)
    return auction, effects


def _lapse_holds(auction: Auction, now: Millis) -> AuctionStep:
    lapsed = [hold for hold in auction.holds if now >= hold.lapses_at]
    if not lapsed:
        return auction, ()
    effects: list[AuctionEffect] = []
    for hold in lapsed:
        lapses = _with_lapse(auction.lapses, hold.renter, now)
        auction = msgspec.structs.replace(
            auction, holds=tuple(other for other in auction.holds if other.lease != hold.lease), lapses=lapses
        )
        rejection = auction.rejection(
            hold.bid_id,
            RejectReason.HOLD_LAPSED,
            now,
            detail="the award was not countersigned in time",
            retry_at=lapses[0].blocked_until,
        )
        auction, promoted = promote_runners_up(auction, now)
        effects.extend((ForgetLease(hold.lease), Reject(hold.renter, rejection), *promoted))
    return auction, tuple(effects)


def _resumed(auction: Auction, now: Millis) -> AuctionStep:
    """Let everybody bid again whose time came meanwhile: an award made now could reach nobody in time."""
    lapsed = [hold for hold in auction.holds if now >= hold.lapses_at]
    told = [(hold.renter, hold.bid_id) for hold in lapsed]
    auction = msgspec.structs.replace(auction, holds=tuple(hold for hold in auction.holds if hold not in lapsed))
    if lapsed:
        told += [(bid.renter, bid.bid_id) for group in auction.runners_up for bid in group.bids]
        auction = msgspec.structs.replace(auction, runners_up=())
    if auction.batch is not None and now >= auction.batch.closes_at:
        told += [(bid.renter, bid.bid_id) for bid in auction.batch.bids]
        auction = msgspec.structs.replace(auction, batch=None)
    detail = "the provider was restarted meanwhile"
    effects: list[AuctionEffect] = [ForgetLease(hold.lease) for hold in lapsed]
    for renter, bid_id in told:
        rejection = auction.rejection(bid_id, RejectReason.PROVIDER_FAILED, now, detail=detail, retry_at=now)
        effects.append(Reject(renter, rejection))
    return auction, tuple(effects)


def _with_lapse(lapses: tuple[Lapse, ...], renter: bytes, now: Millis) -> tuple[Lapse, ...]:
    before = next((lapse.count for lapse in lapses if lapse.renter == renter), 0)
    wait_ms = BACKOFF_BASE_MS << min(before, BACKOFF_DOUBLINGS_MAX)
    kept = tuple(lapse for lapse in lapses if lapse.renter != renter)
    return (Lapse(renter, before + 1, Millis(now + wait_ms)), *kept)[:LAPSES_MAX]


def _countersigned(auction: Auction, event: CountersignatureReceived, now: Millis) -> AuctionStep:
    if any(lease.lease == event.lease for lease in auction.leases):
        return auction, ()  # delivered twice
    hold = next((hold for hold in auction.holds if hold.lease == event.lease), None)
    # A hold from before the database was found to be old must not become a lease on a leased device.
    is_late = hold is None or now >= hold.lapses_at or now < auction.sells_from
    if hold is None or is_late or hold.renter != event.renter:
        return auction, (RefuseCountersignature(event.lease, event.countersignature_id),)
    lease = SoldLease(
        lease=hold.lease,
        renter=hold.renter,
        bid_id=hold.bid_id,
        price=hold.price,
        keys=hold.keys,
        until=hold.until,
        countersignature_id=event.countersignature_id,
        phase=LeasePhase.GRANTING,
    )
    auction = msgspec.structs.replace(
        auction,
        holds=tuple(other for other in auction.holds if other.lease != hold.lease),
        leases=(*auction.leases, lease),
        curve=lifted(auction.curve, now, len(hold.keys)),
        lapses=tuple(lapse for lapse in auction.lapses if lapse.renter != hold.renter),
    )
    auction, rejected = reject_runners_up(auction, now)
    return auction, (StartKeeper(lease.lease), *publishing(auction), *rejected)


def _keeper_ready(auction: Auction, event: KeeperReady, now: Millis) -> AuctionStep:
    lease = _lease(auction, event.lease)
    if lease is None or lease.phase is not LeasePhase.GRANTING:
        return auction, ()
    grant = Grant(
        lease=lease.lease,
        entries=_entries(auction, lease.keys),
        epoch=auction.epoch,
        countersignature_id=lease.countersignature_id,
        commitment=event.commitment,
        starts_at=now,
        until=lease.until,
        simulated=auction.listing.simulated,
    )
    auction = _advanced(auction, lease.keys, content_id_of(grant))
    auction = _with_lease(auction, msgspec.structs.replace(lease, phase=LeasePhase.LEASED))
    return auction, (SendGrant(lease.renter, grant), *publishing(auction))


def _keeper_failed(auction: Auction, event: KeeperFailed, now: Millis) -> AuctionStep:
    lease = _lease(auction, event.lease)
    if lease is None or lease.phase is not LeasePhase.GRANTING:
        return auction, ()
    auction = _without_lease(auction, lease.lease)
    rejection = auction.rejection(lease.bid_id, RejectReason.PROVIDER_FAILED, now, detail=event.detail)
    return auction, (ForgetLease(lease.lease), Reject(lease.renter, rejection), *publishing(auction))


def _lease_ended(auction: Auction, event: LeaseEnded, now: Millis) -> AuctionStep:
    lease = _lease(auction, event.lease)
    if lease is None:
        return auction, ()
    if lease.phase is LeasePhase.GRANTING:
        auction = _without_lease(auction, lease.lease)
        return auction, (ForgetLease(lease.lease), *publishing(auction))
    release = Release(
        lease=lease.lease,
        entries=_entries(auction, lease.keys),
        epoch=auction.epoch,
        released_at=now,
        reason=event.reason,
    )
    auction = _without_lease(_advanced(auction, lease.keys, content_id_of(release)), lease.lease)
    return auction, (SendRelease(lease.renter, release), *publishing(auction))


def _listing_changed(auction: Auction, event: ListingChanged) -> AuctionStep:
    """Take the devices that are sellable now; a device that is sold stays listed until its release."""
    sold = {key for lease in auction.leases for key in lease.keys} | {
        key for hold in auction.holds for key in hold.keys
    }
    newest: dict[bytes, Unit] = {}
    for unit in (*auction.units, *auction.retired, *event.present.values()):
        # A device may have been sold in another listing meanwhile: its longest chain is the one that goes on.
        if unit.key not in newest or unit.number > newest[unit.key].number:
            newest[unit.key] = unit
    listed = [key for key in newest if key in event.present or key in sold]
    units = tuple(msgspec.structs.replace(newest[key], available=key in event.sellable) for key in listed)
    retired = tuple(
        msgspec.structs.replace(unit, available=False)
        for key, unit in newest.items()
        if key not in listed and unit.number
    )
    changed = msgspec.structs.replace(auction, units=units, retired=retired, listing=event.listing)
    if changed == auction:
        return auction, ()
    if not changed.units and not changed.paused:
        return changed, (WithdrawOffer(),)
    return changed, publishing(changed)


def _epoch_opened(auction: Auction, epoch: int, sells_from: Millis) -> AuctionStep:
    # Neither ever goes back: another peer may remember more.
    changed = msgspec.structs.replace(
        auction, epoch=max(epoch, auction.epoch), sells_from=max(sells_from, auction.sells_from)
    )
    if changed == auction:
        return auction, ()
    return changed, publishing(changed)


def _lease(auction: Auction, lease_id: bytes) -> SoldLease | None:
    return next((lease for lease in auction.leases if lease.lease == lease_id), None)


def _with_lease(auction: Auction, changed: SoldLease) -> Auction:
    leases = tuple(changed if lease.lease == changed.lease else lease for lease in auction.leases)
    return msgspec.structs.replace(auction, leases=leases)


def _without_lease(auction: Auction, lease_id: bytes) -> Auction:
    leases = tuple(lease for lease in auction.leases if lease.lease != lease_id)
    return msgspec.structs.replace(auction, leases=leases)


def _entries(auction: Auction, keys: tuple[bytes, ...]) -> tuple[ChainEntry, ...]:
    units = {unit.key: unit for unit in auction.units}
    return tuple(ChainEntry(key, units[key].number, units[key].head) for key in keys)


def _advanced(auction: Auction, keys: tuple[bytes, ...], head: bytes) -> Auction:
    """Return the auction with one more entry, whose content id is `head`, in the chains of `keys`."""
    units = tuple(
        Unit(unit.key, unit.number + 1, head, unit.available) if unit.key in keys else unit
        for unit in auction.units
    )
    return msgspec.structs.replace(auction, units=units)


def is_sound(auction: Auction) -> str | None:
    """Return which rule of this file the state breaks, or None. For tests and for loading from disk."""
    taken = [key for hold in auction.holds for key in hold.keys] + [
        key for lease in auction.leases for key in lease.keys
    ]
    if len(taken) != len(set(taken)):
        return "a device is in two holds or leases"
    if not set(taken) <= {unit.key for unit in auction.units}:
        return "an unknown device is held or leased"
    if auction.curve.reserve > auction.curve.start:
        return "the reserve price is above the start price"
    if len({hold.renter for hold in auction.holds}) != len(auction.holds):
        return "a renter has two holds"
    if {unit.key for unit in auction.units} & {unit.key for unit in auction.retired}:
        return "a device is listed and retired"
    if len(free_units(auction)) + len(set(taken)) > len(auction.units):
        return "more devices free or taken than there are"
    return None


__all__ = ["Auction", "Hold", "is_sound", "next_time", "step"]
