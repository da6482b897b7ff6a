"""Owner first: which devices nobody but us uses, and for how long. Pure: snapshots and the time come in.

    foreign process, or memory in use that nobody shows        -> busy, the idle time starts anew
    none of either for `idle_after_ms`                          -> sellable
    quarantined, unsupported or unreadable                      -> not sellable; the idle time stands still
    simulated                                                   -> sellable at once: it has no owner

Refuses to find out whose a process is (`node.devices.processes`) and to sell: who leases what is the market's.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import msgspec

from node.ports import Device, DeviceHealth

MEMORY_BASELINE_MIB = 512
"""Memory that an unused device may show: the driver's own, and a display that NVML does not list."""


class Idleness(msgspec.Struct, frozen=True, kw_only=True):
    """One device at one observation."""

    device: Device
    """As observed, but BUSY with a reason when others use it."""
    foreign: tuple[int, ...]
    """Pids that are not ours."""
    sellable: bool
    idle_since_ms: int | None
    """When it was first seen unused by others; None while it is used, or was never seen well."""
    sellable_at_ms: int | None
    """When it becomes sellable if nothing changes; None when that is not known."""


class IdleTracker:
    """Remembers since when each device is unused by others. The clock is the caller's, in ms (boot time)."""

    def __init__(self, idle_after_ms: int, *, memory_baseline_mib: int = MEMORY_BASELINE_MIB) -> None:
        if idle_after_ms < 0 or memory_baseline_mib < 0:
            raise ValueError("neither a time nor a size is negative")
        self._idle_after_ms = idle_after_ms
        self._baseline_mib = memory_baseline_mib
        self._idle_since_ms: dict[str, int] = {}

    def observe(self, devices: Iterable[Device], own_pids: AbstractSet[int], now_ms: int) -> tuple[Idleness, ...]:
        """Take one snapshot of all devices and return how each stands. Forgets devices that are not in it."""
        observed = tuple(self._observe(device, own_pids, now_ms) for device in devices)
        self._idle_since_ms = {
            standing.device.uuid: standing.idle_since_ms
            for standing in observed
            if standing.idle_since_ms is not None
        }
        return observed

    def _observe(self, device: Device, own_pids: AbstractSet[int], now_ms: int) -> Idleness:
        foreign = tuple(pid for pid in device.processes if pid not in own_pids)
        use = self._foreign_use(device, foreign)
        if use:
            since_ms, sellable_at_ms = None, None
        elif device.simulated:
            since_ms, sellable_at_ms = now_ms, now_ms
        elif device.health is DeviceHealth.OK:
            since_ms = self._idle_since_ms.get(device.uuid, now_ms)
            sellable_at_ms = since_ms + self._idle_after_ms
        else:
            since_ms, sellable_at_ms = self._idle_since_ms.get(device.uuid), None
        if use and device.health is DeviceHealth.OK:
            device = msgspec.structs.replace(device, health=DeviceHealth.BUSY, problem=use)
        return Idleness(
            device=device,
            foreign=foreign,
            sellable=sellable_at_ms is not None and now_ms >= sellable_at_ms,
            idle_since_ms=since_ms,
            sellable_at_ms=sellable_at_ms,
        )

    def _foreign_use(self, device: Device, foreign: tuple[int, ...]) -> str:
        """Return who else uses the device, in words; "" when nobody does, or nothing can be seen."""
        if foreign:
            shown = ", ".join(str(pid) for pid in foreign[:4]) + (" and others" if len(foreign) > 4 else "")
            return f"used by a process that is not gpunode's: pid {shown}"
        # NVML does not list processes of other containers; their memory is seen all the same. While a process of
        # ours is there, the memory may be its own.
        if (
            device.health is DeviceHealth.OK
            and not device.processes
            and device.memory_used_mib > self._baseline_mib
        ):
            return (
                f"{device.memory_used_mib} MiB of its memory are in use by something that can't be seen from here"
            )
        return ""
