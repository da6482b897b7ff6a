"""Keepers, daemons and a whole renter's machine that go away in the middle of a job, and come back."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemons import TestDaemon, daemons, until
from support.fault_jobs import (
    WAITING,
    assert_no_gap,
    gpus,
    lease_of,
    let_go,
    output,
    start_all,
    submit,
    terms,
    wait_clean,
    wait_lines,
)
from support.trees import kill_tree, signal_keeper, status_of

from node.rpc.methods import jobs
from protocol.machines.lease import AFTER_JOB_PHASES, LeasePhase
from protocol.units import MINUTE_MS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="jobs run under uids of their own")

TERMS = terms(notice="30s", grace="1m", retention="10m", window_intervals="4")

House = tuple[TestDaemon, TestDaemon, Path]


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    """A provider of two GPUs, a renter, and a folder."""
    with daemons() as running:
        provider, renter = running.make("provider", lend=TERMS, devices=gpus(2)), running.make("renter")
        start_all(provider, renter)
        renter.connect(provider)
        renter.wait_offers()
        yield provider, renter, running.folder


def start_waiting(renter: TestDaemon, **fields: object) -> tuple[str, str]:
    """Start a job that writes lines until it is let go; return (job, lease) once there are some."""
    job = submit(renter, *WAITING, **fields)
    renter.wait_running(job)
    wait_lines(renter, job)
    return job, lease_of(renter, job)


def bill(daemon: TestDaemon, lease: str) -> tuple[str, int, int, bool]:
    receipt = next(receipt for receipt in daemon.receipts() if receipt.lease == lease)
    return receipt.outcome, receipt.amount, receipt.metered_ms, receipt.accepted


def wait_bills(provider: TestDaemon, renter: TestDaemon, lease: str) -> tuple[str, int, int, bool]:
    """Wait until both sides have accepted the same receipt, and return what it says."""

    def ask() -> tuple[str, int, int, bool] | None:
        mine = [receipt for receipt in renter.receipts() if receipt.lease == lease]
        theirs = [receipt for receipt in provider.receipts() if receipt.lease == lease and receipt.accepted]
        return bill(provider, lease) if mine and theirs and mine[0].receipt == theirs[0].receipt else None

    return renter.wait_for(ask, "the receipt that both have signed")


def test_a_killed_keeper_costs_the_renter_nothing_and_the_provider_its_job(house: House) -> None:
    provider, renter, folder = house
    resumed, resumed_lease = start_waiting(renter, outputs=output("out", folder / "resumed"))
    died, died_lease = start_waiting(renter)
    signal_keeper(renter, resumed_lease, signal.SIGKILL)
    signal_keeper(provider, died_lease, signal.SIGKILL)

    wait_lines(renter, resumed)
    assert status_of(renter, resumed_lease).generation == 2
    let_go(provider, resumed_lease)
    entry = renter.wait_final(resumed)
    assert (entry.state, entry.outcome, entry.exit_status) == (jobs.JobState.SETTLED, "completed", 3)
    assert_no_gap(renter.output(resumed))
    assert (folder / "resumed" / "result").read_text() == "whole\n"

    entry = renter.wait_final(died)
    assert (entry.state, entry.outcome, entry.exit_status) == (jobs.JobState.FAILED, "keeper_died", None)
    assert "keeper died" in entry.detail
    assert entry.cost == 0
    assert_no_gap(renter.output(died))
    assert wait_bills(provider, renter, died_lease) == ("keeper_died", 0, 0, True)
    outcome, amount, metered_ms, _accepted = wait_bills(provider, renter, resumed_lease)
    assert (outcome, amount) == ("completed", metered_ms * (entry.price or 0) // 1000)
    wait_clean(provider, renter, [resumed, died])


def test_a_job_that_ends_while_both_daemons_are_down_is_settled_when_they_are_back(house: House) -> None:
    provider, renter, folder = house
    job, lease = start_waiting(renter, outputs=output("out", folder / "alone"))
    for daemon in (provider, renter):
        daemon.kill()
    let_go(provider, lease)
    until(lambda: status_of(renter, lease).phase is LeasePhase.COLLECTED, "the keepers to bring it to its end")
    assert (folder / "alone" / "result").read_text() == "whole\n"
    start_all(provider, renter)
    entry = renter.wait_final(job)
    assert (entry.state, entry.outcome, entry.exit_status) == (jobs.JobState.SETTLED, "completed", 3)
    assert_no_gap(renter.output(job))
    assert wait_bills(provider, renter, lease)[0] == "completed"
    wait_clean(provider, renter, [job])


def test_a_job_that_is_paid_ahead_runs_on_while_its_renters_machine_is_away(house: House) -> None:
    provider, renter, folder = house
    job, lease = start_waiting(renter, prepay_ms=5 * MINUTE_MS, outputs=output("out", folder / "prepaid"))
    provider.wait_for(lambda: status_of(provider, lease).voucher_amount, "the prepayment")
    kill_tree(renter)
    before = status_of(provider, lease)
    log = provider.folder.glob(f"state/*/leases/{lease}/log/stdout.head")
    (lines,) = log
    written = lines.stat().st_size
    # Longer than all vouchers that had come would last without the prepayment.
    until(lambda: lines.stat().st_size > written + 100 * len("line 100\n"), "the job to go on")
    assert status_of(provider, lease).phase is LeasePhase.RUNNING
    let_go(provider, lease)
    until(lambda: status_of(provider, lease).phase in AFTER_JOB_PHASES, "the job's end")
    provider.wait_for(
        lambda: all(device.use.value == "offered" for device in provider.devices()), "the device to be sold again"
    )
    kept = status_of(provider, lease)
    assert (kept.phase, kept.outcome, kept.exit_status) == (LeasePhase.COLLECTING, "completed", 3)
    assert kept.amount < kept.voucher_amount == before.voucher_amount

    renter.start()
    entry = renter.wait_final(job)
    assert (entry.state, entry.outcome, entry.exit_status) == (jobs.JobState.SETTLED, "completed", 3)
    assert_no_gap(renter.output(job))
    assert renter.output(job) == lines_of(kept.stdout_size)
    assert (folder / "prepaid" / "result").read_text() == "whole\n"
    outcome, amount, metered_ms, _accepted = wait_bills(provider, renter, lease)
    assert (outcome, amount, metered_ms) == ("completed", kept.amount, kept.metered_ms)
    wait_clean(provider, renter, [job])


def lines_of(size: int) -> bytes:
    """Return the first `size` bytes of what a waiting job writes."""
    text = b"".join(b"line %d\n" % number for number in range(size))
    return text[:size]
