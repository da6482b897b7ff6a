"""How much a renter may still come to owe us.

Named peers have a limit of their own. All strangers share one bucket, refilled only by settled payments: else a
new key per window would be a free GPU for ever. What counts against a limit is the balance, what leases used
beyond their vouchers, and the caps of live leases. Refuses to extend credit: a bid that does not fit is rejected,
with the time that the rest would buy.
"""

from collections import Counter

from node.market.leases import LeaseState
from node.market.settling import RECEIPT_KIND, UNPAID_KIND
from node.store import EntryRow, LeaseRow, Transaction

_OPEN_STATES = (LeaseState.AWARDED, LeaseState.COUNTERSIGNED, LeaseState.GRANTED)


def credit_left(tx: Transaction, renter: bytes, limit: int | None, stranger_limit: int) -> int:
    """Return the nano-credits that `renter` may still commit; `limit` None: it is a stranger. May be negative."""
    if limit is None:
        return stranger_limit - strangers_exposure(tx)
    entries = tx.entries.where("peer = ? and simulated = 0", renter)
    return limit - sum(_counted(entry) for entry in entries) - exposure_of(tx, renter)


def exposure_of(tx: Transaction, renter: bytes) -> int:
    """Return the caps of `renter`'s live leases with us, in nano-credits."""
    rows = tx.leases.where("role = 'provider' and peer = ? and simulated = 0 and receipt_id is null", renter)
    return sum(_cap(row) for row in rows)


def strangers_exposure(tx: Transaction) -> int:
    """Return what all strangers together owe us or may come to owe us by live leases."""
    named = {row.node for row in tx.peers.where("credit_limit is not null")}
    owed: Counter[bytes] = Counter()
    for entry in tx.entries.where("simulated = 0"):
        owed[entry.peer] += _counted(entry)
    open_leases = tx.leases.where("role = 'provider' and simulated = 0 and receipt_id is null")
    caps = sum(_cap(row) for row in open_leases if row.peer not in named)
    # What one stranger has paid ahead is no credit for the others.
    return caps + sum(max(0, amount) for peer, amount in owed.items() if peer not in named)


def _cap(row: LeaseRow) -> int:
    return row.max_spend if row.state in _OPEN_STATES else 0


def _counted(entry: EntryRow) -> int:
    return entry.amount if entry.confirmed or entry.kind in (RECEIPT_KIND, UNPAID_KIND) else 0
