"""What a node of a market test stands on: a virtual clock, a database in the loop, and devices and keepers.

The last two are not real: devices are a list that the test changes, and a keeper is a `FakeLeases` that the test
makes speak (`node.leases.say(lease, phase=...)`). Refuses to wait in real time.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import trio
import trio.testing

from node.errors import DeviceBusy, StoreError
from node.lease.files import LeaseFile, LeaseKeys, LeaseStatus, Role
from node.market.context import HasEnded
from node.market.leases import Leases, LiveLease
from node.market.settling import status_on_record
from node.ports import Device, DeviceHealth
from node.store import LeaseRow, Store, Transaction
from protocol.machines.lease import FailReason, LeasePhase
from protocol.units import Millis

T = TypeVar("T")

EPOCH = 1_790_000_000_000
"""Unix ms at the virtual clock's zero."""
WAIT_S_MAX = 120.0
"""Virtual seconds after which a wait has failed."""
POLL_S = 0.02


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

    async def start(self, directory: Path, socket: Path, uid: int, gid: int) -> HasEnded:
        raise AssertionError(f"no keeper is started for {directory}")

    def expect(self, linger_s: float) -> None:
        """Prepare nothing."""


class FakeLeases(Leases):
    """Leases without keepers: they say what the test says."""

    starts_well = True
    """Whether a provider's keeper binds its port as soon as it is begun."""

    makes_directories = False
    """Whether a lease's directory exists, so that the next daemon finds the lease again."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begun: dict[bytes, tuple[LeaseFile, LeaseKeys]] = {}
        self.settled: list[bytes] = []
        self.cancelled: list[tuple[bytes, FailReason]] = []

    async def begin(self, row: LeaseRow, lease_file: LeaseFile, keys: LeaseKeys) -> LiveLease:
        await trio.lowlevel.checkpoint()
        self.begun[row.lease] = (lease_file, keys)
        if self.makes_directories:
            self._context.lease_directory(row.lease).mkdir(parents=True, exist_ok=True)
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
        last = status_on_record(live.row)
        if last is not None and live.status is None:
            await self._take(live, last)  # as it would be read from the lease's directory
        if self.starts_well and live.row.role == "provider" and live.status is None:
            await self.say(live.row.lease, port=4242)
        await trio.sleep_forever()


async def until(condition: Callable[[], T], what: str = "") -> T:
    """Wait (in virtual time) until `condition` is true, and return what it gave."""
    with trio.move_on_after(WAIT_S_MAX):
        while True:
            found = condition()
            if found:
                return found
            await trio.sleep(POLL_S)
    raise AssertionError(f"waited in vain for {what or condition}")
