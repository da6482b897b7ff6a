"""What there is to sell: devices measured, grouped into listings, and priced.

Like devices make one listing. A device is sellable when it is healthy, claimed by this daemon, switched on by
the owner, and has had no foreign process for a while. Refuses to sell: `node.market.selling` does.
"""

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from node.config import LendSettings
from node.devices.idle import IdleTracker
from node.errors import DeviceBusy
from node.log import get_logger
from node.ports import Clock, Device, DeviceHealth, DeviceSource
from protocol.machines.auction_types import Listing
from protocol.pricing import reserve_price, start_price
from protocol.records import DeviceSpec, HostSpec, Terms
from protocol.records.lease import chain_key
from protocol.units import Price

log = get_logger(__name__)

MIB = 1024 * 1024
BASELINE_SLACK_MIB = 64
"""By how much a device's memory may stay above what it was before a lease."""
POWER_FALLBACK_W = 250
"""For the cost model, where neither owner nor device says what it draws."""


class ListedDevice(NamedTuple):
    """A device as the market sees it."""

    key: bytes
    device: Device
    listing: str
    is_sellable: bool
    reason: str
    """Why it is not sold now; "" when it is."""


class Inventory:
    """The devices of this machine."""

    def __init__(
        self,
        source: DeviceSource,
        settings: LendSettings,
        clock: Clock,
        provider: bytes,
        tiers: tuple[str, ...],
        host: HostSpec,
    ) -> None:
        self._source = source
        self._settings = settings
        self._clock = clock
        self._provider = provider
        self._tiers = tiers
        self._host = host
        self._idle = IdleTracker(settings.idle_after_ms)
        self._claimed: set[str] = set()
        self._baseline_mib: dict[str, int] = {}
        self.switched_off: set[str] = set()
        """UUIDs that the owner does not lend."""
        self.devices: dict[bytes, ListedDevice] = {}

    @property
    def problem(self) -> str:
        """Why there are no devices, or ""."""
        return self._source.problem()

    async def refresh(self, leased: frozenset[bytes]) -> None:
        """Measure every device again. `leased`: chain keys whose processes are our own jobs'."""
        devices = await self._source.poll()
        keys = {device.uuid: chain_key(self._provider, device.uuid) for device in devices}
        # What runs on a leased device is its lease's; a process of the owner's there is not told apart yet.
        ours = {pid for device in devices if keys[device.uuid] in leased for pid in device.processes}
        listed = {}
        for idleness in self._idle.observe(devices, ours, self._clock.boot_ms()):
            device, key = idleness.device, keys[idleness.device.uuid]
            reason = self._reason(device, key in leased, idleness.sellable)
            if key not in leased and device.health is DeviceHealth.OK:
                self._baseline_mib[device.uuid] = device.memory_used_mib
            listed[key] = ListedDevice(key, device, listing_name(device), not reason, reason)
        self.devices = listed

    def release_claims(self, keys: Iterable[bytes]) -> None:
        """Let other daemons of this host list these devices."""
        for key in keys:
            listed = self.devices.get(key)
            if listed is not None and listed.device.uuid in self._claimed:
                self._source.unclaim(listed.device.uuid)
                self._claimed.discard(listed.device.uuid)

    def not_clear(self, keys: Iterable[bytes]) -> str:
        """Return why the devices of an ended lease may not be sold yet, or "" when they are clear."""
        for key in keys:
            listed = self.devices.get(key)
            if listed is None:
                continue  # it is gone: nothing of the lease can be on it, and it can't be sold either
            device = listed.device
            if device.processes:
                return f"{device.model} {device.uuid}: processes {device.processes} still use it"
            baseline_mib = self._baseline_mib.get(device.uuid, device.memory_used_mib)
            if device.memory_used_mib > baseline_mib + BASELINE_SLACK_MIB:
                return f"{device.model} {device.uuid}: {device.memory_used_mib} MiB of memory still in use"
        return ""

    def listings(self) -> dict[str, Listing]:
        """Return the listings that the devices make, by name."""
        found: dict[str, Listing] = {}
        for listed in self.devices.values():
            if listed.device.health is not DeviceHealth.UNSUPPORTED and listed.listing not in found:
                found[listed.listing] = self._listing(listed)
        return found

    def prices(self, listing: str, used: int, capacity: int) -> tuple[Price, Price] | None:
        """Return (start, reserve) for a listing by owner's word or formula; None when neither gives a start."""
        listed = next((item for item in self.devices.values() if item.listing == listing), None)
        if listed is None:
            return None
        spec = _spec(listed.device)
        start, reserve = self._settings.prices_of(listed.device.model)
        if start is None:
            start = start_price(
                spec, used=used, capacity=capacity, location_permille=self._settings.location_permille
            )
        if start is None:
            return None
        if reserve is None:
            power_w = listed.device.power_limit_w or POWER_FALLBACK_W
            reserve = min(start, reserve_price(self._settings.cost.model(power_w)))
        return Price(max(start, reserve)), reserve

    def _reason(self, device: Device, is_leased: bool, is_idle: bool) -> str:
        if device.health is not DeviceHealth.OK and not (is_leased and device.health is DeviceHealth.BUSY):
            return device.problem or device.health.value
        if device.uuid in self.switched_off:
            return "switched off by the owner (gpunode lend on)"
        if not self._tiers:
            return "no isolation tier works on this machine (gpunode doctor)"
        if not is_leased and not is_idle:
            return "in use, or idle for less than the configured time"
        return self._claim(device)

    def _claim(self, device: Device) -> str:
        if device.uuid not in self._claimed:
            try:
                self._source.claim(device.uuid)
            except DeviceBusy as error:
                return str(error)
            self._claimed.add(device.uuid)
        return ""

    def _listing(self, listed: ListedDevice) -> Listing:
        terms = self._settings.terms
        return Listing(
            name=listed.listing,
            device=_spec(listed.device),
            host=self._host,
            terms=Terms(
                lease_min_ms=terms.lease_min_ms,
                lease_max_ms=terms.lease_max_ms,
                notice_ms=terms.notice_ms,
                checkpoint_ms=terms.checkpoint_ms,
                grace_ms=terms.grace_ms,
                retention_ms=terms.retention_ms,
                voucher_interval_ms=terms.voucher_interval_ms,
                window_intervals=terms.window_intervals,
                isolation=self._tiers or ("bubblewrap",),
            ),
            region=self._settings.region,
            site=self._settings.site,
            simulated=listed.device.simulated,
        )


def listing_name(device: Device) -> str:
    """Return the name of the listing that a device belongs to: like devices have the same."""
    words = re.sub(r"[^a-z0-9]+", "-", f"{device.model} {device.memory_mib // 1024}g".lower()).strip("-")
    prefix = "simulated-" if device.simulated else ""
    return f"{prefix}{words}"[:64].rstrip("-") or "device"


def host_share(settings: LendSettings, devices: int, disk_free_mib: int) -> HostSpec:
    """Return what a lease may use of this host for each of `devices` devices, by settings or an equal share."""
    share = settings.host
    count = max(1, devices)
    cpus = os.cpu_count() or 1
    memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB
    return HostSpec(
        cpus_milli=share.cpus_milli or cpus * 1000 // count,
        # The machine itself needs memory and disk, too.
        memory_mib=share.memory_mib or max(256, memory_mib * 3 // 4 // count),
        disk_mib=share.disk_mib or max(256, disk_free_mib // 2 // count),
    )


def _spec(device: Device) -> DeviceSpec:
    return DeviceSpec(
        vendor=device.vendor,
        model=device.model,
        memory_mib=device.memory_mib,
        compute_capability=device.compute_capability,
        driver=device.driver,
        cuda=device.cuda,
    )
