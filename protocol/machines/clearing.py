"""Clearing a batch: who is served, in which order, and what the others are told.

Pure. The order of a contended batch is H(secret, batch, renter), which nobody can steer: the secret was
committed in the offer before the bids came, and the renter's id cannot be chosen after it.
"""

import msgspec
from blake3 import blake3

from protocol.identity import hash_bytes, lease_id
from protocol.machines.admission import not_selling
from protocol.machines.auction_types import (
    HOLD_MS,
    Auction,
    AuctionEffect,
    AuctionStep,
    BidReceived,
    Hold,
    Reject,
    RunnersUp,
    SendAward,
    Unit,
    free_units,
    publishing,
)
from protocol.records import ChainHead, RejectReason, Transcript
from protocol.units import Millis

RUNNERS_UP_GROUPS_MAX = 4


def lottery_commitment(secret: bytes) -> bytes:
    """Return the 32-byte commitment of an offer to its lottery secret."""
    return blake3(secret, derive_key_context="gpunode/1 lottery commitment").digest()


def lottery_rank(secret: bytes, batch: int, renter: bytes) -> bytes:
    """Return the rank of `renter` in a contended batch; the lowest is served first."""
    framed = secret + batch.to_bytes(8, "big") + renter
    return blake3(framed, derive_key_context="gpunode/1 lottery rank").digest()


def clear_batch(auction: Auction, fresh_secret: bytes, now: Millis) -> AuctionStep:
    """Close the open batch: hold devices for those served; keep or reject the others."""
    batch = auction.batch
    if batch is None:
        return auction, ()
    # Who waits from an older batch comes before this one.
    auction, effects = promote_runners_up(msgspec.structs.replace(auction, batch=None), now)
    in_time = [bid for bid in batch.bids if bid.bid.expires_at > now and auction.is_selling(now)]
    effects += tuple(_unserved(auction, bid, None, now) for bid in batch.bids if bid not in in_time)
    if sum(bid.bid.quantity for bid in in_time) <= len(free_units(auction)):
        for bid in in_time:
            auction, award = _hold(auction, bid, None, now)
            effects += (award,)
        return auction, effects
    ranked = sorted(in_time, key=lambda bid: lottery_rank(auction.secret, batch.number, bid.renter))
    transcript = Transcript(
        batch=batch.number,
        secret=auction.secret,
        bid_hashes=tuple(hash_bytes(bid.bid_id) for bid in ranked),
        served=_count_served(ranked, len(free_units(auction))),
    )
    # The secret is known from now on: the next offer commits to a fresh one.
    auction = msgspec.structs.replace(auction, secret=fresh_secret)
    group = RunnersUp(tuple(ranked), transcript)
    auction = msgspec.structs.replace(auction, runners_up=(*auction.runners_up, group))
    auction, served = promote_runners_up(auction, now)
    auction, dropped = _drop_oldest_group(auction, now)
    return auction, (*effects, *served, *dropped, *publishing(auction))


def promote_runners_up(auction: Auction, now: Millis) -> AuctionStep:
    """Hold free devices for waiting bids in rank order; reject those that no hold can still serve."""
    effects: list[AuctionEffect] = []
    groups: list[RunnersUp] = []
    for group in auction.runners_up:
        waiting: list[BidReceived] = []
        for bid in group.bids:
            if bid.bid.expires_at <= now or not auction.is_selling(now):
                effects.append(_unserved(auction, bid, group.transcript, now))
            elif bid.bid.quantity <= len(free_units(auction)):
                auction, award = _hold(auction, bid, group.transcript, now)
                effects.append(award)
            else:
                waiting.append(bid)
        if waiting:
            groups.append(RunnersUp(tuple(waiting), group.transcript))
    auction = msgspec.structs.replace(auction, runners_up=tuple(groups))
    auction, lost = reject_runners_up(auction, now)
    return auction, (*effects, *lost)


def reject_runners_up(auction: Auction, now: Millis) -> AuctionStep:
    """Keep the runners-up only while some hold may still lapse in their favour."""
    if auction.holds:
        return auction, ()
    effects = tuple(
        _unserved(auction, bid, group.transcript, now) for group in auction.runners_up for bid in group.bids
    )
    return msgspec.structs.replace(auction, runners_up=()), effects


def _drop_oldest_group(auction: Auction, now: Millis) -> AuctionStep:
    if len(auction.runners_up) <= RUNNERS_UP_GROUPS_MAX:
        return auction, ()
    oldest, *kept = auction.runners_up
    effects = tuple(_unserved(auction, bid, oldest.transcript, now) for bid in oldest.bids)
    return msgspec.structs.replace(auction, runners_up=tuple(kept)), effects


def _count_served(ranked: list[BidReceived], free: int) -> int:
    served = 0
    for bid in ranked:
        if bid.bid.quantity <= free:
            free -= bid.bid.quantity
            served += 1
    return served


def _hold(
    auction: Auction, event: BidReceived, transcript: Transcript | None, now: Millis
) -> tuple[Auction, SendAward]:
    bid, terms = event.bid, auction.listing.terms
    units: tuple[Unit, ...] = free_units(auction)[: bid.quantity]
    hold = Hold(
        lease=lease_id(auction.provider, event.renter, bid.nonce),
        bid_id=event.bid_id,
        renter=event.renter,
        price=event.pays,
        keys=tuple(unit.key for unit in units),
        # The job is told to end a checkpoint's time before that; the notice is for what comes before it runs.
        until=Millis(now + bid.duration_ms + terms.notice_ms + terms.checkpoint_ms),
        lapses_at=Millis(now + HOLD_MS),
        address_prefix=event.address_prefix,
    )
    heads = tuple(ChainHead(unit.key, unit.number, unit.head) for unit in units)
    return msgspec.structs.replace(auction, holds=(*auction.holds, hold)), SendAward(hold, heads, transcript)


def _unserved(auction: Auction, event: BidReceived, transcript: Transcript | None, now: Millis) -> Reject:
    """Return what a bid is told that was admitted and is not awarded."""
    if not auction.is_selling(now):
        rejection = not_selling(auction, event.bid_id, now)
    elif event.bid.expires_at <= now:
        detail = "the bid expired while it waited"
        rejection = auction.rejection(
            event.bid_id, RejectReason.EXPIRED, now, detail=detail, retry_at=now, transcript=transcript
        )
    else:
        rejection = auction.rejection(
            event.bid_id,
            RejectReason.LOST_LOTTERY,
            now,
            detail="the batch asked for more devices than there were",
            retry_at=auction.retry_when_free(now),
            transcript=transcript,
        )
    return Reject(event.renter, rejection)
