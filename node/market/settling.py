"""From a finished lease to its receipt, and from receipts to balances.

The provider signs a receipt of what its keeper metered and which voucher it holds; the renter checks it against
its own keeper's account and accepts; both then have one line in their ledgers that differ in sign only.
Simulated leases have receipts, but count for nothing. Refuses to move money: settlements record payments that
were made outside.
"""

from node.errors import LedgerError
from node.lease.files import STATUS_FILE_MAX, LeaseStatus
from node.market.context import Context
from node.store import EntryRow, LeaseRow, Transaction
from protocol import codec
from protocol.envelope import Sealed
from protocol.errors import MalformedRecord
from protocol.identity import hash_bytes
from protocol.machines.lease import COMPLETED, FailReason
from protocol.records import Receipt
from protocol.units import Price, cost, format_amount

METER_SLACK_MS = 2000
METER_SLACK_PERMILLE = 10
"""Meters may differ by the larger of the two: over 1% and over 2 s is a dispute."""
NOT_YET = "not_yet"
"""Reason of a refusal that means: send it again later."""
RECEIPT_KIND = "receipt"
SETTLEMENT_KIND = "settlement"
UNPAID_KIND = "unpaid"
"""What a lease used beyond its vouchers: not owed, but it uses up credit until its renter has paid as much."""


def status_on_record(row: LeaseRow) -> LeaseStatus | None:
    """Return the last status that the lease's keeper was heard to say, when its directory is gone."""
    if not row.status:
        return None
    try:
        return codec.decode_untrusted(row.status, LeaseStatus, STATUS_FILE_MAX)
    except MalformedRecord:
        return None  # written by another version


def receipt_of(context: Context, row: LeaseRow, status: LeaseStatus | None) -> Receipt:
    """Return the receipt of a provider's lease that is over. `status` None: its directory was lost."""
    now = context.clock.now()
    if row.countersignature_id is None:
        raise LedgerError("a lease without a countersignature has no receipt")
    voucher_amount = 0 if status is None else status.voucher_amount
    metered_ms = 0 if status is None else status.metered_ms
    return Receipt(
        lease=row.lease,
        provider=context.node,
        renter=row.peer,
        countersignature_id=row.countersignature_id,
        job_hash=row.job_hash,
        outcome="keeper_died" if status is None else status.outcome,
        exit_status=-1 if status is None else status.exit_status,
        started_at=0 if status is None else status.started_at,
        ended_at=now if status is None or not status.ended_at else status.ended_at,
        metered_ms=metered_ms,
        price=row.price,
        quantity=row.quantity,
        # The keeper's word: what was metered, less the refund of the terms, at most the highest voucher.
        amount=0 if status is None else min(status.amount, cost_of(row, metered_ms), voucher_amount),
        voucher_amount=voucher_amount,
        voucher_number=0 if status is None else status.voucher_number,
        outputs=()
        if status is None
        else tuple(out.manifest for out in status.outputs if out.manifest is not None),
        simulated=row.simulated,
    )


def objection_to(receipt: Receipt, row: LeaseRow, status: LeaseStatus | None, renter: bytes) -> str:
    """Return why the renter does not accept a receipt, or "" when it agrees with its own account."""
    signed = 0 if status is None else status.voucher_amount
    metered_ms = 0 if status is None else status.metered_ms
    slack_ms = max(METER_SLACK_MS, metered_ms * METER_SLACK_PERMILLE // 1000)
    if (receipt.provider, receipt.renter) != (row.peer, renter):
        return "it names other parties"
    if (receipt.price, receipt.quantity, receipt.job_hash) != (row.price, row.quantity, row.job_hash):
        return "price, number of devices or job differ from the award"
    if receipt.simulated != row.simulated:
        return "it hides that the devices are simulated" if row.simulated else "it calls real devices simulated"
    if receipt.countersignature_id != row.countersignature_id:
        return "it names another countersignature"
    if receipt.amount > signed or receipt.voucher_amount > signed:
        return f"it claims {format_amount(receipt.amount)}, and vouchers for {format_amount(signed)} were signed"
    if receipt.amount > cost_of(row, receipt.metered_ms):
        return "it claims more than its own metered time costs"
    if status is not None and not status.ended_at:
        return ""  # we were not there when the job ended: what we have signed bounds it, as we have agreed
    if status is not None and receipt.amount > status.amount + cost_of(row, slack_ms):
        owed = format_amount(status.amount)
        return f"it claims {format_amount(receipt.amount)}, and {owed} are owed by our account"
    if receipt.metered_ms > metered_ms + slack_ms:
        return f"it claims {receipt.metered_ms} ms of job time, and {metered_ms} ms were metered here"
    return ""


def reason_without_us(receipt: Receipt) -> tuple[FailReason, str]:
    """Return why a lease failed that its provider closed while our keeper was out of reach, and that in words."""
    closed = "the provider has closed the lease, and keeps nothing of it any more"
    away = f"this machine was away for longer than the provider waits: {closed}"
    if receipt.outcome == COMPLETED:
        return FailReason.RETENTION_PASSED, f"the job ended with exit status {receipt.exit_status}; {away}"
    known = {str(reason): reason for reason in FailReason}
    reason = known.get(receipt.outcome, FailReason.PROVIDER_AWAY)
    return reason, away if reason in (FailReason.RENTER_AWAY, FailReason.RETENTION_PASSED) else closed


def cost_of(row: LeaseRow, metered_ms: int) -> int:
    """Return what `metered_ms` of the lease costs, in nano-credits."""
    return cost(Price(row.price), row.quantity, metered_ms)


def entry_of(sealed: Sealed[Receipt], *, is_provider: bool, confirmed: bool) -> EntryRow:
    """Return the ledger's line for a receipt."""
    receipt = sealed.record
    return EntryRow(
        id=sealed.id,
        peer=receipt.renter if is_provider else receipt.provider,
        kind=RECEIPT_KIND,
        amount=receipt.amount if is_provider else -receipt.amount,
        lease=receipt.lease,
        simulated=receipt.simulated,
        confirmed=confirmed,
        note=receipt.outcome,
        at=receipt.ended_at,
    )


def unpaid_entry_of(sealed: Sealed[Receipt]) -> EntryRow:
    """Return the provider's line for what a lease used and no voucher promised; usually of nothing."""
    receipt = sealed.record
    used = cost(Price(receipt.price), receipt.quantity, receipt.metered_ms)
    return EntryRow(
        id=hash_bytes(b"unpaid" + sealed.id),
        peer=receipt.renter,
        kind=UNPAID_KIND,
        amount=max(0, used - receipt.voucher_amount),
        lease=receipt.lease,
        simulated=receipt.simulated,
        confirmed=False,
        note=receipt.outcome,
        at=receipt.ended_at,
    )


def balance_with(tx: Transaction, peer: bytes) -> int:
    """Return what `peer` owes us by receipts and settlements, in nano-credits; negative: we owe it.

    A receipt of ours that the peer has not accepted counts as owed: not answering must not be a way out. A
    settlement counts once both have signed it.
    """
    rows = tx.entries.where("peer = ? and simulated = 0", peer)
    return sum(row.amount for row in rows if row.confirmed or row.kind == RECEIPT_KIND)
