"""money.*: what is owed, and why."""

from node.daemon.state import Daemon
from node.daemon.views import settlement_entry
from node.market.credit import exposure_of, strangers_exposure
from node.market.settlements import SettlementState
from node.market.settling import RECEIPT_KIND, SETTLEMENT_KIND, balance_with
from node.rpc.method import Caller, Handlers, Nothing
from node.rpc.methods import money as api
from node.store import EntryRow, LeaseRow, RecordRow, Transaction
from protocol.envelope import open_as_untrusted
from protocol.identity import peer_id
from protocol.records import Receipt


def _account(state: Daemon, peer: bytes, entries: list[EntryRow], tx: Transaction) -> api.Account:
    counted = [entry for entry in entries if entry.peer == peer and not entry.simulated]
    receipts = [entry for entry in counted if entry.kind == RECEIPT_KIND and entry.confirmed]
    settled = [entry for entry in counted if entry.kind == SETTLEMENT_KIND and entry.confirmed]
    return api.Account(
        peer=peer_id(peer),
        balance=balance_with(tx, peer),
        earned=sum(entry.amount for entry in receipts if entry.amount > 0),
        spent=-sum(entry.amount for entry in receipts if entry.amount < 0),
        settled_to_us=-sum(entry.amount for entry in settled if entry.amount < 0),
        settled_by_us=sum(entry.amount for entry in settled if entry.amount > 0),
        exposure=exposure_of(tx, peer),
        credit_limit=state.market.credit_limit(tx, peer),
    )


def handlers(state: Daemon) -> Handlers:
    """Return the group's handlers."""
    store = state.context.store

    async def ledger(params: Nothing, caller: Caller) -> api.LedgerResult:
        del params, caller
        known = await state.market.settlements.known()
        pending = tuple(
            settlement_entry(item, state.context.node)
            for item in known
            if item.state is not SettlementState.ACCEPTED
        )

        def read(tx: Transaction) -> tuple[list[api.Account], int]:
            entries = list(tx.entries.all())
            peers = dict.fromkeys(entry.peer for entry in entries)
            return [_account(state, peer, entries, tx) for peer in peers], strangers_exposure(tx)

        accounts, exposure = await store.transaction(read)
        accounts.sort(key=lambda account: -abs(account.balance))
        return api.LedgerResult(
            accounts=tuple(accounts),
            owed_to_us=sum(account.balance for account in accounts if account.balance > 0),
            owed_by_us=-sum(account.balance for account in accounts if account.balance < 0),
            strangers_exposure=exposure,
            strangers_limit=state.loaded.config.ledger.stranger_credit,
            pending=pending,
        )

    async def receipts(params: api.ReceiptsParams, caller: Caller) -> api.ReceiptsResult:
        job = None if params.job is None else await state.find_job(params.job, caller)

        def read(tx: Transaction) -> list[tuple[LeaseRow, RecordRow | None, EntryRow | None]]:
            peer = None if params.peer is None else state.find_peer(params.peer, tx)
            rows = tx.leases.where("receipt_id is not null", order_by="ended_at desc")
            owners = {row.id: row.uid for row in tx.jobs.all()}
            found = []
            for lease in list(rows):
                if job is not None and lease.job_id != job.row.id:
                    continue
                if peer is not None and lease.peer != peer:
                    continue
                if not caller.is_admin and owners.get(lease.job_id) != caller.uid:
                    continue
                found.append((lease, tx.records.get(lease.receipt_id), tx.entries.get(lease.receipt_id)))
                if len(found) >= params.limit:
                    break
            return found

        entries = [
            _receipt(state, lease, record, entry)
            for lease, record, entry in await store.transaction(read)
            if record is not None
        ]
        return api.ReceiptsResult(receipts=tuple(entries))

    async def settle(params: api.SettleParams, caller: Caller) -> api.SettleResult:
        del caller
        peer = await store.transaction(lambda tx: state.find_peer(params.peer, tx))
        known = await state.market.settlements.propose(
            peer, params.amount, params.reference, paid_by_us=params.paid_by_us
        )
        return api.SettleResult(entry=settlement_entry(known, state.context.node))

    async def accept(params: api.AcceptParams, caller: Caller) -> api.SettleResult:
        del caller
        known = await state.market.settlements.accept(params.settlement)
        return api.SettleResult(entry=settlement_entry(known, state.context.node))

    return {
        api.LEDGER.name: ledger,
        api.RECEIPTS.name: receipts,
        api.SETTLE.name: settle,
        api.ACCEPT.name: accept,
    }


def _receipt(state: Daemon, lease: LeaseRow, record: RecordRow, entry: EntryRow | None) -> api.ReceiptEntry:
    receipt = open_as_untrusted(record.data, Receipt, state.context.network_id).record
    return api.ReceiptEntry(
        receipt=record.id.hex(),
        lease=lease.lease.hex(),
        job=lease.job_id or None,
        peer=peer_id(lease.peer),
        earned=lease.role == "provider",
        outcome=receipt.outcome,
        exit_status=receipt.exit_status,
        started_at=receipt.started_at,
        ended_at=receipt.ended_at,
        metered_ms=receipt.metered_ms,
        price=receipt.price,
        quantity=receipt.quantity,
        amount=receipt.amount,
        simulated=receipt.simulated,
        accepted=entry is not None and entry.confirmed,
    )
