"""Simulated devices, and several sources as one."""

from pathlib import Path

import msgspec
import pytest
import trio

from node import config
from node.devices import SimulatedSource, combined
from node.errors import DeviceError
from node.ports import Device, DeviceHealth

TABLES = (
    config.SimulatedDevice(model="NVIDIA A100-SXM4-80GB", memory_mib=81_920, count=2),
    config.SimulatedDevice(
        model="Tesla T4", memory_mib=16_384, compute_capability=75, cuda=11080, power_limit_w=70
    ),
)


async def test_simulated_devices_say_so() -> None:
    devices = await SimulatedSource(TABLES).poll()
    assert [device.uuid for device in devices] == ["SIMULATED-0000", "SIMULATED-0001", "SIMULATED-0002"]
    assert all(device.simulated and device.vendor == "simulated" for device in devices)
    assert all(device.health is DeviceHealth.OK and device.nodes == () for device in devices)
    last = devices[2]
    assert (last.model, last.memory_mib, last.compute_capability, last.cuda) == ("Tesla T4", 16_384, 75, 11080)
    assert last.power_limit_w == 70


async def test_simulated_devices_are_claimed_by_name_only() -> None:
    source = SimulatedSource(TABLES)
    source.claim("SIMULATED-0001")
    source.unclaim("SIMULATED-0001")
    with pytest.raises(DeviceError, match="no simulated device"):
        source.claim("GPU-x")
    assert source.problem() == ""
    assert "no [[simulated_device]]" in SimulatedSource(()).problem()


def test_the_configuration_gives_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "gpunode.toml"
    path.write_text("[network]\nname='demo'\n[[simulated_device]]\nmodel='A100'\nmemory='40G'\ncount=3\n")
    source = SimulatedSource(config.load({}, {}, path).simulated_devices)
    assert len(trio.run(source.poll)) == 3


class Recording:
    """A source of one device that writes down what is asked of it."""

    def __init__(self, device: Device, problem: str = "") -> None:
        self.device = device
        self.calls: list[str] = []
        self._problem = problem

    async def poll(self) -> tuple[Device, ...]:
        return () if self._problem else (self.device,)

    def claim(self, uuid: str) -> None:
        self.calls.append(f"claim {uuid}")

    def unclaim(self, uuid: str) -> None:
        self.calls.append(f"unclaim {uuid}")

    def problem(self) -> str:
        return self._problem


async def test_several_sources_are_one() -> None:
    simulated = SimulatedSource(TABLES)
    first, second, third = await simulated.poll()
    real = Recording(msgspec.structs.replace(first, uuid="GPU-a", simulated=False))
    shadowed = Recording(msgspec.structs.replace(second, model="another by the same name"))
    source = combined(real, simulated, shadowed)
    with pytest.raises(DeviceError, match="there is no device GPU-a"):
        source.claim("GPU-a")
    assert await source.poll() == (real.device, first, second, third)
    source.claim("GPU-a")
    source.claim(second.uuid)
    source.unclaim("GPU-a")
    assert real.calls == ["claim GPU-a", "unclaim GPU-a"]
    assert "claim SIMULATED-0001" not in shadowed.calls


async def test_a_problem_is_one_when_no_source_works() -> None:
    (device, *_) = await SimulatedSource(TABLES).poll()
    broken, other, working = Recording(device, "no driver"), Recording(device, "no tables"), Recording(device)
    assert combined(broken, other).problem() == "no driver; no tables"
    assert combined(broken, working).problem() == ""
    assert await combined(broken, working).poll() == (device,)
