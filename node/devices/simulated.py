"""GPUs that do not exist, from the configuration's [[simulated_device]] tables.

For the `demo` network only (the configuration refuses them elsewhere). Every device says that it is simulated, and
so does its vendor. Refuses to look busy, hot or broken: it is there to walk through the house, not to test it.
"""

from node.config import SimulatedDevice
from node.errors import DeviceError
from node.ports import Device, DeviceHealth

VENDOR = "simulated"


class SimulatedSource:
    """A `node.ports.DeviceSource` of simulated devices."""

    def __init__(self, tables: tuple[SimulatedDevice, ...]) -> None:
        devices = [table for table in tables for _ in range(table.count)]
        self._devices = tuple(_device(index, table) for index, table in enumerate(devices))

    async def poll(self) -> tuple[Device, ...]:
        """Return the devices, which never change."""
        return self._devices

    def claim(self, uuid: str) -> None:
        """Do nothing for a device of ours: it exists in this process alone. Raises DeviceError for another."""
        if all(device.uuid != uuid for device in self._devices):
            raise DeviceError(f"there is no simulated device {uuid} here", "see `gpunode lend devices`")

    def unclaim(self, uuid: str) -> None:
        """Do nothing."""

    def problem(self) -> str:
        """Return why there are no devices, or ""."""
        return "" if self._devices else "no [[simulated_device]] is configured"


def _device(index: int, table: SimulatedDevice) -> Device:
    return Device(
        uuid=f"SIMULATED-{index:04d}",
        index=index,
        vendor=VENDOR,
        model=table.model,
        memory_mib=table.memory_mib,
        memory_used_mib=0,
        compute_capability=table.compute_capability,
        driver=VENDOR,
        cuda=table.cuda,
        pci="",
        utilisation_percent=0,
        temperature_c=None,
        power_w=None,
        power_limit_w=table.power_limit_w,
        processes=(),
        ecc_errors=None,
        health=DeviceHealth.OK,
        simulated=True,
    )
