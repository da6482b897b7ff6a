"""One trade between two nodes: from an offer to the receipt that both have signed."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.market_nodes import NETWORK, Town, open_town, until
from trio.abc import Clock

from node.market.context import TRADE_PROTOCOL
from node.market.leases import LeaseState
from protocol.envelope import open_untrusted
from protocol.machines.lease import COMPLETED, LeasePhase
from protocol.records import Ack, ChainEntry, Refusal, Release


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with open_town(tmp_path) as town:
        yield town


async def test_a_job_buys_a_lease_and_both_sides_sign_for_it(town: Town, autojump_clock: Clock) -> None:
    provider, renter = await town.provider(), await town.renter()
    town.hub.connect_all()
    job = await renter.submit()
    await until(lambda: job.lease is not None, "a lease")
    (sold,) = provider.lease_rows()
    (bought,) = renter.lease_rows()
    assert sold.state == bought.state == LeaseState.GRANTED
    assert (sold.lease, sold.price, sold.until) == (bought.lease, bought.price, bought.until)
    for node in (provider, renter):
        price = bought.price
        await node.leases.say(
            sold.lease, phase=LeasePhase.COLLECTED, outcome=COMPLETED, metered_ms=60_000, exit_status=0,
            amount=price * 60, voucher_amount=price * 60, voucher_number=6, started_at=1, ended_at=60_001,
        )  # fmt: skip
    await until(lambda: provider.lease_rows()[0].state == LeaseState.SETTLED, "the acceptance")
    assert renter.lease_rows()[0].state == LeaseState.SETTLED
    (earned,) = provider.read(lambda tx: list(tx.entries.all()))
    (owed,) = renter.read(lambda tx: list(tx.entries.all()))
    assert (earned.id, earned.amount) == (owed.id, -owed.amount)
    assert earned.amount == bought.price * 60
    assert earned.confirmed
    await until(lambda: not provider.market.seller.auctions["nvidia-a100-sxm4-40gb-40g"].auction.leases)


async def test_releases_of_a_lease_are_witnessed_and_do_not_pile_up(town: Town, autojump_clock: Clock) -> None:
    provider, renter = await town.provider(), await town.renter()
    town.hub.connect_all()
    job = await renter.submit()
    await until(lambda: job.lease is not None, "a lease")
    lease = renter.lease_rows()[0].lease
    entries = (ChainEntry(bytes(32), 1, bytes(32)),)
    for number in range(5):
        release = Release(lease=lease, entries=entries, epoch=0, released_at=number, reason="")
        reply = await provider.network.request(renter.id, TRADE_PROTOCOL, provider.context.seal(release).data)
        assert isinstance(open_untrusted(reply, NETWORK).record, Ack)
    assert renter.read(lambda tx: tx.records.count("kind = 'release'")) == 2
    unknown = provider.context.seal(Release(lease=bytes(16), entries=entries, epoch=0, released_at=1, reason=""))
    reply = await provider.network.request(renter.id, TRADE_PROTOCOL, unknown.data)
    assert isinstance(open_untrusted(reply, NETWORK).record, Refusal)
