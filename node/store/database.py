"""Opening, migrating, and the one way to write: a transaction.

WAL with `synchronous=FULL`: what a transaction returned from has survived a power cut. One connection behind a
limiter of one; a write that has begun is never abandoned, also when its caller is cancelled. Refuses to be
opened twice: another daemon on the same state is an error that names it.
"""

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import sqlite_utils
import trio

from node.errors import StoreError
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

T = TypeVar("T")

SCHEMA_VERSION = 2
MIB = 1024 * 1024
FREE_MIN_MIB = 4
"""With less room on its disk, that is the likely cause of whatever fails."""


class Transaction:
    """All tables, inside one transaction."""

    def __init__(self, database: sqlite_utils.Database) -> None:
        self._database = database
        self.listings = Table(database, "listings", ListingRow)
        self.jobs = Table(database, "jobs", JobRow)
        self.leases = Table(database, "leases", LeaseRow)
        self.lease_secrets = Table(database, "lease_secrets", LeaseSecretRow)
        self.records = Table(database, "records", RecordRow)
        self.outbox = Table(database, "outbox", OutboxRow)
        self.peers = Table(database, "peers", PeerRow)
        self.entries = Table(database, "entries", EntryRow)

    def meta(self, key: str) -> str | None:
        """Return a single remembered value."""
        row = next(self._database.query("select value from meta where key = ?", [key]), None)
        return None if row is None else str(row["value"])

    def set_meta(self, key: str, value: str) -> None:
        """Remember a single value."""
        self._database.table("meta").insert({"key": key, "value": value}, replace=True)

    def next_outbox_number(self) -> int:
        """Return a number above every one that the outbox has used."""
        number = int(self.meta("outbox_number") or 0) + 1
        self.set_meta("outbox_number", str(number))
        return number


class Store:
    """The open database."""

    def __init__(self, path: Path) -> None:
        """Open the database at `path`, making or migrating it. Raises StoreError. Blocks on the disk."""
        self._path = path
        self._limiter = trio.CapacityLimiter(1)
        self._lock = _lock(path.with_suffix(".lock"))
        try:
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5)
            self._database = sqlite_utils.Database(connection)
            path.chmod(0o600)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            self._database.execute("PRAGMA foreign_keys=ON")
            self._refuse_damaged()
            _migrate(self._database, path)
        except (sqlite3.Error, OSError) as error:
            os.close(self._lock)
            raise StoreError(f"cannot open the database {path}: {error}", hint=self._hint(error)) from None
        except BaseException:
            os.close(self._lock)
            raise

    async def transaction(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in one transaction: committed when it returns, rolled back when it raises.

        It runs in a thread that is never abandoned, also when the caller is cancelled.

        Raises StoreError when SQLite fails (a full disk, say): nothing was written then.
        """
        return await trio.to_thread.run_sync(self._run, work, limiter=self._limiter)

    def transaction_sync(self, work: Callable[[Transaction], T]) -> T:
        """As `transaction`, blocking: for start-up, before the event loop runs."""
        return self._run(work)

    def close(self) -> None:
        """Close the database."""
        self._database.conn.close()
        os.close(self._lock)

    def _run(self, work: Callable[[Transaction], T]) -> T:
        try:
            self._database.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise self._failed(error) from None
        try:
            result = work(Transaction(self._database))
            self._database.execute("COMMIT")
        except BaseException as error:
            if self._database.conn.in_transaction:
                self._database.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError | sqlite3.DatabaseError) and not isinstance(
                error, sqlite3.IntegrityError | sqlite3.ProgrammingError
            ):
                raise self._failed(error) from None
            raise
        return result

    def _failed(self, error: sqlite3.Error) -> StoreError:
        return StoreError(f"cannot use the database {self._path}: {error}", hint=self._hint(error))

    def _refuse_damaged(self) -> None:
        """Raise sqlite3.DatabaseError for a damaged file, before anything is signed that it would lose."""
        problem = str(self._database.conn.execute("PRAGMA quick_check(1)").fetchone()[0])
        if problem != "ok":
            raise sqlite3.DatabaseError(" ".join(problem.split()))

    def _hint(self, error: Exception) -> str:
        with suppress(OSError):
            free_mib = shutil.disk_usage(self._path.parent).free // MIB
            if free_mib < FREE_MIN_MIB:
                return f"free some disk space: {free_mib} MiB are left at {self._path.parent}"
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            return (
                f"it is damaged: move {self._path}* away; peers and lease directories tell what it had forgotten"
            )
        return "check the disk's health, and the file's owner and permissions"


def _lock(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StoreError(f"cannot open {path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreError(
            f"another daemon (pid {holder}) uses {path.parent}",
            hint="stop it with `gpunode stop`, or give this one another state directory",
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _migrate(database: sqlite_utils.Database, path: Path) -> None:
    version = int(database.conn.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written by a newer gpunode (schema {version}, this one knows {SCHEMA_VERSION})",
            hint="install that version again, or move the database away",
        )
    for number, migration in enumerate(_MIGRATIONS[version:], start=version + 1):
        with database.atomic():
            migration(database)
            database.execute(f"PRAGMA user_version = {number}")


def _first_schema(database: sqlite_utils.Database) -> None:
    Table.create(database, "listings", ListingRow)
    Table.create(database, "jobs", JobRow, ["state", "lease"])
    Table.create(database, "leases", LeaseRow, ["state", "peer", "job_id"])
    Table.create(database, "lease_secrets", LeaseSecretRow)
    Table.create(database, "records", RecordRow, ["lease", "reply_to"])
    Table.create(database, "outbox", OutboxRow, ["peer"])
    Table.create(database, "peers", PeerRow)
    Table.create(database, "entries", EntryRow, ["peer"])
    database.table("meta").create({"key": str, "value": str}, pk="key", strict=True)


def _index_signers(database: sqlite_utils.Database) -> None:
    # Every peer that connects asks for its own records, and may ask again and again.
    database.table("records").create_index(["signer"])


_MIGRATIONS: tuple[Callable[[sqlite_utils.Database], None], ...] = (_first_schema, _index_signers)
