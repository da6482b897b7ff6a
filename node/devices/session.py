"""Measuring through NVML, in the thread that calls it: blocking, and without memory of earlier measurements.

NVML belongs to one thread at a time (`NvmlSource` sees to that). Every fault becomes a text in what is returned.
Refuses to judge: `node.devices.health` does.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pynvml

from node.devices.cdi import DeviceNodes
from node.devices.health import Condition
from node.devices.locks import UUID
from node.log import get_logger
from node.ports import Device, DeviceHealth

log = get_logger(__name__)

DEVICES_MAX = 64
PROCESSES_MAX = 4096
MIB = 1024 * 1024
MILLIWATTS = 1000

T = TypeVar("T")

_NOT_OFFERED = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
_START_PROBLEMS = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "no NVIDIA driver: libnvidia-ml.so.1 was not found (install the driver; nvidia-smi must work)"
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "the NVIDIA kernel driver is not loaded (modprobe nvidia; in a container, give it the GPUs)"
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver was upgraded under the loaded kernel module (reboot, or reload the module)"
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not open the NVIDIA driver (look at /dev/nvidiactl)",
}


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What one NVML index gave: a device, or the reason why not."""

    index: int
    uuid: str = ""
    """"" when not even that could be read."""
    device: Device | None = None
    condition: Condition = Condition()
    error: str = ""


class Measurement(msgspec.Struct, frozen=True):
    """All devices at one moment, or why there are none."""

    readings: tuple[Reading, ...]
    problem: str = ""


class NvmlSession:
    """An initialised NVML, opened at the first measurement and again after a fault."""

    def __init__(self, nodes: DeviceNodes) -> None:
        self._nodes = nodes
        self._is_open = False
        self.step = "starting NVML"
        """What the thread is doing, for whoever waits for it in vain."""

    def measure(self) -> Measurement:
        """Measure every device. Never raises for a fault of the driver or of a device. Blocks."""
        self.step = "starting NVML"
        try:
            if not self._is_open:
                pynvml.nvmlInit()
                self._is_open = True
            driver = str(pynvml.nvmlSystemGetDriverVersion())
            cuda = int(_if_offered(pynvml.nvmlSystemGetCudaDriverVersion_v2) or 0)
            count = min(int(pynvml.nvmlDeviceGetCount()), DEVICES_MAX)
        except pynvml.NVMLError as error:
            self._close()
            return Measurement((), _START_PROBLEMS.get(error.value, f"NVML fails: {error}"))
        readings = tuple(self._read(index, driver, cuda) for index in range(count))
        if any(reading.error for reading in readings):
            # A lost or reset GPU, and a reloaded driver, are seen anew only by a fresh NVML.
            self._close()
        return Measurement(readings, "" if count else "the NVIDIA driver sees no GPU (check lspci and dmesg)")

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError as error:
                log.warning("devices.nvml_shutdown_failed", reason=str(error))

    def _read(self, index: int, driver: str, cuda: int) -> Reading:
        self.step = f"measuring GPU {index}"
        uuid = ""
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = str(pynvml.nvmlDeviceGetUUID(handle))
            if UUID.fullmatch(uuid) is None:
                return Reading(index=index, error=f"NVML gives it the UUID {uuid!r}, which is none")
            device = self._device(handle, index, uuid, driver, cuda)
            return Reading(index=index, uuid=uuid, device=device, condition=_condition(handle))
        except pynvml.NVMLError as error:
            return Reading(index=index, uuid=uuid, error=_device_problem(error))

    def _device(self, handle: Any, index: int, uuid: str, driver: str, cuda: int) -> Device:  # noqa: ANN401
        memory = _memory(handle)
        capability = _if_offered(pynvml.nvmlDeviceGetCudaComputeCapability, handle) or (0, 0)
        minor = _if_offered(pynvml.nvmlDeviceGetMinorNumber, handle)
        utilisation = _if_offered(pynvml.nvmlDeviceGetUtilizationRates, handle)
        power_mw = _if_offered(pynvml.nvmlDeviceGetPowerUsage, handle)
        limit_mw = _if_offered(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return Device(
            uuid=uuid,
            index=index,
            vendor="nvidia",
            model=str(pynvml.nvmlDeviceGetName(handle)),
            memory_mib=memory.total // MIB,
            memory_used_mib=memory.used // MIB,
            compute_capability=capability[0] * 10 + capability[1],
            driver=driver,
            cuda=cuda,
            pci=_text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
            utilisation_percent=None if utilisation is None else int(utilisation.gpu),
            temperature_c=_if_offered(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            power_w=None if power_mw is None else power_mw // MILLIWATTS,
            power_limit_w=None if limit_mw is None else limit_mw // MILLIWATTS,
            processes=_processes(handle),
            ecc_errors=_if_offered(
                pynvml.nvmlDeviceGetTotalEccErrors,
                handle,
                pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                pynvml.NVML_VOLATILE_ECC,
            ),
            health=DeviceHealth.OK,
            nodes=self._nodes.of(uuid, index, minor),
        )


def _condition(handle: Any) -> Condition:  # noqa: ANN401
    mig = _if_offered(pynvml.nvmlDeviceGetMigMode, handle)
    rows = _if_offered(pynvml.nvmlDeviceGetRemappedRows, handle)
    mode = _if_offered(pynvml.nvmlDeviceGetComputeMode, handle)
    return Condition(
        mig=mig is not None and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
        compute_prohibited=mode == pynvml.NVML_COMPUTEMODE_PROHIBITED,
        rows_pending=rows is not None and bool(rows[2]),
        rows_failed=rows is not None and bool(rows[3]),
    )


def _memory(handle: Any) -> Any:  # noqa: ANN401
    """Return `total` and `used` bytes: without what the driver reserves for itself, where it tells that apart."""
    newer = _if_offered(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    return pynvml.nvmlDeviceGetMemoryInfo(handle) if newer is None else newer


def _processes(handle: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return the pids that use the device in any way. An error stays one: who can't see them must not sell."""
    found = list(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    found += _if_offered(pynvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or []
    found += _if_offered(pynvml.nvmlDeviceGetMPSComputeRunningProcesses, handle) or []
    return tuple(sorted({int(process.pid) for process in found})[:PROCESSES_MAX])


def _device_problem(error: Any) -> str:  # noqa: ANN401
    if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
        return "the GPU is lost: it has fallen off the bus (dmesg says Xid 79; reboot, check power and seating)"
    if error.value == pynvml.NVML_ERROR_RESET_REQUIRED:
        return "the GPU needs a reset (nvidia-smi --gpu-reset, or reboot)"
    return f"NVML fails on it: {error}"


def _if_offered(call: Callable[..., T], *arguments: Any) -> T | None:  # noqa: ANN401
    """Return what an NVML call gives, or None when this device or driver does not offer it."""
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _NOT_OFFERED:
            return None
        raise


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
