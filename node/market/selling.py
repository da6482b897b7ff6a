"""The provider: auctions for its devices, keepers for its leases, receipts for what was used.

      bid ─▶ auction ─▶ award ─▶ countersigned ─▶ keeper starts ─▶ grant ─▶ job runs ─▶ devices clear: release
                                                                                     └▶ results collected: receipt

Refuses to run jobs and to talk to renters' tunnels: keepers do.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from node.config import LendSettings, TunnelSettings
from node.errors import NodeError, StoreError
from node.log import get_logger
from node.market.auctions import Hooks, ListingAuction
from node.market.context import Context, decode_stored, random_bytes
from node.market.credit import credit_left
from node.market.inventory import Inventory
from node.market.leases import Leases
from node.market.lending import Lender
from node.market.outbox import Outbox
from node.ports import TaskStatus
from node.store import RecordRow, Transaction
from protocol import codec
from protocol.envelope import Sealed, open_untrusted
from protocol.identity import lease_id
from protocol.machines.auction import Auction, is_sound
from protocol.machines.auction_types import (
    BidReceived,
    CountersignatureReceived,
    EpochOpened,
    Listing,
    ListingChanged,
    OfferRefreshed,
    PauseChanged,
    Repriced,
    Resumed,
    Unit,
    free_units,
)
from protocol.records import Bid, BidRejected, Countersignature, Curve, Refusal, RejectReason
from protocol.records.lease import GENESIS
from protocol.units import MINUTE_MS, SECOND_MS, Millis

log = get_logger(__name__)

REFRESH_S = 5.0
OFFER_REFRESH_MS = 2 * MINUTE_MS
OFF_KEY = "lend.off"
SWITCHED_OFF_KEY = "lend.switched_off"
EPOCH_KEY = "epoch"
"""Where the database remembers "<epoch> <sells from>" once it was found to be an old copy."""


class Seller:
    """Everything that this node does as a provider."""

    def __init__(
        self,
        context: Context,
        outbox: Outbox,
        leases: Leases,
        inventory: Inventory,
        lend: LendSettings,
        tunnel: TunnelSettings,
        credit_limit: Callable[[Transaction, bytes], int | None],
        stranger_credit: int,
    ) -> None:
        self._context = context
        self._outbox = outbox
        self._leases = leases
        self.inventory = inventory
        self._lend = lend
        self._tunnel = tunnel
        self._credit_limit = credit_limit
        self._stranger_credit = stranger_credit
        self.auctions: dict[str, ListingAuction] = {}
        self._nursery: trio.Nursery | None = None
        self._price_overrides: dict[str, tuple[int | None, int | None]] = {}
        self._bid_lock = trio.Lock()
        """One bid at a time: the next one's credit depends on what this one takes of it."""
        self._epoch, self._sells_from = 0, Millis(0)
        """For listings that are opened after the database was found to be old."""
        self.lender = Lender(context, outbox, leases, inventory, lend, tunnel, self.auctions)
        self._hooks = Hooks(
            start_keeper=self.lender.spawn_start,
            lease_changed=lambda lease, changes: leases.noted(lease, **changes),
            grant_delivery=self.lender.grant_delivery,
            keeper_identity=lambda: (os.geteuid(), os.getegid()),
        )
        self.paused_until: Millis | None = None
        self._is_held = False
        self.is_off = not lend.enabled
        self.newest_known_sequence = 0
        """The highest sequence of an offer of ours that this database knew when the daemon started."""

    @property
    def is_paused(self) -> bool:
        """Whether nothing is sold, for a while or at all."""
        return self.is_off or self._is_held

    def remember(self, tx: Transaction) -> None:
        """Write down what the owner has switched, so that it stays so across restarts."""
        tx.set_meta(OFF_KEY, "1" if self.is_off else "0")
        tx.set_meta(SWITCHED_OFF_KEY, " ".join(sorted(self.inventory.switched_off)))

    def _recall(self, tx: Transaction) -> None:
        """Take the owner's last word, if there was one, over the configuration's."""
        off = tx.meta(OFF_KEY)
        if off is not None:
            self.is_off = off == "1"
        self.inventory.switched_off |= set((tx.meta(SWITCHED_OFF_KEY) or "").split())

    def switch(self, *, on: bool) -> None:
        """Sell, or sell nothing until switched on again; takes effect at the next `refresh`."""
        self.is_off, self._is_held, self.paused_until = not on, False, None

    def pause(self, until: Millis | None) -> None:
        """Sell nothing until a time, or (None) until switched on again or restarted."""
        self._is_held, self.paused_until = True, until

    @property
    def sells_from(self) -> Millis:
        """When leases that the database has forgotten are over, and devices may be sold again."""
        return self._sells_from

    def free_of(self, desk: ListingAuction) -> int:
        """Return how many devices of a listing can be sold now."""
        is_selling = not self.is_paused and desk.auction.is_selling(self._context.clock.now())
        return len(free_units(desk.auction)) if is_selling else 0

    # --- running --------------------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus = trio.TASK_STATUS_IGNORED) -> None:
        """Sell, until cancelled."""
        rows = await self._context.store.transaction(lambda tx: list(tx.listings.all()))
        epoch = await self._context.store.transaction(lambda tx: tx.meta(EPOCH_KEY))
        await self._context.store.transaction(self._recall)
        if epoch is not None:
            self._epoch, self._sells_from = int(epoch.split()[0]), Millis(int(epoch.split()[1]))
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for row in rows:
                auction = decode_stored(row.auction, Auction, "auction", 16 * codec.RECORD_SIZE_MAX)
                broken = is_sound(auction)
                if broken:
                    raise StoreError(f"the stored auction of {row.name} is broken: {broken}")
                self.newest_known_sequence = max(self.newest_known_sequence, auction.sequence)
                desk = ListingAuction(self._context, self._outbox, auction, self._hooks)
                await desk.apply(Resumed())
                self._adopt_auction(desk)
            # The devices first: a lease that waits for its keeper needs to know its own.
            await self.refresh()
            await nursery.start(self.lender.run)
            for desk in list(self.auctions.values()):
                if desk.offer is None:
                    await desk.apply(OfferRefreshed())
            task_status.started()
            nursery.start_soon(self._every, REFRESH_S, self.refresh)
            nursery.start_soon(self._every, self._lend.reprice_every_ms / SECOND_MS, self.reprice)
            nursery.start_soon(self._every, OFFER_REFRESH_MS / SECOND_MS, self.refresh_offers)

    async def _every(self, period_s: float, work: Callable[[], Any]) -> None:
        while True:
            await trio.sleep(period_s)
            try:
                await work()
            except NodeError as error:
                log.error("selling.trouble", work=getattr(work, "__name__", ""), problem=str(error))

    def _adopt_auction(self, auction: ListingAuction) -> ListingAuction:
        self.auctions[auction.auction.listing.name] = auction
        if self._nursery is not None:
            self._nursery.start_soon(auction.run_timer)
        return auction

    # --- devices and prices ---------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Measure the devices, and let every auction know what it has to sell."""
        now = self._context.clock.now()
        if self.paused_until is not None and now >= self.paused_until:
            self._is_held, self.paused_until = False, None
        leased = frozenset(
            key for desk in self.auctions.values() for sold in desk.auction.leases for key in sold.keys
        )
        await self.inventory.refresh(leased)
        if not self.is_paused and self.inventory.devices:
            self._context.keepers.expect(10 * REFRESH_S)
        if self.is_paused:
            free = [key for key in self.inventory.devices if key not in leased]
            if self.is_off:
                self.inventory.release_claims(free)
        for name, listing in self.inventory.listings().items():
            await self._update_listing(name, listing)
        for name, desk in list(self.auctions.items()):
            if name not in self.inventory.listings():
                await desk.apply(ListingChanged(desk.auction.listing, {}, frozenset()))
            await desk.apply(PauseChanged(self.is_paused or not desk.auction.units))

    async def _update_listing(self, name: str, listing: Listing) -> None:
        present, sellable = {}, set()
        elsewhere = self._taken_outside(name)
        for listed in self.inventory.devices.values():
            if listed.listing == name:
                present[listed.key] = self._unit(listed.key)
                if listed.is_sellable and listed.key not in elsewhere:
                    sellable.add(listed.key)
        desk = self.auctions.get(name)
        if desk is None:
            if self.is_paused or not sellable:
                return
            auction = self._open_auction(name, listing, present)
            if auction is None:
                return
            desk = self._adopt_auction(ListingAuction(self._context, self._outbox, auction, self._hooks))
        await desk.apply(ListingChanged(listing, present, frozenset(sellable)))

    def _unit(self, key: bytes) -> Unit:
        """Return a device with its chain as far as any listing took it."""
        known = [
            unit
            for desk in self.auctions.values()
            for unit in (*desk.auction.units, *desk.auction.retired)
            if unit.key == key
        ]
        return max(known, key=lambda unit: unit.number, default=Unit(key, 0, GENESIS, True))

    def _taken_outside(self, name: str) -> set[bytes]:
        """Return the devices that are held or sold by listings other than `name`: they may look like ours now."""
        auctions = [desk.auction for other, desk in self.auctions.items() if other != name]
        held = {key for auction in auctions for hold in auction.holds for key in hold.keys}
        return held | {key for auction in auctions for sold in auction.leases for key in sold.keys}

    def _open_auction(self, name: str, listing: Listing, present: dict[bytes, Unit]) -> Auction | None:
        prices = self._prices(name)
        if prices is None:
            log.warning("selling.no_price", listing=name, hint="set lend.start_price for this model")
            return None
        shape, (start, reserve) = self._lend.auction, prices
        return Auction(
            provider=self._context.node,
            listing=listing,
            curve=Curve(
                start=start,
                reserve=reserve,
                opened_at=self._context.clock.now(),
                opening_ms=shape.opening_ms,
                tick_ms=shape.tick_ms,
                halving_ms=shape.halving_ms,
                lift_permille=shape.lift_permille,
            ),
            # Devices come with `ListingChanged`, which also publishes the first offer.
            units=(),
            secret=random_bytes(32),
            epoch=self._epoch,
            sells_from=self._sells_from,
        )

    def _prices(self, name: str) -> tuple[int, int] | None:
        used = sum(len(sold.keys) for desk in self.auctions.values() for sold in desk.auction.leases)
        capacity = max(1, len(self.inventory.devices))
        automatic = self.inventory.prices(name, min(used, capacity), capacity)
        start, reserve = self._price_overrides.get(name, (None, None))
        if automatic is not None:
            start = automatic[0] if start is None else start
            reserve = automatic[1] if reserve is None else reserve
        if start is None:
            return None
        return max(start, reserve or 0), reserve or 0

    async def reprice(self) -> None:
        """Apply the formula, or the owner's word, to every listing."""
        for name, desk in list(self.auctions.items()):
            prices = self._prices(name)
            if prices is not None:
                await desk.apply(Repriced(*prices))

    def override_price(self, listing: str, start: int | None, reserve: int | None) -> None:
        """Take the owner's word for a listing's prices; None: the formula's."""
        self._price_overrides[listing] = (start, reserve)

    def has_override(self, listing: str) -> bool:
        """Return whether the owner has set a price of this listing by hand."""
        return self._price_overrides.get(listing, (None, None)) != (None, None)

    async def refresh_offers(self) -> None:
        """Re-issue every offer before it expires."""
        for desk in list(self.auctions.values()):
            await desk.apply(OfferRefreshed())

    async def open_next_epoch(self, sells_from: Millis) -> None:
        """Sell in a new epoch, and only from `sells_from` on. Raises StoreError."""
        newest = max([self._epoch, *(desk.auction.epoch for desk in self.auctions.values())])
        await self.open_epoch(newest + 1, sells_from)

    async def open_epoch(self, epoch: int, sells_from: Millis) -> bool:
        """Sell in `epoch` at least, and only from `sells_from` on; listings that are opened later, too.

        Returns whether that was news. Raises StoreError when it could not be written: then try again.
        """
        if epoch <= self._epoch and sells_from <= self._sells_from:
            return False
        epoch, sells_from = max(epoch, self._epoch), max(sells_from, self._sells_from)
        for desk in list(self.auctions.values()):
            await desk.apply(EpochOpened(epoch, sells_from))
        remembered = f"{epoch} {sells_from}"
        await self._context.store.transaction(lambda tx: tx.set_meta(EPOCH_KEY, remembered))
        self._epoch, self._sells_from = epoch, sells_from
        for desk in list(self.auctions.values()):
            await desk.apply(EpochOpened(epoch, sells_from))  # one may have been opened meanwhile
        return True

    # --- messages of renters --------------------------------------------------------------------------------

    async def on_bid(self, bid: Sealed[Bid], address_prefix: str) -> Sealed[Any]:
        """Answer a bid: an acknowledgement or a rejection."""
        context, now = self._context, self._context.clock.now()
        desk = self.auctions.get(bid.record.listing)
        if desk is None:
            return context.seal(
                BidRejected(
                    bid_id=bid.id, reason=RejectReason.STALE_OFFER, detail="there is no such listing", price_now=0
                )
            )
        async with self._bid_lock:
            known, is_spent, credit = await context.store.transaction(
                partial(self._before_bid, bid, desk.auction.listing.simulated, self._waiting())
            )
            if known is not None:
                return open_untrusted(known.data, context.network_id)
            if is_spent or self._is_nonce_waiting(bid):
                detail = "another bid had this nonce: its lease would be the same one"
                return context.seal(desk.auction.rejection(bid.id, RejectReason.DUPLICATE, now, detail=detail))
            event = BidReceived(bid.id, bid.signer, bid.record, now, credit, address_prefix)
            reply = await desk.apply(event, cause=bid)
        if reply is None:
            raise AssertionError("an auction answers every bid")
        return reply

    def _waiting(self) -> list[BidReceived]:
        """Return the bids that may yet be awarded and then count against somebody's credit."""
        real = [desk.auction for desk in self.auctions.values() if not desk.auction.listing.simulated]
        return [waiting for auction in real for waiting in auction.waiting()]

    def _is_nonce_waiting(self, bid: Sealed[Bid]) -> bool:
        """Return whether a bid of this renter that may yet be awarded, on any listing, has the same nonce."""
        return any(
            (waiting.renter, waiting.bid.nonce) == (bid.signer, bid.record.nonce)
            for desk in self.auctions.values()
            for waiting in desk.auction.waiting()
        )

    def _before_bid(
        self, bid: Sealed[Bid], is_simulated: bool, waiting: list[BidReceived], tx: Transaction
    ) -> tuple[RecordRow | None, bool, int]:
        """Return the answer that the bid had before, whether its lease exists, and the renter's credit."""
        known = next(tx.records.where("reply_to = ?", bid.id), None)
        is_spent = tx.leases.get(lease_id(self._context.node, bid.signer, bid.record.nonce)) is not None
        if is_simulated:
            return known, is_spent, bid.record.max_spend  # simulated leases count for nothing
        limit = self._credit_limit(tx, bid.signer)
        committed = sum(
            other.bid.max_spend
            for other in waiting
            if other.renter == bid.signer or (limit is None and self._credit_limit(tx, other.renter) is None)
        )
        return known, is_spent, credit_left(tx, bid.signer, limit, self._stranger_credit) - committed

    async def on_countersignature(self, sealed: Sealed[Countersignature]) -> Sealed[Any] | None:
        """Take a countersignature; None: taken (or taken before)."""
        row = await self._context.store.transaction(lambda tx: tx.leases.get(sealed.record.lease))
        is_ours = row is not None and row.role == "provider" and row.peer == sealed.signer
        if row is None or not is_ours or row.award_id != sealed.record.award_id:
            return self._context.seal(Refusal(of=sealed.id, reason="unknown_award"))
        desk = self.auctions.get(row.listing)
        if desk is None:
            return self._context.seal(Refusal(of=sealed.id, reason="unknown_listing"))
        return await desk.apply(CountersignatureReceived(row.lease, sealed.signer, sealed.id), cause=sealed)
