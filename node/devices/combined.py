"""Several sources of devices as one. Refuses two devices of one UUID: the first source that has it keeps it."""

import trio

from node.errors import DeviceError
from node.log import get_logger
from node.ports import Device, DeviceSource

log = get_logger(__name__)


class _Combined:
    """See `combined`."""

    def __init__(self, sources: tuple[DeviceSource, ...]) -> None:
        self._sources = sources
        self._owner: dict[str, DeviceSource] = {}

    async def poll(self) -> tuple[Device, ...]:
        """Poll every source at once, so that a driver that hangs delays the others no longer than itself."""
        found: list[tuple[Device, ...]] = [()] * len(self._sources)

        async def poll_one(number: int, source: DeviceSource) -> None:
            found[number] = await source.poll()

        async with trio.open_nursery() as nursery:
            for number, source in enumerate(self._sources):
                nursery.start_soon(poll_one, number, source)
        devices: dict[str, Device] = {}
        owner: dict[str, DeviceSource] = {}
        for source, polled in zip(self._sources, found, strict=True):
            for device in polled:
                if device.uuid in devices:
                    log.error("devices.duplicate_uuid", uuid=device.uuid)
                    continue
                devices[device.uuid], owner[device.uuid] = device, source
        self._owner = owner
        return tuple(devices.values())

    def claim(self, uuid: str) -> None:
        """Claim the device from the source that has it. Raises DeviceBusy, DeviceError."""
        source = self._owner.get(uuid)
        if source is None:
            raise DeviceError(f"there is no device {uuid} here", "see `gpunode lend devices`")
        source.claim(uuid)

    def unclaim(self, uuid: str) -> None:
        """Give the device back. Idempotent."""
        for source in self._sources:
            source.unclaim(uuid)

    def problem(self) -> str:
        """Return why no source works, or "" when one does."""
        problems = [source.problem() for source in self._sources]
        return "; ".join(problems) if all(problems) else ""


def combined(*sources: DeviceSource) -> DeviceSource:
    """Return one source of all the devices of `sources`."""
    return _Combined(sources)
