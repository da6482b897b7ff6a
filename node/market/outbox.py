"""Delivery: every record that must reach a peer is stored first, and sent until it is answered or expires.

Rows are written in the transaction that made them necessary (`enqueue`) and sent after it (`kick`); a daemon
that was killed in between sends them at its next start. Receivers answer a repeated record as they answered it
the first time, so sending twice is harmless. One task a peer, in order. Refuses to understand answers: they go
to the handler with the row.
"""

import random
from collections import deque
from collections.abc import Awaitable, Callable
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
PEER_QUEUE_MAX = 1024
"""Most undelivered records of one peer kept in memory; more wait in the database."""


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
        self._queues: dict[bytes, deque[OutboxRow]] = {}
        self._news: dict[bytes, trio.Event] = {}
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
            queue = self._queues.setdefault(row.peer, deque())
            if len(queue) < PEER_QUEUE_MAX:
                queue.append(row)
            if row.peer not in self._news:
                self._news[row.peer] = trio.Event()
                if self._nursery is not None:
                    self._nursery.start_soon(self._serve_peer, row.peer)
            self._news[row.peer].set()

    def wake(self, peer: bytes) -> None:
        """Try what waits for a peer now: it has just become reachable."""
        if peer in self._news:
            self._news[peer].set()

    async def run(self, *, task_status: TaskStatus = trio.TASK_STATUS_IGNORED) -> None:
        """Deliver, for ever; begins with what an earlier run left."""
        left = await self._context.store.transaction(lambda tx: list(tx.outbox.all(order_by="number")))
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for peer in self._news:
                nursery.start_soon(self._serve_peer, peer)
            self.kick(*left)
            task_status.started()
            await trio.sleep_forever()

    async def _serve_peer(self, peer: bytes) -> None:
        queue = self._queues[peer]
        while queue:
            await self._deliver(queue[0])
            queue.popleft()
        # Nothing more: the task ends, and `kick` starts another one when there is.
        del self._queues[peer], self._news[peer]

    async def _deliver(self, row: OutboxRow) -> None:
        backoff_s = BACKOFF_MIN_S
        while True:
            answer = await self._attempt(row)
            if isinstance(answer, Undelivered) and self._context.clock.now() < row.expires_at:
                news = self._news[row.peer] = trio.Event()
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
            await self._on_answer(row, answer)
            await self._context.store.transaction(lambda tx: tx.outbox.delete("number = ?", row.number))
        except ProtocolError as error:
            log.warning("outbox.bad_answer", kind=row.kind, problem=str(error))
            await self._context.store.transaction(lambda tx: tx.outbox.delete("number = ?", row.number))
        except NodeError as error:
            log.error("outbox.answer_not_handled", kind=row.kind, problem=str(error))
            return False
        return True
