"""Staying in touch with the providers that this node deals with: they are not always friends that it dials anyway.

A renter that was restarted has mail for providers whose addresses it has lost, and awaits grants and receipts of
theirs, who can't reach a renter behind a NAT. While a bid is open or a lease unsettled, its provider is dialled at
the addresses of its offers, at growing intervals, unless it is connected. Refuses to look for other providers.
"""

from collections.abc import Iterable

import trio

from node.errors import StoreError
from node.log import get_logger
from node.market.bookkeeping import Bookkeeper
from node.market.context import Context
from node.market.leases import Leases, LeaseState
from node.market.live_job import LiveJobs
from node.store import Transaction
from protocol.envelope import open_as_untrusted
from protocol.identity import NodeId
from protocol.records import Bid, Offer

log = get_logger(__name__)

LOOK_S = 0.5
WAIT_MIN_S = 0.5
WAIT_MAX_S = 60.0
WAIT_GROWTH = 1.3
"""Each wait is so much longer than the last: about a third of the time that the provider has been away."""


class Contacts:
    """The providers of this node's open bids and unsettled leases."""

    def __init__(self, context: Context, jobs: LiveJobs, leases: Leases, book: Bookkeeper) -> None:
        self._context = context
        self._jobs = jobs
        self._leases = leases
        self._book = book
        self._waits: dict[NodeId, tuple[float, float]] = {}
        """Provider -> (when it is dialled next, the wait after that)."""

    async def run(self) -> None:
        """Stay in touch, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                bids = self._bids_by_provider()
                connected = {peer.node for peer in self._context.network.peers() if peer.connected}
                away = bids.keys() - connected
                self._waits = {provider: wait for provider, wait in self._waits.items() if provider in away}
                for provider in sorted(away):
                    if self._is_due(provider):
                        nursery.start_soon(self._dial, provider, bids[provider])
                await trio.sleep(LOOK_S)

    def _bids_by_provider(self) -> dict[NodeId, list[bytes]]:
        """Return our bids at each provider from whom something is still to come."""
        bids: dict[NodeId, list[bytes]] = {}
        for job in self._jobs.by_id.values():
            if job.purchase.bid is not None:
                bids.setdefault(NodeId(job.purchase.bid.provider), []).append(job.purchase.bid.bid_id)
        for live in self._leases.live.values():
            if live.row.role == "renter" and live.row.state != LeaseState.SETTLED:
                bids.setdefault(NodeId(live.row.peer), []).append(live.row.bid_id)
        return bids

    def _is_due(self, provider: NodeId) -> bool:
        """Return whether to dial now, and note when to dial again."""
        now = trio.current_time()
        at, wait_s = self._waits.get(provider, (now, WAIT_MIN_S))
        if now < at:
            return False
        self._waits[provider] = (now + wait_s, min(WAIT_MAX_S, wait_s * WAIT_GROWTH))
        return True

    async def _dial(self, provider: NodeId, bids: Iterable[bytes]) -> None:
        try:
            addresses = await self._context.store.transaction(lambda tx: self._addresses(bids, tx))
        except StoreError as error:
            log.error("contacts.not_read", problem=str(error))
            return
        newest = [offer.record.addresses for offer in self._book.book.offers_of(provider)]
        for known in (*addresses, *newest):
            self._context.network.add_address(provider, known)
        # Asking is dialling; and what it sells now may be news.
        await self._book.fetch_page(provider)

    def _addresses(self, bids: Iterable[bytes], tx: Transaction) -> list[tuple[str, ...]]:
        found = []
        for bid_id in bids:
            row = tx.records.get(bid_id)
            if row is None:
                continue
            bid = open_as_untrusted(row.data, Bid, self._context.network_id).record
            offer = tx.records.get(bid.offer_id)
            if offer is not None:
                found.append(open_as_untrusted(offer.data, Offer, self._context.network_id).record.addresses)
        return found
