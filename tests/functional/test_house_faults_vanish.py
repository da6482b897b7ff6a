"""A machine that is gone: daemon, keepers and jobs at once, as by a power cut.

Two machines rent from each other; one of them vanishes. The other finds out, by itself and in a bounded time, as a
renter and as a provider; then the first comes back, and both books agree.
"""

import os
import signal
from collections.abc import Iterator

import pytest
from support.daemons import TestDaemon, daemons
from support.fault_jobs import (
    WAITING,
    assert_no_gap,
    gpus,
    lease_of,
    output,
    random_file,
    scanned,
    show,
    start_all,
    submit,
    terms,
    wait_lines,
    wait_state,
)
from support.trees import kill_tree, lease_directories, signal_keeper, status_of, wait_nothing_left

from node.lease.files import LeaseStatus
from node.rpc.methods import jobs, money
from protocol.machines.lease import LeasePhase

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="jobs run under uids of their own")

TERMS = terms(grace="1s", retention="13s", window_intervals="4", notice="1s")
TIME_MS = 26_000
"""Time limit of the job that runs: its renter waits for the provider until the lease's end and the retention."""
NOWHERE = "/proc/nowhere"
"""No output can be stored below it: such a job stays in COLLECTING."""
INPUT_SIZE = 32 * 2**20
COLLECTING, RUNNING, STAGING = "collecting", "running", "staging"

Machines = tuple[TestDaemon, TestDaemon]
"""(the one that will vanish, the one that stays)."""
ByState = dict[str, str]
"""What a job does when the machine vanishes -> the job, or its lease, or how that ended."""


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Two machines that both lend three GPUs, and rent."""
    with daemons() as running:
        vanishing, staying = (running.make(name, lend=TERMS, devices=gpus(3)) for name in ("vanishing", "staying"))
        start_all(vanishing, staying)
        staying.connect(vanishing)
        for daemon in (vanishing, staying):
            daemon.wait_offers()
        yield vanishing, staying


def rent_from_each_other(machines: Machines) -> tuple[ByState, ByState]:
    """Bring three jobs of each machine, on the other, to three states; return the jobs of each."""
    vanishing, staying = machines
    mine: tuple[ByState, ByState] = ({}, {})
    keep = ("/bin/sh", "-c", "mkdir out; echo kept > out/result; exit 5")
    for renter, ids in zip(machines, mine, strict=True):
        ids[COLLECTING] = submit(renter, *keep, outputs=output("out", f"{NOWHERE}/out"))
        ids[RUNNING] = submit(renter, *WAITING, time_limit_ms=TIME_MS, outputs=output("out", "/tmp/never"))
    for renter, ids in zip(machines, mine, strict=True):
        wait_state(renter, ids[COLLECTING], jobs.JobState.COLLECTING, "waits at the provider")
        wait_lines(renter, ids[RUNNING])
    large = scanned(random_file(staying.folder / "large", INPUT_SIZE), "large")
    for renter, ids in zip(machines, mine, strict=True):
        ids[STAGING] = submit(renter, "/bin/true", inputs=large)
        wait_state(renter, ids[STAGING], jobs.JobState.STAGING)
        # Here its inputs stop: the keeper of the machine that will vanish stands still.
        signal_keeper(vanishing, lease_of(renter, ids[STAGING]), signal.SIGSTOP)
    return mine


def leases_of(renter: TestDaemon, ids: ByState) -> ByState:
    return {state: lease_of(renter, job) for state, job in ids.items()}


def bills_of(daemon: TestDaemon, leases: ByState) -> dict[str, money.ReceiptEntry]:
    found = {receipt.lease: receipt for receipt in daemon.receipts()}
    return {state: found[lease] for state, lease in leases.items() if lease in found}


def wait_ended(provider: TestDaemon, leases: ByState) -> LeaseStatus:
    """The renter is gone: its unpaid job ends, its device is sold again, its results wait; return the end."""
    provider.wait_for(
        lambda: status_of(provider, leases[RUNNING]).phase is LeasePhase.COLLECTING, "the unpaid job's end"
    )
    ended = status_of(provider, leases[RUNNING])
    assert (ended.outcome, ended.amount) == ("renter_away", ended.voucher_amount)
    results = lease_directories(provider)[leases[RUNNING]] / "scratch" / "job"
    provider.wait_for(
        lambda: sum(device.use.value == "offered" for device in provider.devices()) >= 2,
        "its device to be sold again",
    )
    assert results.is_dir()
    assert ended.kept_until - ended.ended_at == 13_000
    return ended


def wait_closed(provider: TestDaemon, leases: ByState, ended: LeaseStatus) -> None:
    """The renter is still gone: results are erased, nothing of the leases is left, vouchers are billed."""
    wait_nothing_left(provider, leases.values(), as_provider=True)
    provider.wait_for(lambda: all(device.use.value == "offered" for device in provider.devices()), "the offers")
    bills = bills_of(provider, leases)
    assert {state: bill.outcome for state, bill in bills.items()} == {
        COLLECTING: "retention_passed", RUNNING: "renter_away", STAGING: "renter_away",
    }  # fmt: skip
    assert (bills[RUNNING].amount, bills[STAGING].amount) == (ended.voucher_amount, 0)
    assert not any(bill.accepted for bill in bills.values())


def wait_missed(renter: TestDaemon, ids: ByState) -> int:
    """Wait until the renter's keeper misses the provider; return what it has promised for the running job."""
    renter.wait_for(lambda: "no tunnel" in renter.job(ids[RUNNING]).detail, "the provider to be missed")
    return show(renter, ids[RUNNING]).attempts[0].paid


def wait_renter(renter: TestDaemon, ids: ByState, leases: ByState, promised: int) -> None:
    """The provider is gone: the jobs fail and say why, and nothing more is promised than when it was missed."""
    ended = {state: renter.wait_final(job) for state, job in ids.items()}
    assert {state: (entry.state, entry.outcome) for state, entry in ended.items()} == {
        COLLECTING: (jobs.JobState.FAILED, "collecting_failed"),
        RUNNING: (jobs.JobState.FAILED, "provider_away"),
        STAGING: (jobs.JobState.FAILED, "provider_away"),
    }
    assert NOWHERE in ended[COLLECTING].detail
    assert "not heard of" in ended[RUNNING].detail
    assert "not heard of" in ended[STAGING].detail
    assert show(renter, ids[RUNNING]).attempts[0].paid == promised > ended[RUNNING].cost
    assert_no_gap(renter.output(ids[RUNNING]))
    wait_nothing_left(renter, leases.values(), as_provider=False)
    assert not bills_of(renter, leases)


def test_a_vanished_machine_is_given_up_in_time_and_the_books_agree_when_it_is_back(machines: Machines) -> None:
    vanishing, staying = machines
    away_ids, ids = rent_from_each_other(machines)
    sold, bought = leases_of(vanishing, away_ids), leases_of(staying, ids)
    kill_tree(vanishing)
    end = wait_ended(staying, sold)
    promised = wait_missed(staying, ids)
    wait_closed(staying, sold, end)
    wait_renter(staying, ids, bought, promised)

    vanishing.start()
    ended = {state: vanishing.wait_final(job) for state, job in away_ids.items()}
    # By its own clock, or by the receipts that wait for it, whichever is first.
    assert ended[COLLECTING].outcome in ("retention_passed", "collecting_failed")
    assert ended[RUNNING].outcome in ("renter_away", "provider_away")
    assert ended[STAGING].outcome in ("renter_away", "provider_away")
    for provider, renter, leases in ((staying, vanishing, sold), (vanishing, staying, bought)):
        provider.wait_for(
            lambda provider=provider, leases=leases: sum(
                bill.accepted for bill in bills_of(provider, leases).values()
            ) == 3,
            "three receipts that both have signed",
        )  # fmt: skip
        mine, theirs = bills_of(renter, leases), bills_of(provider, leases)
        assert {state: (bill.receipt, bill.amount) for state, bill in mine.items()} == {
            state: (bill.receipt, bill.amount) for state, bill in theirs.items()
        }
        wait_nothing_left(provider, leases.values(), as_provider=True)
        wait_nothing_left(renter, leases.values(), as_provider=False)
    died = bills_of(vanishing, bought)
    assert (died[RUNNING].outcome, died[RUNNING].amount, died[STAGING].amount) == ("keeper_died", 0, 0)
