"""A renter's lease that its provider has ended, or will never end, while the two could not speak."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.market_nodes import MarketNode, Town, open_town, until
from trio.abc import Clock

from node.market.leases import LeaseState, LiveLease
from protocol.machines.lease import COMPLETED, FailReason, LeasePhase


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with open_town(tmp_path) as town:
        yield town


async def leased(town: Town) -> tuple[MarketNode, MarketNode, bytes]:
    provider, renter = await town.provider(), await town.renter()
    town.hub.connect_all()
    job = await renter.submit()
    await until(lambda: job.lease is not None, "the lease")
    return provider, renter, provider.lease_rows()[0].lease


def listen_to_conclusions(node: MarketNode) -> list[tuple[FailReason, str]]:
    """Let the node's keepers take the provider's end as theirs; return what they are told."""
    told: list[tuple[FailReason, str]] = []

    async def conclude(live: LiveLease, reason: FailReason, detail: str) -> None:
        told.append((reason, detail))
        await node.leases.say(live.row.lease, phase=LeasePhase.FAILED, outcome=str(reason), detail=detail)

    node.leases.conclude = conclude  # type: ignore[method-assign]
    return told


def spoken(node: MarketNode, **fields: Any) -> dict[str, Any]:
    price = node.lease_rows()[0].price
    usual = {"started_at": 1, "amount": 60 * price, "voucher_amount": 60 * price, "voucher_number": 6}
    return usual | fields


@pytest.mark.parametrize(
    ("outcome", "reason", "says"),
    [
        (FailReason.RENTER_AWAY.value, FailReason.RENTER_AWAY, "this machine was away"),
        (COMPLETED, FailReason.RETENTION_PASSED, "ended with exit status 5; this machine was away"),
        ("of_a_later_version", FailReason.PROVIDER_AWAY, "has closed the lease"),
    ],
)
async def test_a_receipt_ends_a_lease_that_the_keeper_can_not_ask_about(
    town: Town, autojump_clock: Clock, outcome: str, reason: FailReason, says: str
) -> None:
    provider, renter, lease = await leased(town)
    told = listen_to_conclusions(renter)
    await renter.leases.say(lease, phase=LeasePhase.RUNNING, **spoken(renter, metered_ms=20_000))
    (job,) = renter.market.jobs.by_id.values()
    end = spoken(provider, metered_ms=60_000, ended_at=60_001, exit_status=5)
    await provider.leases.say(lease, phase=LeasePhase.FAILED, outcome=outcome, **end)
    await until(lambda: provider.lease_rows()[0].state == LeaseState.SETTLED, "the acceptance")
    await until(lambda: job.row.state == "ended", "the job's end")
    assert told == [(reason, told[0][1])]
    assert says in told[0][1]
    assert (job.row.outcome, job.row.detail) == (str(reason), told[0][1])
    # 40 s more than our keeper heard of, and vouchers for all of it.
    (owed,) = renter.read(lambda tx: list(tx.entries.all()))
    assert owed.amount == -60 * renter.lease_rows()[0].price


async def test_a_keeper_with_a_tunnel_has_the_last_word_itself(town: Town, autojump_clock: Clock) -> None:
    provider, renter, lease = await leased(town)
    told = listen_to_conclusions(renter)
    connected = spoken(renter, phase=LeasePhase.COLLECTING, metered_ms=60_000, ended_at=60_001, connected=True)
    await renter.leases.say(lease, **connected)
    end = spoken(provider, metered_ms=60_000, ended_at=60_001)
    await provider.leases.say(lease, phase=LeasePhase.COLLECTED, outcome=COMPLETED, **end)
    await until(lambda: provider.lease_rows()[0].receipt_id is not None, "the receipt")
    await until(lambda: provider.read(lambda tx: tx.outbox.count("kind = 'receipt'")) == 1, "it to be sent again")
    assert not told
    await renter.leases.say(lease, phase=LeasePhase.COLLECTED, outcome=COMPLETED)
    await until(lambda: provider.lease_rows()[0].state == LeaseState.SETTLED, "the acceptance")
    assert not told


async def test_a_keeper_whose_provider_never_comes_back_is_let_go(town: Town, autojump_clock: Clock) -> None:
    provider, renter, lease = await leased(town)
    (job,) = renter.market.jobs.by_id.values()
    town.hub.crash(provider.id)
    end = spoken(renter, phase=LeasePhase.FAILED, outcome=str(FailReason.PROVIDER_AWAY), metered_ms=50_000)
    await renter.leases.say(lease, **end)
    await until(lambda: job.row.state == "ended", "the job's end")
    await until(lambda: renter.leases.settled == [lease], "the keeper to be let go")
    assert renter.lease_rows()[0].state == LeaseState.OVER
    assert renter.read(lambda tx: tx.entries.count()) == 0
