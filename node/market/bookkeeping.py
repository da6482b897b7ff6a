"""The order book as this node keeps it: what it hears by gossip, and what peers send when they connect.

Every statement is decoded, verified and ranged before it is believed; duplicates are dropped before that only by
the hash of the whole envelope. Refuses to bid.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

import msgspec
import trio

from node.config import DEMO_NETWORK
from node.errors import NodeError
from node.log import get_logger
from node.market.auctions import OFFERS_TOPIC
from node.market.context import Context, random_bytes
from node.ports import GossipVerdict, TaskStatus
from protocol import codec
from protocol.book import CLOCK_TOLERANCE_MS, Duplicate, Inserted, OrderBook, Refused, Stale, Statement, Superseded
from protocol.envelope import ENVELOPE_SIZE_MAX, Sealed, open_untrusted, record_id
from protocol.errors import ProtocolError
from protocol.identity import NodeId
from protocol.records import Offer, Withdrawal
from protocol.units import Millis

log = get_logger(__name__)

BOOK_PROTOCOL = "book/1"
"""Request: empty. Reply: the statements that the peer knows, at most a page."""
PAGE_STATEMENTS_MAX = 512
PAGE_SIZE_MAX = 900 * 1024
SEEN_MAX = 50_000
"""Most record ids remembered, to drop duplicates before verifying them."""
EXPIRE_S = 5.0


class BookPage(msgspec.Struct, frozen=True):
    """What a newcomer is sent."""

    statements: tuple[bytes, ...]


class Bookkeeper:
    """Fills the order book."""

    def __init__(self, context: Context, own_statements: Callable[[], Iterator[bytes]]) -> None:
        self._context = context
        self._own_statements = own_statements
        self.book = OrderBook(random_bytes(32))
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._changed = trio.Event()
        self._ripens_at: int | None = None
        """When the first of the offers that are dated ahead of our clock may be bid on."""

    def register(self) -> None:
        """Subscribe to the offers' topic and answer newcomers."""
        self._context.network.on_gossip(OFFERS_TOPIC, self._on_gossip)
        self._context.network.on_request(BOOK_PROTOCOL, self._on_page_request)

    async def run(self, *, task_status: TaskStatus = trio.TASK_STATUS_IGNORED) -> None:
        """Drop what has expired, and tell of offers that have become live, for ever."""
        task_status.started()
        while True:
            await trio.sleep(EXPIRE_S)
            now = self._context.clock.now()
            if self.book.expire(now) or self._has_ripened(now):
                self._wake()

    def _has_ripened(self, now: Millis) -> bool:
        """Return whether an offer that was dated ahead of our clock has become live since the last time."""
        if self._ripens_at is None or now < self._ripens_at:
            return False
        ahead = [at for at in map(_ripe_at, self.book.offers()) if at > now]
        self._ripens_at = min(ahead, default=None)
        return True

    async def changed(self) -> None:
        """Wait for the next change of the book."""
        await self._changed.wait()

    def known_offers(self) -> Iterator[Sealed[Offer]]:
        """Iterate over every offer in the book, also those whose dates keep them from being bid on now."""
        return self.book.offers()

    def live_offers(self, now: Millis) -> Iterator[Sealed[Offer]]:
        """Iterate over the offers that may be bid on now; own ones are not in the book."""
        return self.book.live(now)

    async def fetch_page(self, node: NodeId) -> None:
        """Ask a peer that has just connected for what it knows. Never raises for the peer's faults."""
        try:
            reply = await self._context.network.request(node, BOOK_PROTOCOL, b"", timeout_ms=10_000)
            page = codec.decode_untrusted(reply, BookPage, 1024 * 1024)
        except (NodeError, ProtocolError) as error:
            log.info("book.no_page", peer=node.hex(), problem=str(error))
            return
        for data in page.statements[:PAGE_STATEMENTS_MAX]:
            self._take(data)
            await trio.lowlevel.checkpoint()

    def _on_gossip(self, forwarder: NodeId, data: bytes) -> GossipVerdict:
        del forwarder
        return self._take(data)

    def _take(self, data: bytes) -> GossipVerdict:
        if len(data) > ENVELOPE_SIZE_MAX:
            return GossipVerdict.REJECT
        name = record_id(data)
        if name in self._seen:
            return GossipVerdict.IGNORE
        try:
            sealed = open_untrusted(data, self._context.network_id)
        except ProtocolError as error:
            log.debug("book.bad_statement", problem=str(error))
            return GossipVerdict.REJECT
        if not isinstance(sealed.record, Offer | Withdrawal):
            return GossipVerdict.REJECT
        if (
            isinstance(sealed.record, Offer)
            and sealed.record.simulated
            and self._context.network_name != DEMO_NETWORK
        ):
            return GossipVerdict.REJECT
        if sealed.signer == self._context.node:
            return GossipVerdict.IGNORE
        return self._insert(sealed)

    def _remember(self, record_id: bytes) -> None:
        """Drop further copies unseen. Only what was verified and judged for good is remembered."""
        self._seen[record_id] = None
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)

    def _insert(self, sealed: Statement) -> GossipVerdict:
        result = self.book.insert(sealed, self._context.clock.now())
        match result:
            case Inserted() | Superseded():
                self._remember(sealed.id)
                if _ripe_at(sealed) > self._context.clock.now():
                    self._ripens_at = min(_ripe_at(sealed), self._ripens_at or _ripe_at(sealed))
                self._wake()
                return GossipVerdict.ACCEPT
            case Duplicate() | Stale():
                self._remember(sealed.id)
                return GossipVerdict.IGNORE
            case Refused():
                log.info("book.refused", provider=sealed.signer.hex(), problem=result.detail)
                return GossipVerdict.IGNORE

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _on_page_request(self, caller: NodeId, data: bytes) -> bytes:
        del caller, data
        statements: list[bytes] = []
        size = 0
        for statement in self._known():
            size += len(statement) + 8
            if len(statements) >= PAGE_STATEMENTS_MAX or size > PAGE_SIZE_MAX:
                break
            statements.append(statement)
        return codec.encode(BookPage(tuple(statements)))

    def _known(self) -> Iterator[bytes]:
        yield from self._own_statements()
        now = self._context.clock.now()
        yield from (offer.data for offer in self.book.live(now))


def _ripe_at(statement: Statement) -> int:
    """Return from when on a statement's date does not keep it from being believed."""
    return statement.record.issued_at - CLOCK_TOLERANCE_MS
