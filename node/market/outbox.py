"""Delivery: every record that must reach a peer is stored first, and sent until it is answered or expires.

Rows are written in the transaction that made them necessary (`enqueue`) and sent after it (`kick`); a daemon
that was killed in between sends them at its next start. Receivers answer a repeated record as they answered it
the first time, so sending twice is harmless. Two tasks a peer, each in order: an account that it won't settle yet
must not hold up its next trade. Refuses to understand answers: they go to the handler with the row.
"""

import random
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any

import msgspec
import trio

from node.errors import NodeError
from node.log import get_logger
from node.market.context import TRADE_PROTOCOL, Context
from node.ports import TaskStatus
from node.store import OutboxRow, Transaction
from protocol.envelope import Sealed, kind_of, open_untrusted
from protocol.errors import BadSignature, ProtocolError
from protocol.identity import NodeId

log = get_logger(__name__)

REQUEST_TIMEOUT_MS = 5_000
BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 15.0
LANE_QUEUE_MAX = 1024
"""Most undelivered records of one lane kept in memory; more wait in the database."""
TRADE_KINDS = frozenset({"bid", "bid_rejected", "award", "countersignature", "grant_delivery"})
"""What is worthless in a few seconds; everything else is accounts, and can wait."""

Lane = tuple[bytes, bool]
"""(peer, whether it carries trade)."""


class Undelivered(msgspec.Struct, frozen=True):
    """The record expired before the peer answered; `problem` says why for people."""

    problem: str


Answer = Sealed[Any] | Undelivered
AnswerHandler = Callable[[OutboxRow, Answer], Awaitable[None]]


class Outbox:
    """Sends what the transactions of others put into it."""

    def __init__(self, context: Context, on_answer: AnswerHandler) -> None:
        self._context = context
        self._on_answer = on_answer
        self._queues: dict[Lane, deque[OutboxRow]] = {}
        self._news: dict[Lane, trio.Event] = {}
        self._overflowed: set[Lane] = set()
        """Lanes of which some rows are in the database only."""
        self._reached: set[Lane] = set()
        """Lanes whose peer has connected since they were last looked at."""
        self._nursery: trio.Nursery | None = None

    def enqueue(self, tx: Transaction, peer: bytes, sealed: Sealed[Any], lifetime_ms: int) -> OutboxRow:
        """Put a record for `peer` into the transaction; hand the row to `kick` after the commit."""
        row = OutboxRow(
            number=tx.next_outbox_number(),
            peer=peer,
            kind=kind_of(type(sealed.record)),
            record_id=sealed.id,
            data=sealed.data,
            expires_at=self._context.clock.now() + lifetime_ms,
        )
        tx.outbox.add(row)
        return row

    def kick(self, *rows: OutboxRow) -> None:
        """Begin to deliver rows whose transaction is committed."""
        for row in rows:
            lane = (row.peer, row.kind in TRADE_KINDS)
            queue = self._queues.setdefault(lane, deque())
            if lane in self._overflowed or len(queue) >= LANE_QUEUE_MAX:
                self._overflowed.add(lane)
            else:
                queue.append(row)
            if lane not in self._news:
                self._news[lane] = trio.Event()
                if self._nursery is not None:
                    self._nursery.start_soon(self._serve, lane)
            self._news[lane].set()

    def wake(self, peer: bytes) -> None:
        """Try what waits for a peer now: it has just become reachable."""
        for lane in ((peer, True), (peer, False)):
            if lane in self._news:
                self._reached.add(lane)
                self._news[lane].set()

    async def run(self, *, task_status: TaskStatus = trio.TASK_STATUS_IGNORED) -> None:
        """Deliver, for ever; begins with what an earlier run left."""
        left = await self._context.store.transaction(lambda tx: list(tx.outbox.all(order_by="number")))
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for lane in self._news:
                nursery.start_soon(self._serve, lane)
            self.kick(*left)
            task_status.started()
            await trio.sleep_forever()

    async def _serve(self, lane: Lane) -> None:
        queue = self._queues[lane]
        while queue or lane in self._overflowed:
            if not queue:
                await self._refill(lane, queue)
                continue
            await self._deliver(queue[0], lane)
            queue.popleft()
        # Nothing more: the task ends, and `kick` starts another one when there is.
        del self._queues[lane], self._news[lane]
        self._reached.discard(lane)

    async def _refill(self, lane: Lane, queue: deque[OutboxRow]) -> None:
        """Take from the database what did not fit into the queue."""
        peer, is_trade = lane

        def read(tx: Transaction) -> list[OutboxRow]:
            rows = tx.outbox.where("peer = ?", peer, order_by="number")
            return list(islice((row for row in rows if (row.kind in TRADE_KINDS) == is_trade), LANE_QUEUE_MAX))

        try:
            rows = await self._context.store.transaction(read)
        except NodeError as error:
            log.error("outbox.not_read", problem=str(error))
            await trio.sleep(BACKOFF_MAX_S)
            return
        queue.extend(rows)
        if len(rows) < LANE_QUEUE_MAX:
            self._overflowed.discard(lane)

    async def _deliver(self, row: OutboxRow, lane: Lane) -> None:
        backoff_s = BACKOFF_MIN_S
        hurried_at = -BACKOFF_MAX_S
        while True:
            answer = await self._attempt(row)
            if isinstance(answer, Undelivered) and self._context.clock.now() < row.expires_at:
                # A daemon that has just started is connected a little before it answers. One that comes and goes
                # all the time is not tried more often for that.
                if lane in self._reached and trio.current_time() >= hurried_at + BACKOFF_MAX_S:
                    backoff_s, hurried_at = BACKOFF_MIN_S, trio.current_time()
                self._reached.discard(lane)
                news = self._news[lane] = trio.Event()
                with trio.move_on_after(backoff_s * random.uniform(0.5, 1.0)):  # noqa: S311 - jitter, not a secret
                    await news.wait()
                backoff_s = min(BACKOFF_MAX_S, backoff_s * 2)
                continue
            if await self._hand_over(row, answer):
                return
            await trio.sleep(BACKOFF_MIN_S)

    async def _attempt(self, row: OutboxRow) -> Answer:
        context = self._context
        now = context.clock.now()
        if now >= row.expires_at:
            return Undelivered("it expired before it could be delivered")
        timeout_ms = min(REQUEST_TIMEOUT_MS, row.expires_at - now)
        try:
            reply = await context.network.request(
                NodeId(row.peer), TRADE_PROTOCOL, row.data, timeout_ms=timeout_ms
            )
            sealed = open_untrusted(reply, context.network_id)
            if sealed.signer != row.peer:
                raise BadSignature("the answer is signed by somebody else")
        except (NodeError, ProtocolError) as error:
            log.debug("outbox.not_delivered", kind=row.kind, problem=str(error))
            return Undelivered(str(error))
        return sealed

    async def _hand_over(self, row: OutboxRow, answer: Answer) -> bool:
        """Give the answer to its handler and forget the row; False when our own disk would not have it."""
        try:
            try:
                await self._on_answer(row, answer)
            except ProtocolError as error:
                log.warning("outbox.bad_answer", kind=row.kind, problem=str(error))
            await self._context.store.transaction(lambda tx: tx.outbox.delete("number = ?", row.number))
        except NodeError as error:
            log.error("outbox.answer_not_handled", kind=row.kind, problem=str(error))
            return False
        return True
