"""The database: transactions are all or nothing, rows come back as they went in, one daemon at a time."""

import pytest
import trio

from node.errors import StoreError
from node.store import EntryRow, OutboxRow, PeerRow, Store, Transaction
from node.store.database import SCHEMA_VERSION


def _entry(number: int, **changes: object) -> EntryRow:
    fields: dict[str, object] = {
        "id": bytes([number]) * 32,
        "peer": b"p" * 32,
        "kind": "receipt",
        "amount": -5,
        "lease": None,
        "simulated": True,
        "confirmed": False,
        "note": "",
        "at": 1,
    }
    return EntryRow(**{**fields, **changes})  # type: ignore[arg-type]


async def test_rows_come_back_as_they_went_in(tmp_path):
    store = Store(tmp_path / "node.db")
    entry = _entry(1)
    await store.transaction(lambda tx: tx.entries.put(entry))
    assert await store.transaction(lambda tx: tx.entries.get(entry.id)) == entry
    changed = _entry(1, amount=7, confirmed=True)
    await store.transaction(lambda tx: tx.entries.put(changed))
    assert await store.transaction(lambda tx: list(tx.entries.all())) == [changed]
    store.close()


async def test_a_transaction_that_raises_leaves_nothing(tmp_path):
    store = Store(tmp_path / "node.db")

    def half(tx: Transaction) -> None:
        tx.peers.put(PeerRow(node=b"n" * 32, label="x"))
        tx.outbox.add(
            OutboxRow(number=tx.next_outbox_number(), peer=b"", kind="bid", record_id=b"", data=b"", expires_at=0)
        )
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        await store.transaction(half)
    assert await store.transaction(lambda tx: (tx.peers.count(), tx.outbox.count(), tx.meta("outbox_number"))) == (
        0,
        0,
        None,
    )
    store.close()


async def test_a_cancelled_caller_does_not_cut_a_write(tmp_path):
    store = Store(tmp_path / "node.db")
    with trio.CancelScope() as scope:

        def cancelling(tx: Transaction) -> None:
            trio.from_thread.run_sync(scope.cancel)
            tx.peers.put(PeerRow(node=b"n" * 32))

        await store.transaction(cancelling)
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert await store.transaction(lambda tx: tx.peers.count()) == 1
    store.close()


def test_a_second_daemon_is_refused_and_told_who_holds_it(tmp_path):
    store = Store(tmp_path / "node.db")
    with pytest.raises(StoreError, match="another daemon"):
        Store(tmp_path / "node.db")
    store.close()
    Store(tmp_path / "node.db").close()


def test_a_newer_schema_is_refused(tmp_path):
    store = Store(tmp_path / "node.db")
    store._database.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(StoreError, match="newer gpunode"):
        Store(tmp_path / "node.db")


def test_a_damaged_database_is_an_error_with_a_hint(tmp_path):
    (tmp_path / "node.db").write_bytes(b"not a database, but long enough to be read as one" * 100)
    with pytest.raises(StoreError) as caught:
        Store(tmp_path / "node.db")
    assert caught.value.hint


async def test_a_full_disk_is_a_store_error_and_nothing_is_written(tmp_path):
    store = Store(tmp_path / "node.db")
    store._database.execute("PRAGMA max_page_count = 1")

    def large(tx: Transaction) -> None:
        for number in range(250):
            tx.entries.put(_entry(number, note="x" * 1000))

    with pytest.raises(StoreError, match="full"):
        await store.transaction(large)
    assert await store.transaction(lambda tx: tx.entries.count()) == 0
    store.close()


def test_a_database_of_the_first_schema_is_migrated(tmp_path):
    store = Store(tmp_path / "node.db")
    store._database.execute("DROP INDEX idx_records_signer")
    store._database.execute("PRAGMA user_version = 1")
    store.close()
    store = Store(tmp_path / "node.db")
    assert "idx_records_signer" in {index.name for index in store._database.table("records").indexes}
    assert store._database.conn.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
    store.close()


def test_a_damaged_page_is_noticed_at_the_start(tmp_path):
    path = tmp_path / "node.db"
    Store(path).close()
    with path.open("r+b") as file:
        file.seek(2 * 4096)
        file.write(b"\xff" * 4096)
    with pytest.raises(StoreError, match="cannot open the database") as caught:
        Store(path)
    assert "move" in caught.value.hint
    path.unlink()
    Store(path).close()  # its lock was given back
