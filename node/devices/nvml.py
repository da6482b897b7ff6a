"""The machine's NVIDIA GPUs as a `DeviceSource`.

NVML calls run in one worker thread and are waited for a bounded time, since a broken driver hangs in the kernel. A
device that fails, hangs or vanishes is reported quarantined under its last known UUID, with the reason. Refuses to
list parts of a GPU (MIG) and to say whose a process is: that is `node.devices.idle`.
"""

import msgspec
import trio

from node.devices import health
from node.devices.cdi import DeviceNodes
from node.devices.locks import DeviceLocks
from node.devices.session import DEVICES_MAX, Measurement, NvmlSession, Reading
from node.errors import DeviceError
from node.log import get_logger
from node.ports import Device, DeviceHealth

log = get_logger(__name__)

TIMEOUT_MS = 15_000
"""How long one poll waits for NVML; starting it without the persistence daemon takes seconds."""


class NvmlSource:
    """A `node.ports.DeviceSource` of the GPUs that NVML sees."""

    def __init__(
        self, locks: DeviceLocks, nodes: DeviceNodes | None = None, *, timeout_ms: int = TIMEOUT_MS
    ) -> None:
        self._locks = locks
        self._session = NvmlSession(nodes or DeviceNodes())
        self._timeout_s = timeout_ms / 1000
        self._one_thread = trio.CapacityLimiter(1)
        self._known: dict[str, Device] = {}
        self._hot: set[str] = set()
        self._reported: dict[str, tuple[DeviceHealth, str]] = {}
        self._problem = "the GPUs have not been looked at yet"

    async def poll(self) -> tuple[Device, ...]:
        """Measure every GPU now, in NVML's order. Never raises for the driver's faults."""
        measurement = await self._measure()
        self._problem = measurement.problem
        devices = self._devices(measurement)
        self._known = {device.uuid: device for device in devices}
        self._log_changes()
        return devices

    def claim(self, uuid: str) -> None:
        """Lock the GPU for this daemon. Raises DeviceBusy naming the holder, DeviceError for an unknown one."""
        if uuid not in self._known:
            raise DeviceError(f"there is no GPU {uuid} here", "see `gpunode lend devices`")
        self._locks.claim(uuid)

    def unclaim(self, uuid: str) -> None:
        """Give the GPU back. Idempotent."""
        self._locks.unclaim(uuid)

    def problem(self) -> str:
        """Return why there are no GPUs, or ""."""
        return self._problem

    async def _measure(self) -> Measurement:
        measurement: Measurement | None = None
        try:
            with trio.move_on_after(self._timeout_s):
                measurement = await trio.to_thread.run_sync(
                    self._session.measure,
                    limiter=self._one_thread,
                    abandon_on_cancel=True,  # type: ignore[call-arg]  # unknown to trio-typing's old stubs
                )
        except AssertionError:
            raise
        except Exception as error:
            return Measurement((), f"NVML fails: {type(error).__name__}: {error}")
        if measurement is not None:
            return measurement
        # The thread is still in there, and holds the limiter: later polls end here too until it comes out.
        step = self._session.step
        return Measurement((), f"NVML has not answered for {self._timeout_s:g} s while {step} (look at dmesg)")

    def _devices(self, measurement: Measurement) -> tuple[Device, ...]:
        """Return the measured devices, then those known before and now missing, each judged."""
        seen = {reading.uuid for reading in measurement.readings}
        missing = {uuid: device for uuid, device in self._known.items() if uuid not in seen and _is_named(device)}
        devices: list[Device] = []
        for reading in measurement.readings:
            if not reading.uuid:
                # It does not even give its name: the missing one that had this index.
                former = next((uuid for uuid, device in missing.items() if device.index == reading.index), "")
                devices.append(health.quarantined(missing.pop(former, _nameless(reading.index)), reading.error))
            else:
                devices.append(self._judged(reading))
        gone = measurement.problem or "the GPU has vanished (look at dmesg; was it taken out or given to a VM?)"
        devices.extend(health.quarantined(device, gone) for device in missing.values())
        return tuple(devices[:DEVICES_MAX])

    def _judged(self, reading: Reading) -> Device:
        if reading.device is None:
            last = self._known.get(reading.uuid) or msgspec.structs.replace(
                _nameless(reading.index), uuid=reading.uuid
            )
            return health.quarantined(last, reading.error)
        hot = health.is_hot(reading.device.temperature_c, was_hot=reading.uuid in self._hot)
        (self._hot.add if hot else self._hot.discard)(reading.uuid)
        return health.judged(reading.device, reading.condition, hot=hot)

    def _log_changes(self) -> None:
        reported = {device.uuid: (device.health, device.problem) for device in self._known.values()}
        for uuid, (state, problem) in reported.items():
            before = self._reported.get(uuid)
            # A problem's text holds measured numbers: its change alone is no news.
            if before is None or before[0] is not state:
                log.info("devices.health", uuid=uuid, health=state.value, problem=problem)
        self._reported = reported


def _nameless(index: int) -> Device:
    """Return what can be said of a GPU that has never told its UUID."""
    return Device(
        uuid=f"unreadable-{index}",
        index=index,
        vendor="nvidia",
        model="unknown",
        memory_mib=0,
        memory_used_mib=0,
        compute_capability=0,
        driver="",
        cuda=0,
        pci="",
        utilisation_percent=None,
        temperature_c=None,
        power_w=None,
        power_limit_w=None,
        processes=(),
        ecc_errors=None,
        health=DeviceHealth.QUARANTINED,
    )


def _is_named(device: Device) -> bool:
    return not device.uuid.startswith("unreadable-")
