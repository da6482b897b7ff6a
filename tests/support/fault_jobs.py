"""Jobs, terms and questions that the tests of faults share."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support.daemons import TestDaemon
from support.trees import lease_directories, wait_nothing_left

from node.jobs.tree import scan_tree
from node.rpc.methods import jobs

PRICE_MAX = 10**6
"""Nano-credits a second: well above what the providers of these tests ask."""
LINES = (
    "i=0; while [ ! -e go ]; do echo line $i; i=$((i+1)); sleep 0.05; done; "
    "mkdir -p out; echo whole > out/result; exit 3"
)
"""Writes lines until the test lets it go on (`let_go`)."""
WAITING = ("/bin/sh", "-c", LINES)


def terms(**fields: str) -> str:
    """Return TOML of [lend] for a flat price and an auction without waiting, with `fields` of [lend.terms]."""
    usual = {"lease_min": "1s", "notice": "1s", "checkpoint": "1s", "voucher_interval": "500ms", **fields}
    lines = "".join(
        f"{name} = {value}\n" if value.isdigit() else f'{name} = "{value}"\n' for name, value in usual.items()
    )
    auction = '[lend.auction]\nopening = "0s"\ntick = "100ms"\n'
    host = '[lend.host]\ncpus = 1\nmemory = "512M"\ndisk = "256M"\n'
    return f"start_price = 0.5\nreserve_price = 0.5\n[lend.terms]\n{lines}{auction}{host}"


def gpus(count: int) -> str:
    """Return TOML of simulated GPUs."""
    return f'[[simulated_device]]\nmodel = "NVIDIA A100-SXM4-40GB"\nmemory = "40G"\ncount = {count}\n'


def start_all(*started: TestDaemon) -> None:
    """Start daemons at the same time, and wait until all answer."""
    for daemon in started:
        daemon.start(wait=False)
    for daemon in started:
        daemon.wait_for(daemon.answers, "the daemon to answer")


def submit(renter: TestDaemon, *command: str, **fields: Any) -> str:
    """Submit a job at any price of these tests."""
    return renter.run(*command, **{"max_price": PRICE_MAX, **fields})


def lease_of(renter: TestDaemon, job: str) -> str:
    """Return the id of a leased job's lease, in hex."""
    return show(renter, job).attempts[-1].lease


def show(renter: TestDaemon, job: str) -> jobs.JobDetail:
    """Return jobs.show."""
    detail: jobs.JobDetail = renter.call(jobs.SHOW, jobs.JobParams(job=job))
    return detail


def output(remote: str, local: Path | str) -> tuple[jobs.JobOutput, ...]:
    """Return one output."""
    return (jobs.JobOutput(remote=remote, local=str(local)),)


def scanned(source: Path, destination: str) -> tuple[jobs.JobInput, ...]:
    """Return one input, as the command line scans it."""
    manifest = scan_tree(source).manifest
    digest = manifest.id.hex()
    return (jobs.JobInput(source=str(source), destination=destination, manifest=digest, size=manifest.size),)


def let_go(provider: TestDaemon, lease: str) -> None:
    """Let a `WAITING` job go on to its end."""
    (lease_directories(provider)[lease] / "scratch" / "job" / "go").touch()


def wait_lines(renter: TestDaemon, job: str, more: int = 3) -> int:
    """Wait until so many more lines of a `WAITING` job are here; return how many there are."""
    wanted = renter.output(job).count(b"\n") + more
    renter.wait_for(lambda: renter.output(job).count(b"\n") >= wanted, "more output", job)
    return wanted


def wait_state(renter: TestDaemon, job: str, state: jobs.JobState, says: str = "") -> jobs.JobEntry:
    """Wait until a job is in `state`, and says so."""

    def ask() -> jobs.JobEntry | None:
        entry = renter.job(job)
        return entry if entry.state is state and says in entry.detail else None

    return renter.wait_for(ask, f"job {job} to be {state.value}", job)


def assert_no_gap(log: bytes) -> None:
    """Assert that the output of a `WAITING` job is there from its first line on."""
    assert log == b"".join(b"line %d\n" % number for number in range(log.count(b"\n")))


def wait_clean(provider: TestDaemon, renter: TestDaemon, jobs_: Iterable[str]) -> None:
    """Wait until every device is offered again and nothing of the jobs' leases is left on the machine."""
    leases = {lease_of(renter, job) for job in jobs_}
    provider.wait_for(
        lambda: all(device.use.value == "offered" for device in provider.devices()), "the devices to be offered"
    )
    wait_nothing_left(provider, leases, as_provider=True)
    wait_nothing_left(renter, leases, as_provider=False)


def gpunode(daemon: TestDaemon, *arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run the command line against `daemon`, without a terminal."""
    return subprocess.run(
        [*GPUNODE, *arguments], env=environment_of(daemon), stdin=subprocess.DEVNULL, capture_output=True,
        check=False, timeout=60, **options,
    )  # fmt: skip


def environment_of(daemon: TestDaemon) -> dict[str, str]:
    """Return the environment in which the command line finds `daemon`."""
    return {**daemon.environment, "GPUNODE_SOCKET": str(daemon.socket), "COLUMNS": "200"}


GPUNODE = (sys.executable, "-P", "-c", "from node.cli import main; main()")


def random_file(path: Path, size: int) -> Path:
    """Write a file that neither compresses nor repeats."""
    path.write_bytes(os.urandom(size))
    return path
