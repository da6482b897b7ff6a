"""Renters that stop paying, disks that are full, and jobs that mean harm, through the whole house."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.daemons import TestDaemon, daemons
from support.fault_jobs import (
    GPUNODE,
    WAITING,
    assert_no_gap,
    environment_of,
    gpunode,
    gpus,
    lease_of,
    let_go,
    output,
    random_file,
    scanned,
    show,
    start_all,
    submit,
    terms,
    wait_clean,
    wait_lines,
    wait_state,
)
from support.trees import lease_directories, signal_keeper, status_of

from node.errors import BadArgument
from node.rpc.methods import jobs
from protocol.machines.lease import LeasePhase

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="jobs run under uids of their own, disks are mounted")

MIB = 2**20
TERMS = terms(notice="30s", grace="4s", retention="10m", window_intervals="4")
SECOND = 138_888
"""What a second costs at the provider's price, in nano-credits."""

House = tuple[TestDaemon, TestDaemon, Path]


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    """A provider of four GPUs, a renter, and a folder."""
    with daemons() as running:
        provider, renter = running.make("provider", lend=TERMS, devices=gpus(4)), running.make("renter")
        start_all(provider, renter)
        renter.connect(provider)
        renter.wait_offers()
        yield provider, renter, running.folder


# --- payment ------------------------------------------------------------------------------------------------


def test_a_job_is_frozen_when_payment_stops_goes_on_with_it_and_is_ended_without(house: House) -> None:
    provider, renter, folder = house
    paid_again = submit(renter, *WAITING, outputs=output("out", folder / "paid"))
    never_again = submit(renter, *WAITING)
    capped = submit(renter, *WAITING, max_spend=3 * SECOND)
    for job in (paid_again, never_again):
        renter.wait_running(job)
        wait_lines(renter, job)
    leases = [lease_of(renter, job) for job in (paid_again, never_again)]
    for lease in reversed(leases):
        signal_keeper(renter, lease, signal.SIGSTOP)
    provider.wait_for(lambda: status_of(provider, leases[0]).phase is LeasePhase.FROZEN, "a frozen job")
    frozen = status_of(provider, leases[0])
    assert frozen.amount == frozen.voucher_amount

    signal_keeper(renter, leases[0], signal.SIGCONT)
    wait_lines(renter, paid_again)
    let_go(provider, leases[0])
    entry = renter.wait_final(paid_again)
    assert (entry.outcome, entry.exit_status) == ("completed", 3)
    assert (folder / "paid" / "result").read_text() == "whole\n"
    assert_no_gap(renter.output(paid_again))

    provider.wait_for(
        lambda: status_of(provider, leases[1]).phase is LeasePhase.COLLECTING, "the unpaid job's end"
    )
    ended = status_of(provider, leases[1])
    assert (ended.outcome, ended.amount) == ("renter_away", ended.voucher_amount)
    assert ended.metered_ms * SECOND // 1000 > ended.amount
    signal_keeper(renter, leases[1], signal.SIGCONT)
    entry = renter.wait_final(never_again)
    assert (entry.state, entry.outcome) == (jobs.JobState.FAILED, "renter_away")
    assert "no voucher came" in entry.detail
    assert_no_gap(renter.output(never_again))

    entry = renter.wait_final(capped)
    assert (entry.state, entry.outcome) == (jobs.JobState.FAILED, "unpaid")
    assert entry.cost == entry.max_spend == 3 * SECOND
    wait_clean(provider, renter, [paid_again, never_again, capped])
    bills = {receipt.lease: receipt for receipt in provider.receipts() if receipt.accepted}
    assert {lease: bill.amount for lease, bill in bills.items()} == {
        receipt.lease: receipt.amount for receipt in renter.receipts()
    }
    # Back again, the renter has signed for what its job had used beyond the vouchers of that time.
    late = bills[leases[1]]
    assert late.amount == late.metered_ms * SECOND // 1000 > ended.voucher_amount
    assert bills[lease_of(renter, capped)].amount == 3 * SECOND


# --- disks --------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    place.mkdir()
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def test_inputs_that_do_not_fit_are_refused_here_or_there_and_it_is_said_what_to_ask_for(house: House) -> None:
    provider, renter, folder = house
    inputs = scanned(random_file(folder / "input", 30 * MIB), "data")
    with pytest.raises(
        BadArgument, match="the inputs take 30 MiB, and the job's disk is to have 16 MiB"
    ) as refused:
        submit(renter, "/bin/true", inputs=inputs, disk_mib=16)
    assert "--disk" in refused.value.hint
    # It fits in itself, but not with what a file system, and a job, need beside it.
    job = submit(renter, "/bin/true", inputs=inputs, disk_mib=30)
    entry = renter.wait_final(job)
    assert (entry.state, entry.outcome, entry.started_at, entry.cost) == (
        jobs.JobState.FAILED,
        "disk_full",
        None,
        0,
    )
    assert "/job lacks" in entry.detail
    assert "--disk" in entry.detail
    assert str(folder) not in entry.detail, "the provider's paths are its own business"
    wait_clean(provider, renter, [job])


def test_a_job_that_fills_its_disk_learns_it_and_keeps_what_it_has_written(house: House) -> None:
    provider, renter, folder = house
    script = "mkdir out; head -c 100M /dev/zero > out/full; echo status $?; exit 7"
    job = submit(renter, "/bin/sh", "-c", script, disk_mib=16, outputs=output("out", folder / "full"))
    entry = renter.wait_final(job)
    assert (entry.outcome, entry.exit_status, entry.detail) == ("completed", 7, "")
    assert renter.output(job) == b"status 1\n"
    assert b"No space left on device" in renter.output(job, "stderr")
    assert 16 * MIB <= (folder / "full" / "full").stat().st_size < 32 * MIB
    wait_clean(provider, renter, [job])


def test_results_wait_at_the_provider_until_there_is_room_for_them(house: House) -> None:
    provider, renter, folder = house
    with small_disk(folder / "small", "20m") as small:
        script = "mkdir out; head -c 30M /dev/urandom > out/large; echo small > out/small; echo done"
        job = submit(renter, "/bin/sh", "-c", script, disk_mib=64, outputs=output("out", small / "results"))
        told = wait_state(renter, job, jobs.JobState.COLLECTING, "out waits at the provider")
        assert f"{small} lacks" in told.detail
        assert "gpunode fetch" in told.detail
        assert not (small / "results").exists()
        assert (show(renter, job).results_until or 0) > told.created_at
        provider.wait_for(lambda: provider.devices()[0].use.value == "offered", "the device to be sold again")
        with subprocess.Popen(
            [*GPUNODE, "fetch", job], env=environment_of(renter), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as fetch:
            mount("-o", "remount,size=100m", str(small))
            said, _progress = fetch.communicate(timeout=60)
        assert fetch.returncode == 0
        assert said.endswith(b": here\n")
        assert renter.wait_final(job).outcome == "completed"
        assert (small / "results" / "large").stat().st_size == 30 * MIB
        assert [path.name for path in small.iterdir()] == ["results"]
    wait_clean(provider, renter, [job])


def test_results_that_can_not_be_stored_are_given_up_by_cancelling(house: House) -> None:
    _provider, renter, folder = house
    (folder / "mine").write_text("not the job's")
    script = "mkdir out; echo x > out/file; mkfifo pipe"
    outputs = output("out", folder / "mine" / "below")
    job = submit(renter, "/bin/sh", "-c", script, outputs=(*outputs, *output("pipe", folder / "pipe")))
    told = wait_state(renter, job, jobs.JobState.COLLECTING, "out waits at the provider")
    assert str(folder / "mine") in told.detail
    assert gpunode(renter, "cancel", job).returncode == 0
    entry = renter.wait_final(job)
    assert (entry.state, entry.outcome, entry.exit_status) == (jobs.JobState.FAILED, "cancelled", 0)
    assert "given up" in entry.detail
    assert (folder / "mine").read_text() == "not the job's"
    fetched = gpunode(renter, "fetch", job)
    assert fetched.returncode == 125
    assert b"not here yet" in fetched.stdout


# --- jobs that mean harm ------------------------------------------------------------------------------------

HOSTILE: dict[str, tuple[str, ...]] = {
    "bomb": ("/bin/sh", "-c", "trap '' TERM HUP INT; echo begun; bomb() { bomb & bomb & wait; }; bomb"),
    "memory": ("python3", "-c", "print('begun', flush=True); hoard = b'x' * 2**30"),
    "tmp": (
        "/bin/sh", "-c",
        "head -c 2G /dev/zero > /tmp/x; echo tmp $?; rm /tmp/x; head -c 2G /dev/zero > /dev/shm/x; echo shm $?",
    ),
    "deaf": ("/bin/sh", "-c", "trap '' TERM HUP INT; echo deaf; while :; do sleep 0.1; done"),
    "log": ("/bin/sh", "-c", "echo first; head -c 1G /dev/zero; echo; echo last"),
    "bytes": (
        "python3", "-c",
        r"import os; os.write(1, b'\xff\xfe\x00\x1b]0;owned\x07\x1b[2J\xc3('); os.write(2, b'\x1b[31m\xf0(')",
    ),
    "closed": ("/bin/sh", "-c", "echo before; exec >&- 2>&-; mkdir out; echo after > out/file; exit 4"),
    "daemon": (
        "/bin/sh", "-c",
        "(setsid sh -c 'trap \"\" TERM HUP; echo still; while :; do sleep 0.1; done' &); sleep 0.3; exit 6",
    ),
    "orphans": (
        "python3", "-c",
        "import os\nfor _ in range(20):\n    if os.fork() == 0:\n        os.fork(), os._exit(0)\nprint('bred')",
    ),
}  # fmt: skip
LOG_KEPT = 2 * 4 * MIB
"""Head and tail of one stream."""


def test_jobs_that_mean_harm_harm_nobody_and_leave_nothing(house: House) -> None:
    provider, renter, folder = house
    special = {"deaf": {"time_limit_ms": 2_000}, "closed": {"outputs": output("out", folder / "closed")}}
    ids = {
        name: submit(renter, *command, name=name, memory_mib=128, disk_mib=32, **special.get(name, {}))
        for name, command in HOSTILE.items()
    }
    renter.wait_for(lambda: renter.output(ids["bomb"]) == b"begun\n", "the bomb to begin", ids["bomb"])
    assert gpunode(renter, "cancel", "bomb").returncode == 0
    ended = {name: renter.wait_final(job) for name, job in ids.items()}
    said = {name: (renter.output(job), renter.output(job, "stderr")) for name, job in ids.items()}

    assert (ended["bomb"].outcome, ended["bomb"].exit_status) == ("cancelled", 137)
    assert (ended["memory"].outcome, ended["memory"].exit_status) == ("completed", 137)
    assert "ran out of memory" in ended["memory"].detail
    assert "--memory" in ended["memory"].detail
    assert said["memory"][0] == b"begun\n"
    assert said["tmp"][0] == b"tmp 1\nshm 1\n"
    assert said["tmp"][1].count(b"No space left on device") == 2
    assert (ended["deaf"].outcome, ended["deaf"].exit_status) == ("time_limit", 137)
    assert gpunode(renter, "attach", "deaf").returncode == 124
    assert said["bytes"] == (b"\xff\xfe\x00\x1b]0;owned\x07\x1b[2J\xc3(", b"\x1b[31m\xf0(")
    assert (ended["closed"].exit_status, said["closed"][0]) == (4, b"before\n")
    assert (folder / "closed" / "file").read_text() == "after\n"
    assert (ended["daemon"].exit_status, said["daemon"][0]) == (6, b"still\n")
    assert (ended["orphans"].exit_status, said["orphans"][0]) == (0, b"bred\n")

    log = said["log"][0]
    assert (log[:6], log[-6:], ended["log"].exit_status) == (b"first\n", b"\nlast\n", 0)
    assert LOG_KEPT // 2 < len(log) <= LOG_KEPT
    shown = gpunode(renter, "logs", "log")
    assert shown.stdout == log
    assert b"GB of stdout were dropped" in shown.stderr
    kept = lease_directories(renter)[lease_of(renter, ids["log"])]
    assert sum(path.stat().st_blocks * 512 for path in kept.rglob("*")) < LOG_KEPT + MIB
    wait_clean(provider, renter, ids.values())
