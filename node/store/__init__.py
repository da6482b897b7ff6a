"""The daemon's database: SQLite through sqlite-utils, opened by the daemon alone.

Refuses to know what its rows mean: `node.market` and `node.daemon` do.
"""

from node.store.database import Store, Transaction
from node.store.rows import (
    EntryRow,
    JobRow,
    LeaseRow,
    LeaseSecretRow,
    ListingRow,
    OutboxRow,
    PeerRow,
    RecordRow,
)
from node.store.table import Table

__all__ = [
    "EntryRow",
    "JobRow",
    "LeaseRow",
    "LeaseSecretRow",
    "ListingRow",
    "OutboxRow",
    "PeerRow",
    "RecordRow",
    "Store",
    "Table",
    "Transaction",
]
