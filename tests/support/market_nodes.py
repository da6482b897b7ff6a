"""Nodes of a market in one process: the real market, its real database, an in-memory network, a virtual clock.

What is not real is in `market_parts`: devices and keepers. Run under `autojump_clock`: transactions run in the
loop's own thread, so the clock does not jump while one is under way.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import trio
import trio.testing
from support.market_hands import HandProvider, HandRenter
from support.market_parts import (
    EPOCH,
    FakeDevices,
    FakeLeases,
    LoopStore,
    NoKeepers,
    VirtualClock,
    a_device,
    until,
)
from support.memory_network import Faults, MemoryHub, MemoryNetwork, open_hub
from support.signers import NETWORK, SeededSigner, signer

from node.config import Config, LedgerSettings, LendSettings, NetworkSettings
from node.config.settings import TermsSettings
from node.market import market as market_module
from node.market.auctions import ListingAuction
from node.market.context import Context
from node.market.inventory import Inventory
from node.market.jobspec import JobSpec
from node.market.live_job import LiveJob
from node.market.market import Market
from node.ports import Device
from node.store import LeaseRow, Transaction
from protocol.identity import NodeId
from protocol.matching import Requirement
from protocol.records import (
    HostSpec,
)
from protocol.units import MINUTE_MS, Price

T = TypeVar("T")

UID = 1000
NO_FAULTS = Faults()
__all__ = [
    "EPOCH", "NETWORK", "UID", "FakeDevices", "FakeLeases", "HandProvider", "HandRenter", "LoopStore",
    "MarketNode", "Town", "VirtualClock", "a_config", "a_device", "a_spec", "lend_settings", "open_town", "until",
]  # fmt: skip


class MarketNode:
    """One node."""

    def __init__(self, hub: MemoryHub, folder: Path, person: int, config: Config, *devices: Device) -> None:
        self.hub = hub
        self.person = person
        self.folder = folder
        self.config = config
        self.signer: SeededSigner = signer(person)
        self.clock = VirtualClock()
        self.source = FakeDevices(*devices)
        self.store = LoopStore(folder / "node.db")
        self.network: MemoryNetwork = hub.join(self.id)
        self._scope = trio.CancelScope()
        self._build()

    def _build(self) -> None:
        self.context = Context(
            store=self.store,
            network=self.network,
            signer=self.signer,
            network_id=NETWORK,
            network_name=self.config.network.name,
            clock=self.clock,
            keepers=NoKeepers(),
            lease_root=self.folder / "leases",
        )
        host = HostSpec(cpus_milli=8000, memory_mib=65_536, disk_mib=200_000)
        self.inventory = Inventory(self.source, self.config.lend, self.clock, self.id, ("bubblewrap",), host)
        with mock.patch.object(market_module, "Leases", FakeLeases):
            self.market = Market(self.context, self.config, self.inventory)

    @property
    def id(self) -> NodeId:
        return self.signer.node

    @property
    def is_running(self) -> bool:
        """Whether the daemon has power."""
        return self.hub.nodes.get(self.id) is self.network

    @property
    def leases(self) -> FakeLeases:
        leases = self.market.leases
        assert isinstance(leases, FakeLeases)
        return leases

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Trade until stopped."""
        self._scope = trio.CancelScope()
        with self._scope:
            await self.market.run(task_status=task_status)

    def stop(self) -> None:
        """End the daemon as a power cut would; what is committed stays."""
        self._scope.cancel()
        self.hub.crash(self.id)
        self.store.close()

    def load(self) -> None:
        """Open the same state again, as a daemon that starts does; `run` it afterwards."""
        self.store = LoopStore(self.folder / "node.db")
        self.network = self.hub.join(self.id)
        self._build()

    # --- asking ---------------------------------------------------------------------------------------------

    def read(self, work: Callable[[Transaction], T]) -> T:
        """Look into the database."""
        return self.store.transaction_sync(work)

    def lease_rows(self) -> list[LeaseRow]:
        """Return every lease on record, oldest first."""
        return self.read(lambda tx: list(tx.leases.all(order_by="created_at")))

    def desk(self, listing: str | None = None) -> ListingAuction:
        """Return the auction of a listing; the only one by default."""
        auctions = self.market.seller.auctions
        return auctions[listing] if listing is not None else next(iter(auctions.values()))

    # --- renting --------------------------------------------------------------------------------------------

    async def submit(self, **fields: Any) -> LiveJob:
        """Submit a job, and return it."""
        row = await self.market.buyer.submit(a_spec(**fields), "", UID, UID)
        return self.market.jobs.by_id[row.id]


def a_spec(**fields: Any) -> JobSpec:
    """Return a job of ten minutes on one A100; `fields` change it, or its requirement."""
    names = {name: fields.pop(name) for name in list(fields) if name in Requirement.__struct_fields__}
    wanted = {"model": "A100", "max_price": Price(1_000_000), "duration_ms": 10 * MINUTE_MS, **names}
    usual: dict[str, Any] = {
        "requirement": Requirement(**wanted),
        "command": ("true",),
        "time_limit_ms": wanted["duration_ms"],
        "max_spend": 10**9,
    }
    return JobSpec(**(usual | fields))


def lend_settings(**fields: Any) -> LendSettings:
    """Return the settings of an owner who lends at once, at a price that starts at $1.58/h."""
    usual: dict[str, Any] = {
        "enabled": True,
        "idle_after_ms": 0,
        "start_price": Price(438_888),
        "reserve_price": Price(105_555),
        "terms": TermsSettings(notice_ms=0),
    }
    return LendSettings(**(usual | fields))


def a_config(folder: Path, *, stranger_credit: int = 10**9, name: str = "test", **lend: Any) -> Config:
    """Return the settings of one node."""
    return Config(
        state_dir=folder,
        runtime_dir=folder,
        network=NetworkSettings(name=name),
        lend=lend_settings(**lend) if lend.pop("lends", True) else LendSettings(),
        ledger=LedgerSettings(stranger_credit=stranger_credit),
    )


class Town:
    """Several nodes, and the nursery in which they run."""

    def __init__(self, hub: MemoryHub, folder: Path, nursery: trio.Nursery) -> None:
        self.hub = hub
        self.folder = folder
        self.nursery = nursery
        self.nodes: list[MarketNode] = []

    def build(self, person: int, *devices: Device, **config: Any) -> MarketNode:
        """Make a node that does not run yet."""
        folder = self.folder / f"node-{person}"
        folder.mkdir()
        node = MarketNode(self.hub, folder, person, a_config(folder, **config), *devices)
        self.nodes.append(node)
        return node

    async def start(self, node: MarketNode) -> MarketNode:
        """Run a node."""
        await self.nursery.start(node.run)
        return node

    async def provider(self, person: int = 1, *, devices: int = 1, **config: Any) -> MarketNode:
        """Run a node that lends `devices` A100s."""
        return await self.start(self.build(person, *(a_device(index) for index in range(devices)), **config))

    def by_hand(self, person: int = 21) -> HandRenter:
        """Return a renter whose records the test writes, connected to every node."""
        renter = HandRenter(self.hub, person)
        for node in self.nodes:
            self.hub.connect(renter.signer.node, node.id)
        return renter

    def seller_by_hand(self, person: int = 31) -> HandProvider:
        """Return a provider whose records the test writes, connected to every node."""
        provider = HandProvider(self.hub, person)
        for node in self.nodes:
            self.hub.connect(provider.signer.node, node.id)
        return provider

    async def renter(self, person: int = 11, **config: Any) -> MarketNode:
        """Run a node that lends nothing."""
        return await self.start(self.build(person, lends=False, **config))

    async def restart(self, node: MarketNode) -> MarketNode:
        """Cut a node's power, and start it again with its friends connected."""
        friends = sorted(node.network.connected)
        node.stop()
        await trio.sleep(0.1)
        node.load()
        await self.start(node)
        for friend in friends:
            self.hub.connect(node.id, friend)
        return node


async def _run_inline(work: Callable[..., T], *args: Any, **_: Any) -> T:
    await trio.lowlevel.checkpoint()
    return work(*args)


@asynccontextmanager
async def open_town(folder: Path, *, seed: int = 1, faults: Faults = NO_FAULTS) -> AsyncIterator[Town]:
    """Run a town; its databases are closed at the end."""
    nodes: list[MarketNode] = []
    # A thread's work takes no virtual time; the clock would jump while the loop waits for it.
    inline, inline_paths = (
        mock.patch(name, _run_inline) for name in ("trio.to_thread.run_sync", "trio._path.run_sync")
    )
    async with open_hub(seed=seed, faults=faults) as hub, trio.open_nursery() as nursery:
        with inline, inline_paths:
            if not isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock):
                raise TypeError("a town needs a virtual clock: let the test take `autojump_clock`")
            town = Town(hub, folder, nursery)
            nodes = town.nodes
            yield town
            nursery.cancel_scope.cancel()
    for node in nodes:
        node.store.close()
