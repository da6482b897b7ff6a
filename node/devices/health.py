"""Whether a measured device may be sold: rules over what NVML said. Pure. Refuses to measure anything itself.

Sources of the rules: NVIDIA's "GPU Memory Error Management" (uncorrectable errors and row remapping ask for a
reset or a replacement) and the NVML API reference (MIG and compute modes).
"""

import msgspec

from node.ports import Device, DeviceHealth

TEMPERATURE_MAX_C = 85
"""A hotter device is quarantined."""
TEMPERATURE_BACK_C = 80
"""... until it is this cool again, so that it does not flap in and out of the market."""


class Condition(msgspec.Struct, frozen=True):
    """What NVML says of a device beyond its measured values."""

    mig: bool = False
    compute_prohibited: bool = False
    rows_pending: bool = False
    """A memory row waits to be remapped: at the next reset."""
    rows_failed: bool = False
    """A memory row could not be remapped."""


def judged(device: Device, condition: Condition, *, hot: bool) -> Device:
    """Return `device` with its health and, unless that is OK, the reason and the way out. `hot`: see `is_hot`."""
    health, problem = _judgement(device, condition, hot=hot)
    return msgspec.structs.replace(device, health=health, problem=problem)


def is_hot(temperature_c: int | None, *, was_hot: bool) -> bool:
    """Return whether a device counts as hot, given whether it did so before."""
    return temperature_c is not None and temperature_c > (TEMPERATURE_BACK_C if was_hot else TEMPERATURE_MAX_C)


def quarantined(device: Device, problem: str) -> Device:
    """Return a device that could not be measured: what is known of it, but for what changes by the second."""
    return msgspec.structs.replace(
        device,
        health=DeviceHealth.QUARANTINED,
        problem=problem,
        utilisation_percent=None,
        temperature_c=None,
        power_w=None,
        processes=(),
    )


def _judgement(device: Device, condition: Condition, *, hot: bool) -> tuple[DeviceHealth, str]:
    if condition.mig:
        return (
            DeviceHealth.UNSUPPORTED,
            f"MIG mode is on: not listed yet (nvidia-smi -i {device.index} -mig 0 turns it off)",
        )
    if condition.compute_prohibited:
        return (
            DeviceHealth.UNSUPPORTED,
            f"compute mode is PROHIBITED: no job could use it (nvidia-smi -i {device.index} -c DEFAULT)",
        )
    if condition.rows_failed:
        return DeviceHealth.QUARANTINED, "a memory row could not be remapped: have the GPU replaced"
    if condition.rows_pending or device.ecc_errors:
        errors = f"{device.ecc_errors or 0} uncorrected memory errors since the last reset"
        return (
            DeviceHealth.QUARANTINED,
            f"{errors}: reset it when nobody uses it (nvidia-smi -i {device.index} --gpu-reset)",
        )
    if hot:
        return (
            DeviceHealth.QUARANTINED,
            f"{device.temperature_c} C is too hot: back at {TEMPERATURE_BACK_C} C (check fans and air flow)",
        )
    return DeviceHealth.OK, ""
