"""A provider whose database is older than the world: nothing is sold twice, and no paper contradicts another."""

import shutil
import sqlite3
from pathlib import Path

import trio
from support.daemons import Daemons, TestDaemon
from support.hostile import DEMO, Hostile, node_of, now_ms, open_hostile, until

from node.rpc.methods import jobs
from protocol.envelope import open_as_untrusted
from protocol.records import Award, BidAck, BidRejected, Grant, Offer, RejectReason
from protocol.units import DAY_MS, MINUTE_MS

SHORT = """start_price = 1.00
reserve_price = 1.00
[lend.terms]
lease_max = "20m"
notice = "0s"
[lend.auction]
opening = "100ms"
tick = "100ms"
"""


def database_of(daemon: TestDaemon) -> Path:
    """Return where a running daemon's database is."""
    return Path(daemon.status().state_dir) / "node.db"


def restore(daemon: TestDaemon, database: Path, copy: Path) -> None:
    """Cut a daemon's power, put an old copy of its database in its place, and start it again."""
    daemon.kill()
    for suffix in ("-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)
    shutil.copy(copy, database)
    daemon.start()


def grants_kept_by(daemon: TestDaemon) -> list[Grant]:
    """Return the grants that a renter holds as evidence."""
    with sqlite3.connect(f"file:{database_of(daemon)}?mode=ro", uri=True) as connection:
        rows = connection.execute("select data from records where kind = 'grant'").fetchall()
    connection.close()
    return [open_as_untrusted(data, Grant, DEMO).record for (data,) in rows]


async def offer_of(peer: Hostile, provider: TestDaemon) -> Offer:
    """Return the one offer that a provider tells newcomers of."""
    (offer,) = await peer.offers_of(provider)
    return offer.record


async def test_a_restored_database_sells_no_device_that_a_forgotten_lease_may_hold(
    daemons: Daemons, tmp_path: Path
) -> None:
    provider, renter = daemons.provider(lend=SHORT), daemons.renter()
    database, old = database_of(provider), tmp_path / "old.db"
    provider.stop()
    shutil.copy(database, old)
    provider.start()
    renter.connect(provider)
    renter.wait_offers()
    job = renter.run("/bin/sleep", "600")
    await trio.to_thread.run_sync(renter.wait_running, job)
    (first,) = grants_kept_by(renter)

    restore(provider, database, old)
    # Without any peer: the lease's directory is still there, and tells.
    assert any("knows nothing of a lease that is on this disk" in note for note in provider.status().notes)
    (device,) = provider.devices()
    assert (device.use.value, device.lease) == ("not_offered", None)
    assert "forgotten" in device.problem
    async with open_hostile(provider) as peer:
        offer = await offer_of(peer, provider)
        assert (offer.free, offer.epoch) == (0, 1)
        rejected = await peer.tell(provider, peer.bid((await peer.offers_of(provider))[0]))
        assert isinstance(rejected, BidRejected)
        assert rejected.reason is RejectReason.PAUSED
        assert rejected.retry_at is not None
        assert rejected.retry_at >= first.until
        # The job has not noticed, and its provider clears up after it, though it will never be paid.
        renter.connect(provider)
        assert renter.job(job).state is jobs.JobState.RUNNING
        renter.call(jobs.CANCEL, jobs.JobParams(job=job))
        leases = database.parent / "leases"
        await until(lambda: not list(leases.iterdir()), "the forgotten lease's directory to be gone")

        # Restored again, and now only peers remember.
        restore(provider, database, old)
        await peer.connect(provider)
        renter.connect(provider)
        await until(lambda: provider.devices()[0].use.value == "not_offered", "the alarm")
        assert any("older than what peers remember" in note for note in provider.status().notes)
        offer = await offer_of(peer, provider)
        assert (offer.free, offer.epoch) == (0, 2)

    # A day later it sells again, in an epoch in which the chain's numbers are free.
    provider.stop()
    provider.environment["GPUNODE_TEST_CLOCK_OFFSET_MS"] = str(DAY_MS)
    provider.start()
    async with open_hostile(provider) as peer:
        sealed = (await peer.offers_of(provider))[0]
        assert sealed.record.free == 1
        signed_at = now_ms() + DAY_MS
        bid = peer.bid(sealed, signed_at=signed_at, expires_at=signed_at + MINUTE_MS)
        assert isinstance(await peer.tell(provider, bid), BidAck)
        award = await peer.wait_for(Award)
        assert await peer.tell(provider, peer.countersignature(award))
        second = (await peer.wait_granted(award.record.lease)).record
    assert second.entries == first.entries
    assert (first.epoch, second.epoch) == (0, 2)
    assert node_of(provider) == sealed.signer
    assert (await trio.to_thread.run_sync(renter.wait_final, job)).outcome == "cancelled"
