"""Which bids may enter a batch, and the reason for every other.

Pure questions about one bid and the auction's state. Refuses to look at the other bids' prices: a bid that is
admitted competes in the batch, not here.
"""

from protocol.machines.auction_types import WAITING_BIDS_MAX, Auction, BidReceived, free_units
from protocol.pricing import clock_price
from protocol.records import Bid, BidRejected, RejectReason, Terms
from protocol.units import Amount, Millis, Price, cost, format_amount, format_duration, format_price

SKEW_MAX_MS = 5000
"""How far a bid's clock may be ahead, and how far below the clock a bid may be, as time."""


def objection(auction: Auction, event: BidReceived, now: Millis) -> BidRejected | None:
    """Return why the bid is not admitted, or None when it is."""
    for question in (_of_time, _of_terms, _of_standing, _of_credit, _of_stock, _of_price):
        found = question(auction, event, now)
        if found is not None:
            return found
    return None


def _of_time(auction: Auction, event: BidReceived, now: Millis) -> BidRejected | None:
    bid = event.bid
    if bid.signed_at > now + SKEW_MAX_MS:
        ahead = format_duration(bid.signed_at - now)
        return auction.rejection(
            event.bid_id,
            RejectReason.CLOCK_SKEW,
            now,
            detail=f"the renter's clock is {ahead} ahead of the provider's",
        )
    if bid.expires_at <= now:
        late = format_duration(now - bid.signed_at)
        return auction.rejection(
            event.bid_id,
            RejectReason.EXPIRED,
            now,
            detail=f"signed {late} ago by the provider's clock: one of the clocks is wrong, or the bid was late",
        )
    if event.bid.provider != auction.provider:
        return auction.rejection(event.bid_id, RejectReason.WRONG_PROVIDER, now)
    if bid.offer_id not in auction.recent_offers:
        return auction.rejection(
            event.bid_id,
            RejectReason.STALE_OFFER,
            now,
            detail="a newer offer of this listing is out",
            retry_at=now,
        )
    return None


def _of_terms(auction: Auction, event: BidReceived, now: Millis) -> BidRejected | None:
    bid, listing = event.bid, auction.listing
    terms, host, wanted = listing.terms, listing.host, event.bid.resources
    problem = ""
    if listing.simulated and not bid.allow_simulated:
        return auction.rejection(event.bid_id, RejectReason.SIMULATED, now, detail="the devices are simulated")
    if bid.quantity > len(auction.units):
        problem = f"{bid.quantity} devices wanted, the listing has {len(auction.units)}"
    elif not terms.lease_min_ms <= bid.duration_ms <= terms.lease_max_ms:
        shortest, longest = format_duration(terms.lease_min_ms), format_duration(terms.lease_max_ms)
        problem = f"a lease of {format_duration(bid.duration_ms)}; the terms allow {shortest} to {longest}"
    elif bid.isolation not in terms.isolation:
        problem = f"isolation {bid.isolation!r} is not among {', '.join(terms.isolation)}"
    elif bid.network_mode not in terms.network_modes:
        problem = f"network mode {bid.network_mode!r} is not among {', '.join(terms.network_modes)}"
    elif bid.max_spend < window_cost(terms, bid):
        needed, cap = format_amount(window_cost(terms, bid)), format_amount(bid.max_spend)
        problem = f"a spending cap of {cap}; the first window before vouchers are due costs {needed}"
    elif wanted.cpus_milli > host.cpus_milli * bid.quantity:
        problem = f"{wanted.cpus_milli / 1000:g} CPUs wanted, {host.cpus_milli * bid.quantity / 1000:g} offered"
    elif wanted.memory_mib > host.memory_mib * bid.quantity:
        problem = f"{wanted.memory_mib} MiB of memory wanted, {host.memory_mib * bid.quantity} offered"
    elif wanted.disk_mib > host.disk_mib * bid.quantity:
        problem = f"{wanted.disk_mib} MiB of disk wanted, {host.disk_mib * bid.quantity} offered"
    if problem:
        return auction.rejection(event.bid_id, RejectReason.TERMS, now, detail=problem)
    return None


def window_cost(terms: Terms, bid: Bid) -> Amount:
    """Return what a lease uses before its vouchers must have come: a cap below that promises nothing."""
    window_ms = min(bid.duration_ms, terms.voucher_interval_ms * terms.window_intervals)
    return cost(Price(bid.price), bid.quantity, window_ms)


def _of_standing(auction: Auction, event: BidReceived, now: Millis) -> BidRejected | None:
    for lapse in auction.lapses:
        if lapse.renter == event.renter and now < lapse.blocked_until:
            return auction.rejection(
                event.bid_id,
                RejectReason.BACKOFF,
                now,
                detail=f"{lapse.count} earlier awards were not countersigned in time",
                retry_at=lapse.blocked_until,
            )
    waiting = auction.waiting()
    others = [(other.renter, other.address_prefix) for other in waiting]
    others += [(hold.renter, hold.address_prefix) for hold in auction.holds]
    for renter, prefix in others:
        if renter == event.renter or (prefix and prefix == event.address_prefix):
            return auction.rejection(
                event.bid_id,
                RejectReason.DUPLICATE,
                now,
                detail="one bid at a time for each renter and address range",
                retry_at=auction.retry_when_decided(now),
            )
    if len(waiting) >= WAITING_BIDS_MAX:
        return auction.rejection(
            event.bid_id,
            RejectReason.OVERLOADED,
            now,
            detail="too many bids are waiting",
            retry_at=Millis(auction.batch.closes_at + 1) if auction.batch else auction.retry_when_free(now),
        )
    return None


def _of_credit(auction: Auction, event: BidReceived, now: Millis) -> BidRejected | None:
    bid = event.bid
    if bid.max_spend <= event.credit:
        return None
    per_second = cost(clock_price(auction.curve, now), bid.quantity, 1000)
    buys = format_duration(event.credit * 1000 // per_second) if per_second and event.credit > 0 else "no time"
    return auction.rejection(
        event.bid_id,
        RejectReason.CREDIT,
        now,
        detail=(
            f"{format_amount(bid.max_spend)} is more than the {format_amount(max(0, event.credit))} of credit "
            f"left with this provider, which buys {buys} at the price now; settle, or lower the spending cap"
        ),
    )


def not_selling(auction: Auction, bid_id: bytes, now: Millis) -> BidRejected:
    """Return the rejection for a bid that comes, or waits, while nothing may be sold."""
    if auction.paused:
        return auction.rejection(bid_id, RejectReason.PAUSED, now, detail="the owner has paused lending")
    return auction.rejection(
        bid_id,
        RejectReason.PAUSED,
        now,
        detail="the provider waits for leases that its restored database does not know",
        retry_at=auction.sells_from,
    )


def _of_stock(auction: Auction, event: BidReceived, now: Millis) -> BidRejected | None:
    if not auction.is_selling(now):
        return not_selling(auction, event.bid_id, now)
    free = len(free_units(auction))
    # While a batch of others is open, its devices are still free: the batch decides.
    if event.bid.quantity > free:
        return auction.rejection(
            event.bid_id,
            RejectReason.SOLD_OUT,
            now,
            detail=f"{event.bid.quantity} devices wanted, {free} free",
            retry_at=auction.retry_when_free(now),
        )
    return None


def _of_price(auction: Auction, event: BidReceived, now: Millis) -> BidRejected | None:
    bid = event.bid
    if bid.price >= clock_price(auction.curve, Millis(now + SKEW_MAX_MS)):
        return None
    return auction.rejection(
        event.bid_id,
        RejectReason.PRICE_TOO_LOW,
        now,
        detail=f"bid {format_price(bid.price)}, the clock is at {format_price(clock_price(auction.curve, now))}",
        retry_at=auction.time_of(bid.price, now),
    )
