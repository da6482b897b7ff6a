"""The market of one node: wires seller, buyer and book to the network, and is what the daemon's RPC asks.

Every record of a peer comes in through `_on_trade`: decoded, verified, signed by who is connected; then it goes to
the one that it is about. Refuses every rule of trading: those are the machines'.
"""

import ipaddress
from collections.abc import Iterator
from typing import Any

import trio

from node.config import Config
from node.errors import NodeError
from node.lease.files import LeaseFile
from node.log import get_logger
from node.market.bookkeeping import Bookkeeper
from node.market.buying import Buyer
from node.market.contacts import Contacts
from node.market.context import TRADE_PROTOCOL, Context
from node.market.forgotten import lent_until, remember_forgotten
from node.market.inventory import Inventory
from node.market.leases import Leases
from node.market.live_job import LiveJobs
from node.market.outbox import Answer, Outbox
from node.market.recollection import Recollection
from node.market.renting import Renter
from node.market.selling import Seller
from node.market.settlements import Settlements
from node.market.skew import ClockSkew
from node.ports import TaskStatus
from node.store import OutboxRow, Transaction
from protocol.envelope import Sealed, open_untrusted
from protocol.errors import BadSignature
from protocol.identity import NodeId
from protocol.records import (
    Ack,
    Award,
    Bid,
    BidRejected,
    Countersignature,
    GrantDelivery,
    OwnRecordsQuery,
    Receipt,
    Refusal,
    Release,
    Settlement,
    SettlementAcceptance,
)
from protocol.units import DAY_MS

log = get_logger(__name__)

NOTES_MAX = 16
RELEASES_MAX = 2
"""Most releases kept of one lease: two that differ convict their provider, more only fill the disk."""
PRUNE_S = 600.0
ASKED_AGAIN_MAX = 16
KEEP_PAPERS_MS = DAY_MS
"""How long the papers of a bid that came to nothing are kept."""


class Market:
    """Everything that this node does in the market."""

    def __init__(self, context: Context, config: Config, inventory: Inventory) -> None:
        self._context = context
        self._config = config
        self.notes: list[str] = []
        """What an administrator should know."""
        self.jobs = LiveJobs()
        self.outbox = Outbox(context, self._on_answer)
        self.leases = Leases(context, {"provider": self._observe_provider, "renter": self._observe_renter})
        self.book = Bookkeeper(context, self._own_statements)
        self.seller = Seller(
            context,
            self.outbox,
            self.leases,
            inventory,
            config.lend,
            config.tunnel,
            self.credit_limit,
            config.ledger.stranger_credit,
        )
        self.skew = ClockSkew(context.clock)
        self.buyer = Buyer(context, self.outbox, self.jobs, self.book, self.skew)
        self.renter = Renter(context, self.leases, self.jobs, self.buyer)
        self.contacts = Contacts(context, self.jobs, self.leases, self.book)
        self.settlements = Settlements(context, self.outbox)
        self.recollection = Recollection(context, self.seller, self.book, self.skew, self.note)

    async def run(self, *, task_status: TaskStatus = trio.TASK_STATUS_IGNORED) -> None:
        """Trade, until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.leases.run)
            await nursery.start(self.outbox.run)
            await nursery.start(self.book.run)
            await nursery.start(self.buyer.run)
            forgotten = await remember_forgotten(self._context)
            await nursery.start(self.renter.run)
            await nursery.start(self.seller.run)
            if forgotten:
                await self._make_do_without(forgotten)
            self.book.register()
            self._context.network.on_request(TRADE_PROTOCOL, self._on_trade)
            self._context.network.on_connect(self._on_connect)
            for peer in self._context.network.peers():
                nursery.start_soon(self._on_connect, peer.node)
            nursery.start_soon(self.contacts.run)
            task_status.started()
            while True:
                await self._prune()
                await trio.sleep(PRUNE_S)
                if self.skew.problem():
                    # Our own clock is looked at each time, but theirs may have been set right, too.
                    for peer in self._context.network.peers()[:ASKED_AGAIN_MAX]:
                        nursery.start_soon(self.recollection.ask, peer.node)

    async def _make_do_without(self, forgotten: tuple[LeaseFile, ...]) -> None:
        """Tell the administrator of leases that only the disk knows, and sell around those to others."""
        number = "a lease that is" if len(forgotten) == 1 else f"{len(forgotten)} leases that are"
        self.note(
            f"the database knows nothing of {number} on this disk: is it an older copy? "
            "What runs goes on to its end; nothing will be paid for what is lent"
        )
        until = lent_until(forgotten)
        if until:
            await self.seller.open_next_epoch(until)  # even when it has passed: its chain's numbers are taken

    async def _prune(self) -> None:
        """Forget the secrets and papers of leases that never began."""
        now = self._context.clock.now()
        papers = "kind in ('bid', 'bid_ack', 'award', 'countersignature') and at < ?"
        unused = (
            "lease is null or lease not in (select lease from leases where state not in ('awarded', 'lapsed'))"
        )
        bids = "id not in (select bid_id from leases where state not in ('awarded', 'lapsed'))"
        offers = (
            "kind = 'offer' and at < ? and id not in (select ifnull(reply_to, '') from records where kind = 'bid')"
        )

        def write(tx: Transaction) -> None:
            tx.lease_secrets.delete("expires_at < ?", now)
            tx.records.delete(f"{papers} and ({unused}) and {bids}", now - KEEP_PAPERS_MS)
            tx.records.delete(offers, now - KEEP_PAPERS_MS)

        try:
            await self._context.store.transaction(write)
        except NodeError as error:
            log.error("market.not_pruned", problem=str(error))

    def note(self, text: str) -> None:
        """Keep a line for the administrator."""
        if text not in self.notes:
            self.notes = [text, *self.notes][:NOTES_MAX]

    def credit_limit(self, tx: Transaction, peer: bytes) -> int | None:
        """Return what `peer` may owe us, in nano-credits; None: it is a stranger."""
        row = tx.peers.get(peer)
        if row is not None and row.credit_limit is not None:
            return row.credit_limit
        return None if self._config.network.is_open else self._config.ledger.pool_credit

    def _own_statements(self) -> Iterator[bytes]:
        for desk in self.seller.auctions.values():
            if desk.offer is not None:
                yield desk.offer

    async def _on_connect(self, peer: NodeId) -> None:
        self.outbox.wake(peer)
        try:
            await self.buyer.on_connect(peer)
            await self.recollection.ask(peer)
        except NodeError as error:
            log.error("market.not_recollected", peer=peer.hex(), problem=str(error))
        await self.book.fetch_page(peer)

    async def _observe_provider(self, live: Any) -> None:  # noqa: ANN401
        await self.seller.lender.observe(live)

    async def _observe_renter(self, live: Any) -> None:  # noqa: ANN401
        await self.renter.observe(live)

    async def _on_answer(self, row: OutboxRow, answer: Answer) -> None:
        if row.kind in ("bid", "countersignature"):
            await self.buyer.on_answer(row, answer)
        elif row.kind == "receipt":
            await self.seller.lender.on_receipt_answer(row, answer)
        elif row.kind == "grant_delivery":
            await self.seller.lender.on_grant_answer(row, answer)
        elif isinstance(answer, Sealed) and isinstance(answer.record, Refusal):
            log.info("market.refused", kind=row.kind, reason=answer.record.reason)

    async def _on_trade(self, caller: NodeId, data: bytes) -> bytes:
        sealed = open_untrusted(data, self._context.network_id)
        if sealed.signer != caller:
            raise BadSignature("the record is signed by somebody else than the peer that sent it")
        reply = await self._dispatch(sealed)
        if isinstance(reply, Sealed):
            return reply.data
        return self._context.seal(Ack(of=sealed.id) if reply is None else reply).data

    async def _dispatch(self, sealed: Sealed[Any]) -> Any:  # noqa: ANN401 - a record, a sealed record, or None
        match sealed.record:
            case Bid():
                return await self.seller.on_bid(sealed, self._address_prefix(sealed.signer))
            case Countersignature():
                return await self.seller.on_countersignature(sealed)
            case Award():
                return await self.buyer.on_award(sealed)
            case BidRejected():
                return await self.buyer.on_rejection(sealed)
            case GrantDelivery():
                return await self.renter.on_grant(sealed)
            case Release():
                return await self._on_release(sealed)
            case Receipt():
                return await self.renter.on_receipt(sealed)
            case Settlement():
                return await self.settlements.on_settlement(sealed)
            case SettlementAcceptance():
                return await self.settlements.on_acceptance(sealed)
            case OwnRecordsQuery():
                return await self.recollection.answer(sealed)
            case _:
                return Refusal(of=sealed.id, reason="unexpected", detail="no such message is expected here")

    async def _on_release(self, sealed: Sealed[Release]) -> Refusal | None:
        """Keep a release of a lease that we rented: a part of the provider's chain that we witness."""

        def write(tx: Transaction) -> bool:
            row = tx.leases.get(sealed.record.lease)
            if row is None or row.role != "renter" or row.peer != sealed.signer:
                return False
            if tx.records.count("lease = ? and kind = 'release'", row.lease) < RELEASES_MAX:
                tx.records.put(self._context.record_row(sealed, lease=row.lease))
            return True

        known = await self._context.store.transaction(write)
        return None if known else Refusal(of=sealed.id, reason="unknown_lease")

    def _address_prefix(self, node: NodeId) -> str:
        """Return the peer's network: /24 or /48 of a public address, "" for private ones, which many share."""
        peer = next((peer for peer in self._context.network.peers() if peer.node == node), None)
        parts = peer.address.split("/") if peer is not None else []
        try:
            address = ipaddress.ip_address(parts[2])
        except (IndexError, ValueError):
            return ""
        if not address.is_global:
            return ""
        bits = 24 if address.version == 4 else 48
        return str(ipaddress.ip_network(f"{address}/{bits}", strict=False))
