"""One listing's auction: steps the machine, and turns its effects into rows, records and messages.

    event ─▶ step ─▶ plan (sealed records, rows) ─▶ one transaction ─▶ gossip, outbox, keepers

Whatever an effect needs that the pure machine must not have (keys, secrets, signatures, addresses) is added
here. Refuses to decide: it has no rule of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import trio

from node.errors import StoreError
from node.log import get_logger
from node.market.context import Context, new_lease_key, random_bytes
from node.market.leases import LeaseState
from node.market.outbox import Outbox
from node.store import LeaseRow, LeaseSecretRow, ListingRow, OutboxRow, Transaction
from protocol import codec
from protocol.envelope import Sealed, open_as_untrusted
from protocol.machines.auction import Auction, next_time, step
from protocol.machines.auction_types import (
    Acknowledge,
    AuctionEffect,
    AuctionEvent,
    ForgetLease,
    OfferSigned,
    PublishOffer,
    RefuseCountersignature,
    Reject,
    SendAward,
    SendGrant,
    SendRelease,
    StartKeeper,
    TimeReached,
    WithdrawOffer,
    offer_of,
    publishing,
)
from protocol.machines.clearing import lottery_commitment
from protocol.records import Award, Bid, GrantDelivery, Refusal, Withdrawal
from protocol.units import DAY_MS, MINUTE_MS, Millis

log = get_logger(__name__)

OFFERS_TOPIC = "offers"
OFFER_LIFETIME_MS = 5 * MINUTE_MS
RELEASE_LIFETIME_MS = DAY_MS
REJECTION_LIFETIME_MS = 10_000
RETRY_S = 1.0
"""How long to wait after a failed write (a full disk) before the timer tries again."""


class Plan:
    """What a step asks for: written in one transaction, then carried out."""

    def __init__(self) -> None:
        self.writes: list[Callable[[Transaction], None]] = []
        self.mail: list[tuple[bytes, Sealed[Any], int]] = []
        """(peer, record, lifetime in ms)."""
        self.gossip: list[bytes] = []
        self.starts: list[bytes] = []
        """Leases whose keepers to start."""
        self.statement: bytes | None = None
        """The offer or withdrawal among `gossip`."""
        self.reply: Sealed[Any] | None = None
        """To the message that caused the step."""
        self.lease_changes: list[tuple[bytes, dict[str, Any]]] = []

    def change_lease(self, lease: bytes, **changes: Any) -> None:  # noqa: ANN401 - columns of LeaseRow
        """Change columns of a lease's row."""
        self.lease_changes.append((lease, changes))
        self.writes.append(lambda tx: tx.leases.change(lease, **changes))


class Hooks(NamedTuple):
    """What the auction asks of its surroundings after a commit."""

    start_keeper: Callable[[bytes], None]
    lease_changed: Callable[[bytes, dict[str, Any]], None]
    grant_delivery: Callable[[bytes], tuple[bytes, tuple[str, ...]]]
    """lease -> the salt of its commitment, and the UDP addresses at which its keeper is reached."""
    keeper_identity: Callable[[], tuple[int, int]]
    """(uid, gid) of a provider's keeper."""


class ListingAuction:
    """The auction of one listing, with its state on disk."""

    def __init__(self, context: Context, outbox: Outbox, auction: Auction, hooks: Hooks) -> None:
        self.auction = auction
        self.offer: bytes | None = None
        """The newest offer or withdrawal, as gossiped."""
        self._context = context
        self._outbox = outbox
        self._hooks = hooks
        self._lock = trio.Lock()
        self._timer_changed = trio.Event()

    async def apply(self, event: AuctionEvent, cause: Sealed[Any] | None = None) -> Sealed[Any] | None:
        """Step, persist, carry out; return the reply to `cause`, if the step made one.

        Raises StoreError when nothing could be written: then nothing has happened.
        """
        async with self._lock:
            now = self._context.clock.now()
            auction, effects = step(self.auction, event, now)
            if auction == self.auction and not effects:
                return None
            plan = Plan()
            for effect in _coalesced(effects):
                auction = self._plan(plan, auction, effect, now, cause)
            offer = plan.statement or self.offer
            row = ListingRow(name=auction.listing.name, auction=codec.encode(auction), offer=offer)
            mail = await self._context.store.transaction(lambda tx: self._write(tx, plan, row))
            self.auction, self.offer = auction, offer
        self._outbox.kick(*mail)
        self._timer_changed.set()
        for lease, changes in plan.lease_changes:
            self._hooks.lease_changed(lease, changes)
        for lease in plan.starts:
            self._hooks.start_keeper(lease)
        for data in plan.gossip:
            await self._context.network.publish(OFFERS_TOPIC, data)
        return plan.reply

    async def run_timer(self) -> None:
        """Close batches and lapse holds when their time has come, for ever."""
        while True:
            self._timer_changed = trio.Event()
            at = next_time(self.auction)
            delay_s = float("inf") if at is None else max(0, at - self._context.clock.now()) / 1000
            with trio.move_on_after(delay_s) as sleeping:
                await self._timer_changed.wait()
            if not sleeping.cancelled_caught:
                continue
            try:
                await self.apply(TimeReached(random_bytes(32)))
            except StoreError as error:
                log.error("auction.not_written", listing=self.auction.listing.name, problem=str(error))
                await trio.sleep(RETRY_S)

    def _write(self, tx: Transaction, plan: Plan, row: ListingRow) -> list[OutboxRow]:
        tx.listings.put(row)
        for write in plan.writes:
            write(tx)
        return [self._outbox.enqueue(tx, peer, sealed, lifetime_ms) for peer, sealed, lifetime_ms in plan.mail]

    def _plan(
        self, plan: Plan, auction: Auction, effect: AuctionEffect, now: Millis, cause: Sealed[Any] | None
    ) -> Auction:
        context = self._context
        match effect:
            case Acknowledge(ack):
                plan.reply = context.seal(ack)
                self._remember_bid(plan, cause, plan.reply)
            case Reject(renter, rejection):
                if cause is not None and cause.id == rejection.bid_id:
                    plan.reply = context.seal(rejection)
                else:
                    plan.mail.append((renter, context.seal(rejection), REJECTION_LIFETIME_MS))
            case SendAward():
                self._plan_award(plan, auction, effect, now)
            case RefuseCountersignature(_, countersignature_id):
                detail = "the award was not countersigned in time, or another one was"
                plan.reply = context.seal(Refusal(of=countersignature_id, reason="hold_lapsed", detail=detail))
            case StartKeeper(lease):
                countersignature = next(sold for sold in auction.leases if sold.lease == lease).countersignature_id
                plan.change_lease(lease, state=LeaseState.COUNTERSIGNED, countersignature_id=countersignature)
                plan.starts.append(lease)
                if cause is not None:
                    signed = context.record_row(cause, lease=lease)
                    plan.writes.append(lambda tx: tx.records.put(signed))
            case SendGrant():
                self._plan_grant(plan, effect, now)
            case SendRelease(renter, release):
                sealed = context.seal(release)
                record = context.record_row(sealed, lease=release.lease)
                plan.writes.append(lambda tx: tx.records.put(record))
                plan.change_lease(release.lease, released_at=now)
                plan.mail.append((renter, sealed, RELEASE_LIFETIME_MS))
            case ForgetLease(lease):
                plan.change_lease(lease, state=LeaseState.LAPSED)
            case PublishOffer():
                return self._plan_offer(plan, auction, now)
            case WithdrawOffer():
                return self._plan_withdrawal(plan, auction, now)
        return auction

    def _remember_bid(self, plan: Plan, bid: Sealed[Any] | None, reply: Sealed[Any]) -> None:
        """Keep an admitted bid and its answer: the award needs the one, a repetition the other."""
        if bid is None:
            return
        asked, answered = self._context.record_row(bid), self._context.record_row(reply, reply_to=bid.id)
        plan.writes.append(lambda tx: tx.records.put(asked))
        plan.writes.append(lambda tx: tx.records.put(answered))

    def _plan_award(self, plan: Plan, auction: Auction, effect: SendAward, now: Millis) -> None:
        hold, context = effect.hold, self._context
        tunnel_seed, tunnel_key = new_lease_key()
        uid, gid = self._hooks.keeper_identity()

        def write(tx: Transaction) -> None:
            row = tx.records.get(hold.bid_id)
            if row is None:
                raise StoreError("the bid of an award is not on record")
            bid = open_as_untrusted(row.data, Bid, context.network_id).record
            tx.leases.put(
                LeaseRow(
                    lease=hold.lease,
                    role="provider",
                    state=LeaseState.AWARDED,
                    peer=hold.renter,
                    listing=auction.listing.name,
                    job_id="",
                    bid_id=hold.bid_id,
                    award_id=sealed.id,
                    devices=b"".join(hold.keys),
                    job_hash=bid.job_hash,
                    price=hold.price,
                    quantity=len(hold.keys),
                    max_spend=bid.max_spend,
                    until=hold.until,
                    simulated=auction.listing.simulated,
                    salt=random_bytes(32),
                    uid=uid,
                    gid=gid,
                    created_at=now,
                )
            )
            tx.lease_secrets.put(LeaseSecretRow(lease=hold.lease, tunnel=tunnel_seed, expires_at=hold.until))
            tx.records.put(context.record_row(sealed, lease=hold.lease))

        award = Award(
            bid_id=hold.bid_id,
            lease=hold.lease,
            price=hold.price,
            quantity=len(hold.keys),
            devices=effect.devices,
            terms=auction.listing.terms,
            tunnel_key=tunnel_key,
            simulated=auction.listing.simulated,
            holds_until=hold.lapses_at,
            until=hold.until,
            transcript=effect.transcript,
        )
        sealed = context.seal(award)
        plan.writes.append(write)
        plan.mail.append((hold.renter, sealed, hold.lapses_at - now))

    def _plan_grant(self, plan: Plan, effect: SendGrant, now: Millis) -> None:
        grant = effect.grant
        sealed = self._context.seal(grant)
        record = self._context.record_row(sealed, lease=grant.lease)
        salt, addresses = self._hooks.grant_delivery(grant.lease)
        delivery = self._context.seal(GrantDelivery(grant=sealed.data, salt=salt, addresses=addresses))
        plan.writes.append(lambda tx: tx.records.put(record))
        plan.change_lease(grant.lease, state=LeaseState.GRANTED, grant_id=sealed.id)
        plan.mail.append((effect.renter, delivery, max(1000, grant.until - now)))

    def _plan_offer(self, plan: Plan, auction: Auction, now: Millis) -> Auction:
        if not publishing(auction):
            return auction
        offer = offer_of(
            auction,
            sequence=max(auction.sequence + 1, now),
            lottery_commitment=lottery_commitment(auction.secret),
            addresses=self._context.network.addresses[:8],
            now=now,
            lifetime_ms=OFFER_LIFETIME_MS,
        )
        sealed = self._context.seal(offer)
        plan.statement = sealed.data
        plan.gossip.append(sealed.data)
        auction, _ = step(auction, OfferSigned(sealed.id, offer.sequence), now)
        return auction

    def _plan_withdrawal(self, plan: Plan, auction: Auction, now: Millis) -> Auction:
        withdrawal = Withdrawal(
            listing=auction.listing.name,
            sequence=max(auction.sequence + 1, now),
            epoch=auction.epoch,
            issued_at=now,
            expires_at=Millis(now + OFFER_LIFETIME_MS),
        )
        sealed = self._context.seal(withdrawal)
        plan.statement = sealed.data
        plan.gossip.append(sealed.data)
        return msgspec.structs.replace(auction, sequence=withdrawal.sequence)


def _coalesced(effects: tuple[AuctionEffect, ...]) -> list[AuctionEffect]:
    """Return the effects with one offer at most, last: it states the outcome of all others."""
    publishing = [effect for effect in effects if isinstance(effect, PublishOffer | WithdrawOffer)]
    return [effect for effect in effects if effect not in publishing] + publishing[-1:]
