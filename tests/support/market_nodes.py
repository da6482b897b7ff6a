"""Nodes of a market in one process: the real market, its real database, an in-memory network, a virtual clock.

What is not real: the devices (a list that the test changes), and the keepers. A keeper is a `FakeLeases` that the
test makes speak (`node.leases.say(lease, phase=...)`); no process, directory or tunnel exists. Run under
`autojump_clock`: transactions run in the loop's own thread, so the clock does not jump while one is under way.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import msgspec
import trio
import trio.testing
from support.memory_network import Faults, MemoryHub, MemoryNetwork, open_hub
from support.offers import a_curve, an_offer
from support.signers import NETWORK, SeededSigner, signer

from node.config import Config, LedgerSettings, LendSettings, NetworkSettings
from node.config.settings import TermsSettings
from node.errors import DeviceBusy, StoreError
from node.lease.files import LeaseFile, LeaseKeys, LeaseStatus, Role
from node.market import market as market_module
from node.market.auctions import OFFERS_TOPIC, ListingAuction
from node.market.context import TRADE_PROTOCOL, Context, random_bytes
from node.market.inventory import Inventory
from node.market.jobspec import JobSpec
from node.market.leases import Leases, LiveLease
from node.market.live_job import LiveJob
from node.market.market import Market
from node.ports import Device, DeviceHealth
from node.store import LeaseRow, Store, Transaction
from protocol.envelope import Sealed, open_untrusted, seal
from protocol.identity import NodeId, lease_id
from protocol.machines.lease import FailReason, LeasePhase
from protocol.matching import Requirement
from protocol.pricing import clock_price
from protocol.records import (
    Ack,
    Award,
    Bid,
    BidAck,
    ChainEntry,
    ChainHead,
    Countersignature,
    Grant,
    GrantDelivery,
    HostSpec,
    Offer,
    Resources,
)
from protocol.records.lease import GENESIS, CommittedTerms, grant_commitment
from protocol.units import MINUTE_MS, Millis, Price

T = TypeVar("T")

EPOCH = 1_790_000_000_000
"""Unix ms at the virtual clock's zero."""
WAIT_S_MAX = 120.0
"""Virtual seconds after which a wait has failed."""
POLL_S = 0.02
UID = 1000
NO_FAULTS = Faults()


class VirtualClock:
    """A machine's clock: the loop's virtual time, off by as much as the test says."""

    def __init__(self, offset_ms: int = 0) -> None:
        self.offset_ms = offset_ms

    def now(self) -> Millis:
        return Millis(EPOCH + round(trio.current_time() * 1000) + self.offset_ms)

    def boot_ms(self) -> int:
        return round(trio.current_time() * 1000)


class LoopStore(Store):
    """A real database whose transactions run in the loop's thread; its disk can be full."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._database.execute("PRAGMA synchronous=OFF")  # no test cuts the machine's power
        self.is_full = False

    async def transaction(self, work: Callable[[Transaction], T]) -> T:
        await trio.lowlevel.checkpoint()
        if self.is_full:
            raise StoreError("cannot write the database: the disk is full")
        return self.transaction_sync(work)


class FakeDevices:
    """A `DeviceSource` whose devices the test sets."""

    def __init__(self, *devices: Device) -> None:
        self.devices = list(devices)
        self.claimed: set[str] = set()
        self.held_elsewhere: set[str] = set()

    async def poll(self) -> tuple[Device, ...]:
        await trio.lowlevel.checkpoint()
        return tuple(self.devices)

    def claim(self, uuid: str) -> None:
        if uuid in self.held_elsewhere:
            raise DeviceBusy(f"{uuid} is lent by another daemon")
        self.claimed.add(uuid)

    def unclaim(self, uuid: str) -> None:
        self.claimed.discard(uuid)

    def problem(self) -> str:
        return ""

    def change(self, index: int, **fields: Any) -> None:
        """Change what the device at `index` shows."""
        self.devices[index] = msgspec.structs.replace(self.devices[index], **fields)


def a_device(index: int = 0, **fields: Any) -> Device:
    """Return a free A100."""
    usual: dict[str, Any] = {
        "uuid": f"GPU-{index:04d}",
        "index": index,
        "vendor": "nvidia",
        "model": "NVIDIA A100-SXM4-40GB",
        "memory_mib": 40_960,
        "memory_used_mib": 0,
        "compute_capability": 80,
        "driver": "550.54",
        "cuda": 12_040,
        "pci": "",
        "utilisation_percent": 0,
        "temperature_c": 40,
        "power_w": 50,
        "power_limit_w": 400,
        "processes": (),
        "ecc_errors": 0,
        "health": DeviceHealth.OK,
    }
    return Device(**(usual | fields))


class NoKeepers:
    """A `KeeperHost` that never has anything to start: leases are `FakeLeases`."""

    def socket_path(self, lease: bytes) -> Path:
        raise AssertionError(f"no keeper of {lease.hex()} is ever connected to")

    async def start(self, directory: Path, socket: Path, uid: int, gid: int) -> None:
        raise AssertionError(f"no keeper is started for {directory}")

    def expect(self, linger_s: float) -> None:
        """Prepare nothing."""


class FakeLeases(Leases):
    """Leases without keepers: they say what the test says."""

    starts_well = True
    """Whether a provider's keeper binds its port as soon as it is begun."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begun: dict[bytes, tuple[LeaseFile, LeaseKeys]] = {}
        self.settled: list[bytes] = []
        self.cancelled: list[tuple[bytes, FailReason]] = []

    async def begin(self, row: LeaseRow, lease_file: LeaseFile, keys: LeaseKeys) -> LiveLease:
        await trio.lowlevel.checkpoint()
        self.begun[row.lease] = (lease_file, keys)
        return self.adopt(row)

    async def cancel(
        self, lease: bytes, reason: FailReason, detail: str = "", notice_ms: int | None = None
    ) -> None:
        del detail, notice_ms
        await trio.lowlevel.checkpoint()
        self.cancelled.append((lease, reason))

    async def settle(self, live: LiveLease) -> None:
        await trio.lowlevel.checkpoint()
        self.settled.append(live.row.lease)

    async def say(self, lease: bytes, **fields: Any) -> None:
        """Let the lease's keeper report a change."""
        live = self.live[lease]
        before = live.status or LeaseStatus(
            lease=lease, role=Role(live.row.role), generation=1, sequence=0, phase=LeasePhase.SIGNED
        )
        changed = msgspec.structs.replace(before, sequence=before.sequence + 1, **fields)
        await self._take(live, changed)

    async def _follow(self, live: LiveLease) -> None:
        if self.starts_well and live.row.role == "provider" and live.status is None:
            await self.say(live.row.lease, port=4242)
        await trio.sleep_forever()


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


class HandRenter:
    """A renter without a daemon: the test writes its records by hand. It acknowledges every letter."""

    def __init__(self, hub: MemoryHub, person: int) -> None:
        self.signer: SeededSigner = signer(person)
        self.network: MemoryNetwork = hub.join(self.signer.node)
        self.letters: list[Sealed[Any]] = []
        self.network.on_request(TRADE_PROTOCOL, self._on_letter)

    async def _on_letter(self, _: NodeId, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        letter = open_untrusted(data, NETWORK)
        self.letters.append(letter)
        return seal(Ack(of=letter.id), self.signer, NETWORK).data

    def of(self, kind: type[T]) -> list[Sealed[T]]:
        """Return the letters of a kind so far."""
        return [letter for letter in self.letters if isinstance(letter.record, kind)]

    async def ask(self, other: MarketNode, record: Any, *, sealed_by: SeededSigner | None = None) -> Any:
        """Send one record over the trade protocol, and return the record that answers it."""
        return (await self.send(other, seal(record, sealed_by or self.signer, NETWORK))).record

    async def send(self, other: MarketNode, sealed: Sealed[Any]) -> Sealed[Any]:
        """As `ask`, for a record that is sealed already."""
        return open_untrusted(await self.network.request(other.id, TRADE_PROTOCOL, sealed.data), NETWORK)

    def bid(
        self, provider: MarketNode, *, listing: str | None = None, addressee: bytes | None = None, **fields: Any
    ) -> Sealed[Bid]:
        """Sign a bid on a provider's newest offer, at its clock price."""
        desk = provider.desk(listing)
        now = provider.clock.now()
        usual: dict[str, Any] = {
            "offer_id": desk.auction.recent_offers[0],
            "listing": desk.auction.listing.name,
            "provider": addressee or provider.id,
            "nonce": random_bytes(16),
            "price": clock_price(desk.auction.curve, now),
            "quantity": 1,
            "duration_ms": 10 * MINUTE_MS,
            "max_spend": 10**8,
            "job_hash": bytes(32),
            "resources": Resources(cpus_milli=1000, memory_mib=1024, disk_mib=1024),
            "isolation": "bubblewrap",
            "tunnel_key": bytes(32),
            "voucher_key": bytes(32),
            "signed_at": now,
            "expires_at": now + 10_000,
        }
        return seal(Bid(**(usual | fields)), self.signer, NETWORK)

    async def win(self, provider: MarketNode, **fields: Any) -> Sealed[Award]:
        """Bid, and wait for the award."""
        answer = await self.send(provider, self.bid(provider, **fields))
        assert isinstance(answer.record, BidAck), answer.record
        return await until(
            lambda: next((award for award in self.of(Award) if award.record.bid_id == answer.record.bid_id), None),
            "an award",
        )

    def countersignature(self, award: Sealed[Award], **fields: Any) -> Sealed[Countersignature]:
        """Sign for an award."""
        usual = {"award_id": award.id, "lease": award.record.lease, "signed_at": EPOCH}
        return seal(Countersignature(**(usual | fields)), self.signer, NETWORK)

    async def buy(self, provider: MarketNode, **fields: Any) -> Sealed[Award]:
        """Bid, win, countersign, and wait for the grant."""
        award = await self.win(provider, **fields)
        answer = await self.send(provider, self.countersignature(award))
        assert isinstance(answer.record, Ack), answer.record
        await until(lambda: award.record.lease in {grant.lease for grant in self.grants()}, "a grant")
        return award

    def grants(self) -> list[Grant]:
        """Return the grants delivered so far."""
        return [open_untrusted(delivery.record.grant, NETWORK).record for delivery in self.of(GrantDelivery)]


class HandProvider:
    """A provider without a daemon: the test writes its records by hand. It acknowledges every letter."""

    def __init__(self, hub: MemoryHub, person: int) -> None:
        self.signer: SeededSigner = signer(person)
        self.network: MemoryNetwork = hub.join(self.signer.node)
        self.letters: list[Sealed[Any]] = []
        self.answers: dict[type[Any], Callable[[Sealed[Any]], Any]] = {}
        """Kind of letter -> what answers it, instead of an acknowledgement."""
        self.network.on_request(TRADE_PROTOCOL, self._on_letter)
        self.clock = VirtualClock()
        self._sequence = 0

    async def _on_letter(self, _: NodeId, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        letter = open_untrusted(data, NETWORK)
        self.letters.append(letter)
        answer = self.answers.get(type(letter.record), _usual_answer)(letter)
        return seal(answer, self.signer, NETWORK).data

    def of(self, kind: type[T]) -> list[Sealed[T]]:
        """Return the letters of a kind so far."""
        return [letter for letter in self.letters if isinstance(letter.record, kind)]

    async def publish(self, **fields: Any) -> Sealed[Offer]:
        """Gossip an offer of four free A100s; `fields` change it."""
        now = self.clock.now()
        self._sequence += 1
        usual = {
            "sequence": now + self._sequence,
            "issued_at": now,
            "expires_at": now + 5 * MINUTE_MS,
            "curve": a_curve(opened_at=now - MINUTE_MS),
            "addresses": self.network.addresses,
        }
        offer = seal(an_offer(**(usual | fields)), self.signer, NETWORK)
        await self.network.publish(OFFERS_TOPIC, offer.data)
        return offer

    def award(self, bid: Sealed[Bid], offer: Sealed[Offer], **fields: Any) -> Sealed[Award]:
        """Sign the award that a bid deserves, with `fields` changed."""
        now, wanted = self.clock.now(), bid.record
        usual: dict[str, Any] = {
            "bid_id": bid.id,
            "lease": lease_id(self.signer.node, bid.signer, wanted.nonce),
            "price": wanted.price,
            "quantity": wanted.quantity,
            "devices": tuple(ChainHead(bytes([each]) * 32, 0, GENESIS) for each in range(wanted.quantity)),
            "terms": offer.record.terms,
            "tunnel_key": bytes(32),
            "simulated": offer.record.simulated,
            "holds_until": now + 2000,
            "until": now + wanted.duration_ms + offer.record.terms.notice_ms,
        }
        return seal(Award(**(usual | fields)), self.signer, NETWORK)

    def delivery(
        self, award: Sealed[Award], bid: Sealed[Bid], signed: Sealed[Countersignature], **fields: Any
    ) -> Sealed[GrantDelivery]:
        """Sign the grant of a countersigned award; `fields` change the grant, or the terms it commits to."""
        terms = {
            "salt": bytes(32),
            "renter": bid.signer,
            "price": award.record.price,
            "job_hash": bid.record.job_hash,
        }
        hidden = CommittedTerms(**{name: fields.pop(name, value) for name, value in terms.items()})
        usual: dict[str, Any] = {
            "lease": award.record.lease,
            "entries": tuple(ChainEntry(head.key, head.number, head.head) for head in award.record.devices),
            "epoch": 0,
            "countersignature_id": signed.id,
            "commitment": grant_commitment(hidden),
            "starts_at": self.clock.now(),
            "until": award.record.until,
            "simulated": award.record.simulated,
        }
        signer_of_grant = fields.pop("signed_by", self.signer)
        grant = seal(Grant(**(usual | fields)), signer_of_grant, NETWORK)
        return seal(
            GrantDelivery(grant=grant.data, salt=bytes(32), addresses=("192.0.2.1:4242",)), self.signer, NETWORK
        )

    async def tell(self, renter: MarketNode, letter: Sealed[Any]) -> Any:
        """Send a record over the trade protocol, and return the record that answers it."""
        reply = await self.network.request(renter.id, TRADE_PROTOCOL, letter.data)
        return open_untrusted(reply, NETWORK).record


def _usual_answer(letter: Sealed[Any]) -> Any:
    if isinstance(letter.record, Bid):
        now = VirtualClock().now()
        return BidAck(bid_id=letter.id, batch=1, received_at=now, closes_at=Millis(now + 300))
    return Ack(of=letter.id)


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


async def until(condition: Callable[[], T], what: str = "") -> T:
    """Wait (in virtual time) until `condition` is true, and return what it gave."""
    with trio.move_on_after(WAIT_S_MAX):
        while True:
            found = condition()
            if found:
                return found
            await trio.sleep(POLL_S)
    raise AssertionError(f"waited in vain for {what or condition}")
