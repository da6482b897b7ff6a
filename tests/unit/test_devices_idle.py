"""Owner first: when a device is sellable, and whose processes count."""

from pathlib import Path

import msgspec
import pytest

from node.devices import Idleness, IdleTracker, own_pids
from node.devices.idle import MEMORY_BASELINE_MIB
from node.ports import Device, DeviceHealth

IDLE_AFTER_MS = 1000

DEVICE = Device(
    uuid="GPU-a",
    index=0,
    vendor="nvidia",
    model="NVIDIA A100",
    memory_mib=81_920,
    memory_used_mib=3,
    compute_capability=80,
    driver="1",
    cuda=12040,
    pci="",
    utilisation_percent=0,
    temperature_c=40,
    power_w=50,
    power_limit_w=400,
    processes=(),
    ecc_errors=0,
    health=DeviceHealth.OK,
)


def device(**changes: object) -> Device:
    return msgspec.structs.replace(DEVICE, **changes)


@pytest.fixture
def tracker() -> IdleTracker:
    return IdleTracker(IDLE_AFTER_MS)


def look(tracker: IdleTracker, now_ms: int, own: frozenset[int] = frozenset(), **changes: object) -> Idleness:
    (standing,) = tracker.observe([device(**changes)], own, now_ms)
    return standing


def test_an_unused_device_is_sellable_after_a_while(tracker: IdleTracker) -> None:
    first = look(tracker, 5000)
    assert (first.sellable, first.idle_since_ms, first.sellable_at_ms) == (False, 5000, 6000)
    assert not look(tracker, 5999).sellable
    assert look(tracker, 6000).sellable
    assert look(tracker, 6000).device == DEVICE


def test_a_foreign_process_starts_the_time_anew(tracker: IdleTracker) -> None:
    look(tracker, 0)
    busy = look(tracker, 1000, processes=(7, 8), own=frozenset({8}))
    assert (busy.sellable, busy.foreign, busy.idle_since_ms, busy.sellable_at_ms) == (False, (7,), None, None)
    assert busy.device.health is DeviceHealth.BUSY
    assert busy.device.problem == "used by a process that is not gpunode's: pid 7"
    assert look(tracker, 1500).sellable_at_ms == 2500
    assert look(tracker, 2500).sellable


def test_our_own_processes_do_not_count(tracker: IdleTracker) -> None:
    own = frozenset({7})
    look(tracker, 0, processes=(7,), own=own, memory_used_mib=40_000)
    assert look(tracker, 1000, processes=(7,), own=own, memory_used_mib=40_000).sellable
    # Ours yesterday, somebody else's today: pids are used again.
    assert not look(tracker, 2000, processes=(7,)).sellable


def test_memory_in_use_by_something_unseen_counts(tracker: IdleTracker) -> None:
    look(tracker, 0)
    assert look(tracker, 1000, memory_used_mib=MEMORY_BASELINE_MIB).sellable
    busy = look(tracker, 1001, memory_used_mib=MEMORY_BASELINE_MIB + 1)
    assert (busy.sellable, busy.foreign, busy.device.health) == (False, (), DeviceHealth.BUSY)
    assert "513 MiB" in busy.device.problem


@pytest.mark.parametrize("health", [DeviceHealth.QUARANTINED, DeviceHealth.UNSUPPORTED])
def test_an_unhealthy_device_is_not_sellable_and_keeps_its_time(
    tracker: IdleTracker, health: DeviceHealth
) -> None:
    look(tracker, 0)
    ill = look(tracker, 1000, health=health, problem="why", memory_used_mib=9000)
    assert (ill.sellable, ill.idle_since_ms, ill.sellable_at_ms) == (False, 0, None)
    assert (ill.device.health, ill.device.problem) == (health, "why")
    assert look(tracker, 1001).sellable


def test_a_device_first_seen_ill_has_no_time_yet(tracker: IdleTracker) -> None:
    ill = look(tracker, 0, health=DeviceHealth.QUARANTINED)
    assert (ill.idle_since_ms, ill.sellable_at_ms) == (None, None)
    assert look(tracker, 500).sellable_at_ms == 1500


def test_an_unhealthy_device_in_use_loses_its_time(tracker: IdleTracker) -> None:
    look(tracker, 0)
    assert (
        look(tracker, 500, health=DeviceHealth.QUARANTINED, problem="hot", processes=(1,)).device.problem == "hot"
    )
    assert look(tracker, 1000).sellable_at_ms == 2000


def test_devices_are_told_apart_and_forgotten(tracker: IdleTracker) -> None:
    pair = [device(), device(uuid="GPU-b", processes=(1, 2, 3, 4, 5))]
    first, second = tracker.observe(pair, frozenset(), 0)
    assert first.idle_since_ms == 0
    assert second.device.problem.endswith("pid 1, 2, 3, 4 and others")
    tracker.observe([], frozenset(), 500)
    assert look(tracker, 1000).sellable_at_ms == 2000


def test_simulated_devices_have_no_owner_to_wait_for(tracker: IdleTracker) -> None:
    assert look(tracker, 0, simulated=True).sellable


def test_no_waiting_time_means_at_once() -> None:
    assert look(IdleTracker(0), 0).sellable
    with pytest.raises(ValueError, match="negative"):
        IdleTracker(-1)


def test_our_pids_are_those_in_our_control_groups(tmp_path: Path) -> None:
    listing = {
        1: "12:memory:/gpunode/lease-abc\n1:name=systemd:/gpunode/lease-abc\n0::/\n",
        2: "0::/gpunode.slice/lease-abc/inner\n",
        3: "0::/gpunode.slice/lease-abcd\n",
        4: "0::/user.slice\n",
        5: "0::/a:b/lease-abc\n",
    }
    for pid, text in listing.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(text)
    assert own_pids([1, 2, 3, 4, 5, 6], {"lease-abc", "lease-xyz"}, tmp_path) == {1, 2, 5}
    assert own_pids([1], frozenset(), tmp_path) == frozenset()
