"""Whole nodes in bad weather: the real market and its database, a lossy network, and daemons that are killed."""

import random
import secrets
import sys
from pathlib import Path

import pytest
import trio
from support.market_nodes import FakeLeases, MarketNode, Town, a_device, open_town
from support.memory_network import Faults, deterministic_trio
from trio.abc import Clock

from node.market.credit import exposure_of
from node.market.leases import LeaseState
from node.market.settling import balance_with
from node.store import PeerRow
from protocol.machines.lease import COMPLETED, OVER_PHASES, LeasePhase

ROUGH = Faults(loss=0.08, duplicate=0.08, delay_min_ms=1, delay_max_ms=250)
JOBS = 3
PATIENCE_S = 1800
CREDIT = 10**12


class Fate:
    """What happens to a town, from a seed."""

    def __init__(self, town: Town, seed: int) -> None:
        self.town = town
        self.chance = random.Random(seed)
        self.kills = 0

    @property
    def providers(self) -> list[MarketNode]:
        return self.town.nodes[:2]

    @property
    def renters(self) -> list[MarketNode]:
        return self.town.nodes[2:]

    @staticmethod
    def running(nodes: list[MarketNode]) -> list[MarketNode]:
        return [node for node in nodes if node.is_running]

    async def settle_the_town(self) -> None:
        """Two providers of two devices each, and three renters whom they trust."""
        for person in (1, 2):
            devices = [a_device(index, uuid=f"GPU-{person}-{index}") for index in range(2)]
            await self.town.start(self.town.build(person, *devices))
        for person in (11, 12, 13):
            await self.town.renter(person)
        for provider in self.providers:
            for renter in self.renters:
                friend = PeerRow(node=renter.id, credit_limit=CREDIT)
                provider.read(lambda tx, friend=friend: tx.peers.put(friend))
        self.town.hub.connect_all()
        await trio.sleep(3)
        self.town.hub.faults = ROUGH

    async def speak_for_keepers(self) -> None:
        """Let jobs run and end, and see to it that no device has two of them."""
        while True:
            await trio.sleep(1)
            for node in self.running(self.town.nodes):
                for lease, live in list(node.leases.live.items()):
                    is_due = live.row.state == LeaseState.GRANTED and self.chance.random() < 0.1
                    if is_due and (live.status is None or live.status.phase not in OVER_PHASES):
                        owed = live.row.price * live.row.quantity * 10
                        await node.leases.say(
                            lease, phase=LeasePhase.COLLECTED, outcome=COMPLETED, exit_status=0, metered_ms=10_000,
                            amount=owed, voucher_amount=owed, voucher_number=1,
                        )  # fmt: skip
            for provider in self.running(self.providers):
                taken = devices_in_use(provider)
                assert len(taken) == len(set(taken)), "a device is leased twice"

    async def kill_daemons(self) -> None:
        """Cut the power of a daemon now and then."""
        while True:
            await trio.sleep(self.chance.uniform(2, 12))
            self.kills += 1
            await self.town.restart(self.chance.choice(self.town.nodes))


def devices_in_use(provider: MarketNode) -> list[bytes]:
    states = (LeaseState.COUNTERSIGNED, LeaseState.GRANTED, LeaseState.OVER, LeaseState.SETTLED)
    rows = [row for row in provider.lease_rows() if row.state in states and not row.released_at]
    return [row.devices[start : start + 32] for row in rows for start in range(0, len(row.devices), 32)]


def seed_all_chance(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Let keys, nonces and backoffs come from the seed, so that a failure can be had again."""
    chance = random.Random(seed)
    monkeypatch.setattr(secrets, "token_bytes", chance.randbytes)
    monkeypatch.setattr(random, "uniform", chance.uniform)
    for name, module in list(sys.modules.items()):
        if name.startswith(("node.market.", "support.market_")) and hasattr(module, "random_bytes"):
            monkeypatch.setattr(module, "random_bytes", chance.randbytes)


@pytest.mark.parametrize("seed", [1, 2])
async def test_nodes_in_bad_weather_serve_every_job_once_and_agree_on_the_bill(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(FakeLeases, "makes_directories", True)
    seed_all_chance(monkeypatch, seed)
    print(f"seed {seed}")
    with deterministic_trio(seed):
        async with open_town(tmp_path, seed=seed) as town:
            fate = Fate(town, seed)
            await fate.settle_the_town()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fate.speak_for_keepers)
                for renter in fate.renters:
                    for number in range(JOBS):
                        await renter.submit(quantity=1 + number % 2)
                async with trio.open_nursery() as troubles:
                    troubles.start_soon(fate.kill_daemons)
                    with trio.move_on_after(PATIENCE_S) as patience:
                        while any(renter.market.jobs.by_id for renter in fate.renters):
                            await trio.sleep(1)
                    troubles.cancel_scope.cancel()
                assert not patience.cancelled_caught, "a job is not served"
                town.hub.faults = Faults()
                town.hub.connect_all()
                await trio.sleep(120)
                nursery.cancel_scope.cancel()
            assert fate.kills > 1
            for renter in fate.renters:
                jobs = renter.read(lambda tx: list(tx.jobs.all()))
                assert [(job.state, job.outcome) for job in jobs] == [("ended", COMPLETED)] * JOBS
            for provider in fate.providers:
                assert not devices_in_use(provider)
                for renter in fate.renters:
                    owed = provider.read(lambda tx, peer=renter.id: balance_with(tx, peer))
                    assert owed == -renter.read(lambda tx, peer=provider.id: balance_with(tx, peer))
                    assert provider.read(lambda tx, peer=renter.id: exposure_of(tx, peer)) == 0
