"""Was our database restored from an old copy? Peers remember what it has forgotten.

On each connection a node asks for the newest offers of its own that the peer holds, and for its own grants to
that peer and their releases. An offer with a sequence above what the database knew at its start, and that this run
did not sign, or an unknown grant or release, means that a newer life of this node is forgotten here: the auctions
open a new epoch, since their numbers in the chains are taken, and sell only after the longest lease that is out.
Refuses to answer about anyone but the asker.
"""

from collections.abc import Callable
from typing import TypeVar

import trio

from node.errors import NodeError
from node.log import get_logger
from node.market.bookkeeping import Bookkeeper
from node.market.context import TRADE_PROTOCOL, Context, random_bytes
from node.market.selling import Seller
from node.market.skew import ClockSkew
from node.store import Transaction
from protocol.envelope import Sealed, open_as_untrusted
from protocol.errors import ProtocolError
from protocol.identity import NodeId
from protocol.records import CounterpartyGrants, Grant, Offer, OwnRecordsQuery, Release
from protocol.records.peer import GRANTS_MAX
from protocol.units import Millis

log = get_logger(__name__)

OFFERS_MAX = 4
OFFERS_SIZE_MAX = 24 * 1024
ENTRIES_SIZE_MAX = 36 * 1024
"""Bytes of offers, and of grants and releases, in one answer, which is a record of at most 64 KiB."""
T = TypeVar("T")


class Recollection:
    """Asks peers about ourselves, and answers them about themselves."""

    def __init__(
        self, context: Context, seller: Seller, book: Bookkeeper, skew: ClockSkew, note: Callable[[str], None]
    ) -> None:
        self._context = context
        self._skew = skew
        self._seller = seller
        self._book = book
        self._note = note
        self._started_at = context.clock.now()
        self._lock = trio.Lock()

    async def ask(self, peer: NodeId) -> None:
        """Ask a peer that has connected. Never raises for the peer's faults."""
        context = self._context
        query = context.seal(OwnRecordsQuery(nonce=random_bytes(16)))
        asked_boot_ms = context.clock.boot_ms()
        try:
            reply = await context.network.request(peer, TRADE_PROTOCOL, query.data)
            answer = open_as_untrusted(reply, CounterpartyGrants, context.network_id)
        except (NodeError, ProtocolError) as error:
            log.info("recollection.no_answer", peer=peer.hex(), problem=str(error))
            return
        if answer.signer != peer or answer.record.query_id != query.id:
            return
        self._skew.heard(peer, answer.record.answered_at, asked_boot_ms)
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
            clause = "kind in ('grant', 'release') and signer = ?"
            rows = tx.records.where(clause, query.signer, order_by="at desc", limit=GRANTS_MAX)
            return [row.data for row in rows]

        entries, left = [], ENTRIES_SIZE_MAX
        for entry in await self._context.store.transaction(read):
            left -= len(entry)
            if left < 0:
                break
            entries.append(entry)
        return CounterpartyGrants(
            query_id=query.id, answered_at=self._context.clock.now(), offers=tuple(offers), grants=tuple(entries)
        )

    async def _judge(self, answer: CounterpartyGrants) -> None:
        forgotten: list[tuple[int, int]] = []
        """(epoch, until when a lease of it may be out)."""
        for data in answer.offers:
            offer = self._own(data, Offer)
            if offer is not None and self._is_forgotten_offer(offer.record):
                longest_ms = offer.record.terms.lease_max_ms + offer.record.terms.notice_ms
                forgotten.append((offer.record.epoch, offer.record.expires_at + longest_ms))
        grants = [grant for data in answer.grants if (grant := self._own(data, Grant)) is not None]
        releases = [release for data in answer.grants if (release := self._own(data, Release)) is not None]

        def read(tx: Transaction) -> list[tuple[int, int]]:
            lost = [
                (grant.record.epoch, grant.record.until) for grant in grants if tx.records.get(grant.id) is None
            ]
            return lost + [(entry.record.epoch, 0) for entry in releases if tx.records.get(entry.id) is None]

        forgotten += await self._context.store.transaction(read)
        if not forgotten:
            return
        epoch, sells_from = max(epoch for epoch, _ in forgotten) + 1, max(until for _, until in forgotten)
        if not await self._seller.open_epoch(epoch, Millis(sells_from)):
            return
        log.error("recollection.restored_database", sells_from=sells_from, epoch=epoch)
        if sells_from > self._context.clock.now():
            self._note("the database is older than what peers remember: is it an older copy?")

    def _own(self, data: bytes, record_type: type[T]) -> Sealed[T] | None:
        try:
            sealed = open_as_untrusted(data, record_type, self._context.network_id)
        except ProtocolError:
            return None
        return sealed if sealed.signer == self._context.node else None

    def _is_forgotten_offer(self, offer: Offer) -> bool:
        return self._seller.newest_known_sequence < offer.sequence and offer.issued_at < self._started_at
