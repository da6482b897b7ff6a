"""How much a renter may still come to owe us.

Named peers have a limit of their own. All strangers share one bucket, refilled only by settled payments: else a
new key per window would be a free GPU for ever. What counts against a limit is the balance plus the caps of live
leases. Refuses to extend credit: a bid that does not fit is rejected, with the time that the rest would buy.
"""

from node.market.leases import LeaseState
from node.market.settling import balance_with
from node.store import Transaction

_OPEN_STATES = (LeaseState.AWARDED, LeaseState.COUNTERSIGNED, LeaseState.GRANTED)


def credit_left(tx: Transaction, renter: bytes, limit: int | None, stranger_limit: int) -> int:
    """Return the nano-credits that `renter` may still commit; `limit` None: it is a stranger. May be negative."""
    if limit is not None:
        return limit - balance_with(tx, renter) - exposure_of(tx, renter)
    return stranger_limit - strangers_exposure(tx)


def exposure_of(tx: Transaction, renter: bytes) -> int:
    """Return the caps of `renter`'s live leases with us, in nano-credits."""
    rows = tx.leases.where("role = 'provider' and peer = ? and simulated = 0 and receipt_id is null", renter)
    return sum(row.max_spend for row in rows if row.state in _OPEN_STATES)


def strangers_exposure(tx: Transaction) -> int:
    """Return what all strangers together owe us or may come to owe us by live leases."""
    named = {row.node for row in tx.peers.where("credit_limit is not null")}
    rows = tx.leases.where("role = 'provider' and simulated = 0")
    strangers = {row.peer for row in rows} - named
    return sum(max(0, balance_with(tx, peer)) + exposure_of(tx, peer) for peer in strangers)
