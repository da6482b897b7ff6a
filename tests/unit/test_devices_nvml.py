"""NVML as a source of devices, against a stub library that the real pynvml loads."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from support.nvml import FakeNvml

from node.devices import DeviceLocks, DeviceNodes, NvmlSource
from node.errors import DeviceBusy, DeviceError
from node.ports import Device, DeviceHealth, DeviceSource

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(tmp_path)
    fake.load(monkeypatch)
    return fake


@pytest.fixture
def locks(tmp_path: Path) -> Iterator[DeviceLocks]:
    locks = DeviceLocks(tmp_path / "state", tmp_path / "locks")
    yield locks
    locks.unclaim_all()


@pytest.fixture
def source(fake: FakeNvml, locks: DeviceLocks, tmp_path: Path) -> NvmlSource:
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in ("nvidia0", "nvidia7", "nvidiactl", "nvidia-uvm"):
        (dev / name).touch()
    return NvmlSource(locks, DeviceNodes(dev, ()))


async def only(source: DeviceSource) -> Device:
    (device,) = await source.poll()
    return device


async def test_a_healthy_gpu_is_measured(fake: FakeNvml, source: NvmlSource, tmp_path: Path) -> None:
    fake.set(0, used_mib=1000, reserved_mib=500, utilisation=7, temperature=41, power_mw=61_500, minor=7)
    fake.set(0, compute="42,43", graphics="7", mps="43,44", cc="9.0", bus="00000000:0A:00.0")
    assert source.problem() == "the GPUs have not been looked at yet"
    assert await only(source) == Device(
        uuid=fake.uuids[0],
        index=0,
        vendor="nvidia",
        model="NVIDIA A100-SXM4-80GB",
        memory_mib=81_920,
        memory_used_mib=1000,
        compute_capability=90,
        driver="550.90.07",
        cuda=12040,
        pci="00000000:0A:00.0",
        utilisation_percent=7,
        temperature_c=41,
        power_w=61,
        power_limit_w=400,
        processes=(7, 42, 43, 44),
        ecc_errors=0,
        health=DeviceHealth.OK,
        nodes=tuple(str(tmp_path / "dev" / name) for name in ("nvidia7", "nvidiactl", "nvidia-uvm")),
    )
    assert source.problem() == ""


async def test_a_change_is_seen_at_the_next_poll(fake: FakeNvml, source: NvmlSource) -> None:
    assert (await only(source)).utilisation_percent == 0
    fake.set(0, utilisation=93)
    assert (await only(source)).utilisation_percent == 93
    second = fake.add(name="Tesla T4")
    assert [device.uuid for device in await source.poll()] == [fake.uuids[0], second]


async def test_what_a_card_does_not_offer_is_unknown(fake: FakeNvml, source: NvmlSource) -> None:
    unsupported = "utilisation,temperature,power,power_limit,ecc,rows,mig,graphics,mps,compute_mode,minor,cc"
    fake.set(0, unsupported=unsupported, compute="9")
    device = await only(source)
    assert device.health is DeviceHealth.OK
    assert device.processes == (9,)
    assert (device.utilisation_percent, device.temperature_c, device.ecc_errors) == (None, None, None)
    assert (device.power_w, device.power_limit_w, device.compute_capability) == (None, None, 0)
    assert not any(node.endswith("nvidia0") for node in device.nodes)


async def test_processes_that_can_not_be_seen_quarantine(fake: FakeNvml, source: NvmlSource) -> None:
    fake.set(0, unsupported="compute")
    device = await only(source)
    assert device.health is DeviceHealth.QUARANTINED
    assert "Not Supported" in device.problem


async def test_an_old_driver_is_measured_too(fake: FakeNvml, source: NvmlSource) -> None:
    fake.set_system(old=1, driver="470.1")
    fake.set(0, used_mib=10, reserved_mib=5)
    device = await only(source)
    assert (device.memory_mib, device.memory_used_mib, device.driver) == (81_920, 15, "470.1")


@pytest.mark.parametrize(
    ("values", "health", "problem"),
    [
        ({"mig": 1}, DeviceHealth.UNSUPPORTED, "MIG mode is on: not listed yet"),
        ({"compute_mode": 2}, DeviceHealth.UNSUPPORTED, "PROHIBITED"),
        ({"ecc_errors": 3}, DeviceHealth.QUARANTINED, "3 uncorrected memory errors"),
        ({"rows_pending": 1}, DeviceHealth.QUARANTINED, "--gpu-reset"),
        ({"rows_failed": 1}, DeviceHealth.QUARANTINED, "replaced"),
        ({"temperature": 86}, DeviceHealth.QUARANTINED, "86 C is too hot"),
        ({"temperature": 85}, DeviceHealth.OK, ""),
        ({"compute_mode": 3}, DeviceHealth.OK, ""),
        ({"error": 15}, DeviceHealth.QUARANTINED, "the GPU is lost"),
        ({"error": 16}, DeviceHealth.QUARANTINED, "needs a reset"),
        ({"error": 999}, DeviceHealth.QUARANTINED, "NVML fails on it: Unknown Error"),
        ({"uuid": "../../etc"}, DeviceHealth.QUARANTINED, "which is none"),
    ],
)
async def test_health_and_its_reason(
    fake: FakeNvml, source: NvmlSource, values: dict[str, object], health: DeviceHealth, problem: str
) -> None:
    fake.set(0, **values)
    other = fake.add()
    devices = await source.poll()
    assert devices[0].health is health
    assert problem in devices[0].problem
    assert bool(problem) == bool(devices[0].problem)
    assert (devices[1].uuid, devices[1].health) == (other, DeviceHealth.OK)


async def test_a_hot_gpu_comes_back_when_it_is_cool(fake: FakeNvml, source: NvmlSource) -> None:
    seen = []
    for temperature in (84, 86, 84, 81, 80, 85):
        fake.set(0, temperature=temperature)
        seen.append((await only(source)).health is DeviceHealth.OK)
    assert seen == [True, False, False, False, True, True]


async def test_a_lost_gpu_keeps_its_name(fake: FakeNvml, source: NvmlSource) -> None:
    fake.add()
    before = await source.poll()
    fake.set(0, handle_error=15, compute="5")
    lost, other = await source.poll()
    assert (lost.uuid, lost.model, lost.index) == (before[0].uuid, before[0].model, 0)
    assert lost.health is DeviceHealth.QUARANTINED
    assert "lost" in lost.problem
    assert (lost.temperature_c, lost.power_w, lost.processes) == (None, None, ())
    assert other == before[1]
    fake.set(0, handle_error=0, compute="")
    assert await source.poll() == before


async def test_a_vanished_gpu_is_still_reported(fake: FakeNvml, source: NvmlSource) -> None:
    fake.add()
    first, second = await source.poll()
    fake.remove(0)
    for _ in range(2):
        left, gone = await source.poll()
        assert (left.uuid, left.health, left.index) == (second.uuid, DeviceHealth.OK, 0)
        assert (gone.uuid, gone.health) == (first.uuid, DeviceHealth.QUARANTINED)
        assert "vanished" in gone.problem


async def test_a_gpu_that_never_told_its_name_is_reported(fake: FakeNvml, source: NvmlSource) -> None:
    fake.set(0, handle_error=999)
    for _ in range(2):
        device = await only(source)
        assert (device.uuid, device.health) == ("unreadable-0", DeviceHealth.QUARANTINED)
    fake.set(0, handle_error=0)
    assert (await only(source)).uuid == fake.uuids[0]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (12, "libnvidia-ml.so.1 was not found"),
        (9, "not loaded"),
        (18, "upgraded"),
        (4, "may not"),
        (999, "NVML fails"),
    ],
)
async def test_a_missing_driver_says_why(fake: FakeNvml, source: NvmlSource, code: int, problem: str) -> None:
    fake.set_system(init_error=code)
    assert await source.poll() == ()
    assert problem in source.problem()
    fake.set_system(init_error=0)
    assert (await only(source)).health is DeviceHealth.OK
    assert source.problem() == ""


async def test_a_driver_that_goes_away_quarantines_what_was_there(fake: FakeNvml, source: NvmlSource) -> None:
    before = await only(source)
    fake.set_system(init_error=9)
    device = await only(source)
    assert (device.uuid, device.health) == (before.uuid, DeviceHealth.QUARANTINED)
    assert "not loaded" in device.problem
    assert device.problem == source.problem()


async def test_no_gpu_is_a_problem_too(fake: FakeNvml, source: NvmlSource) -> None:
    fake.remove(0)
    assert await source.poll() == ()
    assert "sees no GPU" in source.problem()


async def test_a_driver_that_hangs_is_waited_for_a_bounded_time(fake: FakeNvml, locks: DeviceLocks) -> None:
    source = NvmlSource(locks, DeviceNodes(directories=()), timeout_ms=50)
    fake.add()

    async def poll_until_healthy() -> None:
        # A busy machine may need more than the short limit of this test.
        while not (devices := await source.poll()) or any(
            device.health is not DeviceHealth.OK for device in devices
        ):
            pass

    with trio.fail_after(20):
        await poll_until_healthy()
        fake.set(1, hang=1)
        while "while measuring GPU 1" not in source.problem():
            await source.poll()
        for _ in range(2):
            devices = await source.poll()
            assert [device.uuid for device in devices] == list(fake.uuids)
            assert all(device.health is DeviceHealth.QUARANTINED for device in devices)
            assert "NVML has not answered" in devices[0].problem
        fake.set(1, hang=0)
        await poll_until_healthy()
    assert source.problem() == ""


async def test_garbage_from_the_library_is_no_crash(fake: FakeNvml, source: NvmlSource) -> None:
    before = await only(source)
    text = fake.path.read_bytes()
    fake.path.write_bytes(text.replace(b"[gpu0]", b"[gpu0]\nname=\xff\xfe"))
    device = await only(source)
    assert device.uuid == before.uuid
    assert "UnicodeDecodeError" in source.problem()


async def test_only_known_gpus_are_claimed(fake: FakeNvml, source: NvmlSource, tmp_path: Path) -> None:
    uuid = fake.uuids[0]
    with pytest.raises(DeviceError, match="there is no GPU"):
        source.claim(uuid)
    await source.poll()
    source.claim(uuid)
    other = DeviceLocks(tmp_path / "other", tmp_path / "locks")
    with pytest.raises(DeviceBusy, match=f"pid {os.getpid()}, state in {tmp_path / 'state'}"):
        other.claim(uuid)
    source.unclaim(uuid)
    other.claim(uuid)
    other.unclaim_all()


async def test_cancellation_passes_through(source: NvmlSource) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await source.poll()
    assert scope.cancelled_caught


PROGRAM = """
import pathlib, sys, trio
from node import log
log.configure("error")
from node.devices import DeviceLocks, DeviceNodes, NvmlSource
source = NvmlSource(DeviceLocks(pathlib.Path("/nowhere")), DeviceNodes(directories=()))
for device in trio.run(source.poll):
    print(device.uuid, device.health.value)
print(source.problem())
"""


def run_program(**variables: str) -> str:
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], **variables}
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return finished.stdout.strip()


def test_a_child_process_sees_the_fake_gpus_by_its_environment(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path, gpus=2)
    assert run_program(**fake.environment) == "\n".join(f"{uuid} ok" for uuid in fake.uuids)


def test_a_machine_without_the_library_says_so(tmp_path: Path) -> None:
    # An empty file by the library's name shadows a real one: it can't be loaded.
    (tmp_path / "libnvidia-ml.so.1").write_text("")
    assert "libnvidia-ml.so.1 was not found" in run_program(LD_LIBRARY_PATH=str(tmp_path))
