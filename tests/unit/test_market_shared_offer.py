"""Several jobs of one renter buy on the same offer."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.market_nodes import Town, open_town, until
from trio.abc import Clock

from node.market.market import KEEP_PAPERS_MS, PRUNE_S


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with open_town(tmp_path) as town:
        yield town


async def test_jobs_that_bid_on_the_same_offer_all_get_their_lease(town: Town, autojump_clock: Clock) -> None:
    await town.provider(devices=3)
    renter = await town.renter()
    town.hub.connect_all()
    jobs = [await renter.submit() for _ in range(3)]
    await until(lambda: all(job.lease is not None for job in jobs), "three leases")
    assert len({job.lease.row.lease for job in jobs if job.lease is not None}) == 3


async def test_an_offer_stays_on_record_as_long_as_a_bid_on_it(town: Town, autojump_clock: Clock) -> None:
    await town.provider(devices=2)
    renter = await town.renter()
    town.hub.connect_all()
    job = await renter.submit()
    await until(lambda: job.lease is not None, "a lease")
    (bid,) = renter.read(lambda tx: list(tx.records.where("kind = 'bid'")))
    renter.clock.offset_ms = KEEP_PAPERS_MS + round(PRUNE_S * 2000)
    renter.read(lambda tx: tx.records.change(bid.reply_to, at=0))
    await renter.market._prune()
    assert renter.read(lambda tx: tx.records.get(bid.reply_to)) is not None
    renter.read(lambda tx: tx.records.delete("id = ?", bid.id))
    await renter.market._prune()
    assert renter.read(lambda tx: tx.records.get(bid.reply_to)) is None
