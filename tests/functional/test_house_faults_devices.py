"""GPUs that are real to the product (the stub NVML), in a private pool: lent, lost, used by others, claimed.

All tests of this file share one provider of two GPUs and one renter.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from support.daemons import Daemons, TestDaemon
from support.daemons import daemons as run_daemons
from support.nvml import FakeNvml

from node.devices import locks
from node.rpc.methods import daemon as daemon_api
from node.rpc.methods import jobs, lend, money

POOL = 'name = "lab"\nkey = "a private pool on loopback"'
GPU_IS_LOST = 15


class House(NamedTuple):
    """Who lives here."""

    daemons: Daemons
    gpus: FakeNvml
    provider: TestDaemon
    renter: TestDaemon

    def use_of(self, index: int) -> str:
        """Return what a GPU is doing."""
        return self.provider.devices()[index].use.value

    def wait_use(self, index: int, use: str) -> lend.DeviceEntry:
        """Wait until a GPU does that."""
        return self.provider.wait_for(
            lambda: next((one for one in self.provider.devices()[index:] if one.use.value == use), None),
            f"GPU {index} to be {use}",
        )


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeNvml]:
    fake = FakeNvml(tmp_path_factory.mktemp("nvml"), gpus=2)
    yield fake
    for uuid in fake.uuids:
        (locks.DIRECTORIES[0] / uuid).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def house(gpus: FakeNvml) -> Iterator[House]:
    with run_daemons() as running:
        lend_ = 'start_price = 1.00\nreserve_price = 1.00\n[lend.auction]\nopening = "100ms"\ntick = "100ms"\n'
        provider = running.make("provider", network=POOL, lend=lend_, environment=gpus.environment).start(
            wait=False
        )
        renter = running.make("renter", network=POOL).start(wait=False)
        for one in (provider, renter):
            one.wait_for(one.answers)
        renter.connect(provider)
        renter.wait_offers()
        yield House(running, gpus, provider, renter)


def test_a_job_sees_its_gpu_and_is_paid_for(house: House) -> None:
    provider, renter = house.provider, house.renter
    (offer,) = renter.offers()
    assert (offer.simulated, offer.quantity, offer.free) == (False, 2, 2)
    job = renter.run(
        "/bin/sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES; echo $CUDA_VISIBLE_DEVICES", allow_simulated=False
    )
    entry = renter.wait_final(job)
    assert (entry.outcome, entry.exit_status, entry.simulated) == ("completed", 0, False)
    seen = renter.output(job).decode().split()
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert seen[0] in house.gpus.uuids
    receipt = provider.wait_for(lambda: [one for one in provider.receipts() if one.accepted])[0]
    assert receipt.amount > 0
    ours: money.LedgerResult = renter.call(money.LEDGER)
    theirs: money.LedgerResult = provider.call(money.LEDGER)
    assert (ours.owed_by_us, theirs.owed_to_us) == (receipt.amount, receipt.amount)
    house.wait_use(0, "offered")


def test_what_its_owner_uses_is_not_offered_until_it_is_free_again(house: House) -> None:
    house.gpus.set(1, compute=os.getpid())
    device = house.wait_use(1, "not_offered")
    assert f"pid {os.getpid()}" in device.problem
    house.renter.wait_for(lambda: house.renter.offers()[0].free == 1, "the offer of one")
    house.gpus.set(1, compute="")
    house.wait_use(1, "offered")
    house.renter.wait_for(lambda: house.renter.offers()[0].free == 2, "the offer of both")


@pytest.mark.parametrize(
    ("broken", "problem"),
    [({"error": GPU_IS_LOST}, "fallen off the bus"), ({"temperature": 99}, "99 C is too hot")],
    ids=["lost", "hot"],
)
def test_a_gpu_that_is_not_well_is_not_offered_until_it_is(
    house: House, broken: dict[str, int], problem: str
) -> None:
    house.gpus.set(0, **broken)
    device = house.wait_use(0, "not_offered")
    assert (device.health, device.uuid) == ("quarantined", house.gpus.uuids[0])
    assert problem in device.problem
    doctor: daemon_api.DoctorResult = house.provider.call(daemon_api.DOCTOR)
    check = next(one for one in doctor.checks if one.name == "device.0")
    assert check.status is daemon_api.CheckStatus.FAIL
    house.renter.wait_for(lambda: house.renter.offers()[0].free == 1, "the offer of one")
    house.gpus.set(0, **dict.fromkeys(broken, 0))
    house.wait_use(0, "offered")
    house.renter.wait_for(lambda: house.renter.offers()[0].free == 2, "the offer of both")


def test_a_gpu_that_is_lost_in_a_lease_is_sold_again_only_when_it_is_back(house: House) -> None:
    provider, renter, gpus = house.provider, house.renter, house.gpus
    job = renter.run("/bin/sleep", "600", allow_simulated=False)
    renter.wait_running(job)
    index = next(number for number, one in enumerate(provider.devices()) if one.lease is not None)
    gpus.set(index, error=GPU_IS_LOST)
    device = provider.devices()[index]
    assert (device.uuid, device.health) == (gpus.uuids[index], "quarantined")
    assert device.lease is not None
    # The job is not judged by that: it fails by itself, or does not need the GPU any more.
    assert renter.job(job).state is jobs.JobState.RUNNING
    renter.call(jobs.CANCEL, jobs.JobParams(job=job))
    assert renter.wait_final(job).outcome == "cancelled"
    house.wait_use(index, "not_offered")
    renter.wait_for(lambda: [one for one in renter.offers() if one.free == 1], "the offer of one")
    other = renter.wait_final(renter.run("/bin/true", allow_simulated=False))
    assert other.outcome == "completed"
    gpus.set(index, error=0)
    house.wait_use(index, "offered")
    renter.wait_for(lambda: renter.offers()[0].free == 2, "the offer of both")


def test_a_gpu_that_vanishes_in_a_lease_and_a_restart_comes_back_with_its_chain(house: House) -> None:
    provider, renter, gpus = house.provider, house.renter, house.gpus
    job = renter.run("/bin/sleep", "600", allow_simulated=False)
    renter.wait_running(job)
    index = next(number for number, one in enumerate(provider.devices()) if one.lease is not None)
    uuid = gpus.uuids[index]
    gpus.set(index, error=GPU_IS_LOST)
    provider.kill()
    provider.start()
    # It has never been measured by this daemon, and does not even give its name; its lease goes on.
    assert {one.use.value for one in provider.devices()} == {"offered", "not_offered"}
    status: lend.LendStatus = provider.call(lend.STATUS)
    assert [lease.renter for lease in status.leases] == [renter.node]
    gpus.remove(index)
    house.renter.connect(provider)
    assert renter.job(job).state is jobs.JobState.RUNNING
    renter.call(jobs.CANCEL, jobs.JobParams(job=job))
    assert renter.wait_final(job).outcome == "cancelled"
    gpus.add(uuid=uuid)
    provider.wait_for(
        lambda: (
            {(one.uuid, one.use.value) for one in provider.devices()} == {(one, "offered") for one in gpus.uuids}
        ),
        "both GPUs to be offered again",
    )


def test_an_ended_lease_holds_its_gpu_while_anything_still_uses_it(house: House) -> None:
    provider, renter, gpus = house.provider, house.renter, house.gpus
    job = renter.run("/bin/sleep", "600", allow_simulated=False)
    renter.wait_running(job)
    index = next(number for number, one in enumerate(provider.devices()) if one.lease is not None)
    gpus.set(index, compute=os.getpid(), used_mib=2000)
    renter.call(jobs.CANCEL, jobs.JobParams(job=job))
    assert renter.wait_final(job).outcome == "cancelled"
    device = house.wait_use(index, "releasing")
    assert f"processes ({os.getpid()},) still use it" in device.problem
    gpus.set(index, compute="")
    provider.wait_for(lambda: "2000 MiB of memory still in use" in provider.devices()[index].problem, "the reason")
    assert house.use_of(index) == "releasing"
    gpus.set(index, used_mib=0)
    house.wait_use(index, "offered")


def test_a_gpu_is_lent_by_one_daemon_of_a_machine(house: House) -> None:
    second = house.daemons.make("second", network=POOL, devices=" ", environment=house.gpus.environment).start()
    for device in second.devices():
        assert device.use.value == "not_offered"
        assert f"held by another gpunode daemon (pid {house.provider.status().pid}, state in " in device.problem
    second.connect(house.renter)
    second.connect(house.provider)
    assert {one.provider for one in second.offers()} == {house.provider.node}
    house.provider.stop()
    second.wait_for(lambda: all(one.use.value == "offered" for one in second.devices()), "the GPUs to be claimed")
    house.provider.start()
    assert {one.use.value for one in house.provider.devices()} == {"not_offered"}
    second.stop()
    house.wait_use(0, "offered")
