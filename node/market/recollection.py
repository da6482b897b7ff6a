"""Was our database restored from an old copy? Peers remember what it has forgotten.

On each connection a node asks for the newest offers of its own that the peer holds, and for its own grants to
that peer. An offer with a sequence above what the database knew at its start, and that this run did not sign, or
a grant of an unknown lease, means that a newer life of this node is forgotten here: the auctions open a new epoch
and sell only after the longest lease that may be out. Refuses to answer about anyone but the asker.
"""

from collections.abc import Callable
from typing import TypeVar

import trio

from node.errors import NodeError
from node.log import get_logger
from node.market.bookkeeping import Bookkeeper
from node.market.context import TRADE_PROTOCOL, Context, random_bytes
from node.market.selling import Seller
from node.store import Transaction
from protocol.envelope import Sealed, open_as_untrusted
from protocol.errors import ProtocolError
from protocol.identity import NodeId
from protocol.records import CounterpartyGrants, Grant, Offer, OwnRecordsQuery
from protocol.records.peer import GRANTS_MAX
from protocol.units import Millis

log = get_logger(__name__)

OFFERS_MAX = 4
OFFERS_SIZE_MAX = 24 * 1024
"""Bytes of offers in one answer, which is a record of at most 64 KiB; grants come on top."""
T = TypeVar("T")


class Recollection:
    """Asks peers about ourselves, and answers them about themselves."""

    def __init__(self, context: Context, seller: Seller, book: Bookkeeper, note: Callable[[str], None]) -> None:
        self._context = context
        self._seller = seller
        self._book = book
        self._note = note
        self._started_at = context.clock.now()
        self._sells_from = Millis(0)
        self._lock = trio.Lock()

    async def ask(self, peer: NodeId) -> None:
        """Ask a peer that has connected. Never raises for the peer's faults."""
        context = self._context
        query = context.seal(OwnRecordsQuery(nonce=random_bytes(16)))
        try:
            reply = await context.network.request(peer, TRADE_PROTOCOL, query.data)
            answer = open_as_untrusted(reply, CounterpartyGrants, context.network_id)
        except (NodeError, ProtocolError) as error:
            log.info("recollection.no_answer", peer=peer.hex(), problem=str(error))
            return
        if answer.signer != peer or answer.record.query_id != query.id:
            return
        async with self._lock:
            await self._judge(answer.record)

    async def answer(self, query: Sealed[OwnRecordsQuery]) -> CounterpartyGrants:
        """Tell a peer what we hold of its own records."""
        known = sorted(self._book.book.offers_of(query.signer), key=lambda offer: -offer.record.sequence)
        offers, size = [], 0
        for offer in known[:OFFERS_MAX]:
            size += len(offer.data)
            if size > OFFERS_SIZE_MAX:
                break
            offers.append(offer.data)

        def read(tx: Transaction) -> list[bytes]:
            rows = tx.records.where(
                "kind = 'grant' and signer = ?", query.signer, order_by="at desc", limit=GRANTS_MAX
            )
            return [row.data for row in rows]

        grants = await self._context.store.transaction(read)
        return CounterpartyGrants(query_id=query.id, offers=tuple(offers), grants=tuple(grants))

    async def _judge(self, answer: CounterpartyGrants) -> None:
        now = self._context.clock.now()
        forgotten_until, epoch = 0, 0
        for data in answer.offers:
            offer = self._own(data, Offer)
            if offer is not None and self._is_forgotten_offer(offer.record):
                longest_ms = offer.record.terms.lease_max_ms + offer.record.terms.notice_ms
                forgotten_until = max(forgotten_until, offer.record.expires_at + longest_ms)
                epoch = max(epoch, offer.record.epoch)
        for data in answer.grants:
            grant = self._own(data, Grant)
            if grant is not None and await self._is_forgotten_grant(grant.record):
                forgotten_until = max(forgotten_until, grant.record.until)
                epoch = max(epoch, grant.record.epoch)
        if forgotten_until <= max(now, self._sells_from):
            return
        self._sells_from = Millis(forgotten_until)
        text = "the database is older than what peers remember: nothing is sold until forgotten leases have ended"
        log.error("recollection.restored_database", sells_from=forgotten_until, epoch=epoch + 1)
        self._note(text)
        await self._seller.open_epoch(epoch + 1, self._sells_from)

    def _own(self, data: bytes, record_type: type[T]) -> Sealed[T] | None:
        try:
            sealed = open_as_untrusted(data, record_type, self._context.network_id)
        except ProtocolError:
            return None
        return sealed if sealed.signer == self._context.node else None

    def _is_forgotten_offer(self, offer: Offer) -> bool:
        return self._seller.newest_known_sequence < offer.sequence and offer.issued_at < self._started_at

    async def _is_forgotten_grant(self, grant: Grant) -> bool:
        row = await self._context.store.transaction(lambda tx: tx.leases.get(grant.lease))
        return row is None
