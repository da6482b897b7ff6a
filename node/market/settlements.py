"""Payments that were made outside, put on record with both signatures (the `manual` driver).

      we record ─▶ settlement, signed ─▶ pending at the peer ─▶ its owner accepts ─▶ acceptance, signed ─▶ counts

Until both have signed, a settlement changes no balance. Refuses to move money.
"""

import enum
from typing import NamedTuple

from node.errors import BadArgument, NotFound
from node.market.context import Context, random_bytes
from node.market.outbox import Outbox
from node.market.settling import SETTLEMENT_KIND, balance_with
from node.store import EntryRow, OutboxRow, RecordRow, Transaction
from protocol.envelope import Sealed, open_as_untrusted
from protocol.errors import WrongKind
from protocol.records import Refusal, Settlement, SettlementAcceptance
from protocol.units import AMOUNT_MAX, DAY_MS

LIFETIME_MS = 30 * DAY_MS
PENDING_PER_PEER_MAX = 16
"""Most settlements of one peer that wait for our owner's word."""


class SettlementState(enum.StrEnum):
    """How far a settlement is."""

    AWAITING_PEER = "awaiting_peer"
    AWAITING_US = "awaiting_us"
    ACCEPTED = "accepted"


class KnownSettlement(NamedTuple):
    """A settlement on record."""

    id: bytes
    peer: bytes
    record: Settlement
    state: SettlementState


class Settlements:
    """Records settlements and carries them to the other side."""

    def __init__(self, context: Context, outbox: Outbox) -> None:
        self._context = context
        self._outbox = outbox

    async def propose(self, peer: bytes, amount: int, reference: str, *, paid_by_us: bool) -> KnownSettlement:
        """Sign a settlement and send it to the peer. Raises BadArgument."""
        if not 0 < amount <= AMOUNT_MAX:
            raise BadArgument("a settlement is of more than nothing", hint="give the amount that was paid")
        if peer == self._context.node:
            raise BadArgument("that is this node itself")
        context = self._context
        payer, payee = (context.node, peer) if paid_by_us else (peer, context.node)
        balance = await context.store.transaction(lambda tx: balance_with(tx, peer))
        change = amount if paid_by_us else -amount
        settlement = context.seal(
            Settlement(
                payer=payer,
                payee=payee,
                amount=amount,
                balance_after=-(balance + change) if paid_by_us else balance + change,
                reference=reference,
                nonce=random_bytes(16),
                settled_at=context.clock.now(),
            )
        )

        def write(tx: Transaction) -> OutboxRow:
            tx.records.put(context.record_row(settlement))
            tx.entries.put(self._entry(settlement, peer))
            return self._outbox.enqueue(tx, peer, settlement, LIFETIME_MS)

        self._outbox.kick(await context.store.transaction(write))
        return KnownSettlement(settlement.id, peer, settlement.record, SettlementState.AWAITING_PEER)

    async def on_settlement(self, sealed: Sealed[Settlement]) -> Refusal | None:
        """Keep a peer's settlement until our owner accepts it."""
        record, node = sealed.record, self._context.node
        if {record.payer, record.payee} != {sealed.signer, node}:
            return Refusal(of=sealed.id, reason="not_ours")

        def write(tx: Transaction) -> Refusal | None:
            if tx.entries.get(sealed.id) is not None:
                return None
            if not _has_dealt_with(tx, sealed.signer):
                # Keys cost nothing: strangers could fill the disk with payments.
                return Refusal(of=sealed.id, reason="unknown_peer", detail="we have had no dealings")
            pending = tx.entries.count("peer = ? and kind = ? and confirmed = 0", sealed.signer, SETTLEMENT_KIND)
            if pending >= PENDING_PER_PEER_MAX:
                return Refusal(of=sealed.id, reason="too_many", detail="others are still pending")
            tx.records.put(self._context.record_row(sealed))
            tx.entries.put(self._entry(sealed, sealed.signer))
            return None

        return await self._context.store.transaction(write)

    async def accept(self, prefix: str) -> KnownSettlement:
        """Agree with a pending settlement, named by its id or a unique prefix. Raises NotFound, BadArgument."""
        pending = [known for known in await self.known() if known.id.hex().startswith(prefix)]
        if not pending:
            raise NotFound(f"there is no settlement {prefix!r}", hint="see `gpunode money ledger`")
        if len(pending) > 1:
            raise BadArgument(
                f"{prefix!r} is the beginning of {len(pending)} settlements", hint="give more digits"
            )
        known, context = pending[0], self._context
        if known.state is SettlementState.ACCEPTED:
            return known
        if known.state is SettlementState.AWAITING_PEER:
            raise BadArgument("this settlement is ours; the peer has to accept it")
        acceptance = context.seal(SettlementAcceptance(settlement_id=known.id, accepted_at=context.clock.now()))

        def write(tx: Transaction) -> OutboxRow:
            tx.records.put(context.record_row(acceptance, reply_to=known.id))
            tx.entries.change(known.id, confirmed=1)
            return self._outbox.enqueue(tx, known.peer, acceptance, LIFETIME_MS)

        self._outbox.kick(await context.store.transaction(write))
        return known._replace(state=SettlementState.ACCEPTED)

    async def on_acceptance(self, sealed: Sealed[SettlementAcceptance]) -> Refusal | None:
        """Let a settlement of ours count: the peer has agreed."""
        settlement_id = sealed.record.settlement_id

        def write(tx: Transaction) -> bool:
            row, entry = tx.records.get(settlement_id), tx.entries.get(settlement_id)
            if row is None or entry is None or entry.kind != SETTLEMENT_KIND:
                return False
            if row.signer != self._context.node or entry.peer != sealed.signer:
                return False
            tx.records.put(self._context.record_row(sealed, reply_to=settlement_id))
            tx.entries.change(settlement_id, confirmed=1)
            return True

        known = await self._context.store.transaction(write)
        return None if known else Refusal(of=sealed.id, reason="unknown_settlement")

    async def known(self) -> tuple[KnownSettlement, ...]:
        """Return every settlement on record, newest first."""

        def read(tx: Transaction) -> list[tuple[EntryRow, RecordRow | None]]:
            entries = tx.entries.where("kind = ?", SETTLEMENT_KIND, order_by="at desc")
            return [(entry, tx.records.get(entry.id)) for entry in list(entries)]

        return tuple(
            self._known(entry, row)
            for entry, row in await self._context.store.transaction(read)
            if row is not None
        )

    def _known(self, entry: EntryRow, row: RecordRow) -> KnownSettlement:
        sealed = open_as_untrusted(row.data, Settlement, self._context.network_id)
        if entry.confirmed:
            state = SettlementState.ACCEPTED
        elif sealed.signer == self._context.node:
            state = SettlementState.AWAITING_PEER
        else:
            state = SettlementState.AWAITING_US
        return KnownSettlement(entry.id, entry.peer, sealed.record, state)

    def _entry(self, sealed: Sealed[Settlement], peer: bytes) -> EntryRow:
        record = sealed.record
        if peer not in (record.payer, record.payee):
            raise WrongKind("a settlement names its peer")
        return EntryRow(
            id=sealed.id,
            peer=peer,
            kind=SETTLEMENT_KIND,
            # What we paid lowers what we owe; what the peer paid lowers what it owes.
            amount=record.amount if record.payer == self._context.node else -record.amount,
            lease=None,
            simulated=False,
            confirmed=False,
            note=record.reference,
            at=record.settled_at,
        )


def _has_dealt_with(tx: Transaction, peer: bytes) -> bool:
    known = tx.peers.get(peer) is not None or tx.entries.count("peer = ?", peer) > 0
    return known or tx.leases.count("peer = ?", peer) > 0
