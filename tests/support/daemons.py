"""Real daemons for functional tests: on loopback, port 0, in a temporary directory, asked over their RPC.

Every process that a test starts is ended by its pid, and so are the keepers whose lease lies below the test's
directory. Waiting is on state (an RPC's answer), with a bound; never on log text.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.leftovers import take_down

from node.errors import DaemonUnreachable
from node.lease.lock import holder_of
from node.rpc.api import Nothing
from node.rpc.client import Client
from node.rpc.methods import daemon, jobs, lend, market, money, peers

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
WAIT_S_MAX = 60.0
POLL_S = 0.02

SIMULATED_A100 = '[[simulated_device]]\nmodel = "NVIDIA A100-SXM4-40GB"\nmemory = "40G"\n'


class TestDaemon:
    """One daemon: a process, a state directory, a socket."""

    __test__ = False

    def __init__(
        self, folder: Path, name: str, settings: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir(mode=0o755)
        self.log = self.folder / "daemon.log"
        self.config = self.folder / "gpunode.toml"
        self.socket = self.folder / "run" / "rpc.sock"
        self.config.write_text(
            f'state_dir = "{self.folder / "state"}"\nruntime_dir = "{self.folder / "run"}"\n{settings}'
        )
        self.config.chmod(0o600)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("GPUNODE_")}
        self.environment = {**inherited, "PYTHONPATH": str(ROOT), **(environment or {})}
        self.wrapper: tuple[str, ...] = ()
        """A command that runs the daemon's command, which follows it."""
        self.process: subprocess.Popen[bytes] | None = None

    # --- life -----------------------------------------------------------------------------------------------

    def start(self, *, wait: bool = True) -> "TestDaemon":
        """Start the process and (unless told not to) wait until it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *self.wrapper,
                    sys.executable,
                    "-P",
                    "-c",
                    "from node.cli import main; main()",
                    "start",
                    "--config",
                    str(self.config),
                ],
                env=self.environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if wait:
            self.wait_for(self.answers)
        return self

    def answers(self) -> bool:
        """Return whether the daemon answers; fail the test when its process has ended."""
        if self.process is not None and self.process.poll() is not None:
            pytest.fail(f"{self.name} ended with {self.process.returncode}:\n{self.last_words()}")
        try:
            self.status()
        except (DaemonUnreachable, ConnectionError):
            return False
        return True

    def kill(self) -> None:
        """End the process as a power cut would."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(10)

    def stop(self) -> None:
        """Ask the process to end, then make it."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()

    def last_words(self) -> str:
        """Return the end of the log, for a failure's message."""
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def start_command(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `gpunode ARGUMENTS` for this daemon; its stdin is empty. The test ends it."""
        return subprocess.Popen(
            [sys.executable, "-P", "-c", "from node.cli import main; main()", *arguments],
            env={**self.environment, "GPUNODE_SOCKET": str(self.socket)},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def command(self, *arguments: str) -> tuple[int, bytes, bytes]:
        """Run `gpunode ARGUMENTS` for this daemon; return its exit status, stdout and stderr."""
        with self.start_command(*arguments) as process:
            out, err = process.communicate(timeout=WAIT_S_MAX)
        return process.returncode, out, err

    # --- asking ---------------------------------------------------------------------------------------------

    @contextmanager
    def client(self) -> Iterator[Client]:
        """Connect to the daemon's RPC."""
        with Client(self.socket) as client:
            yield client

    def call(self, method: Any, params: Any = None) -> Any:
        """Call a method once."""
        with self.client() as client:
            return client.call(method, Nothing() if params is None else params)

    def status(self) -> daemon.DaemonStatus:
        """Return daemon.status."""
        status: daemon.DaemonStatus = self.call(daemon.STATUS)
        return status

    @property
    def address(self) -> str:
        """The first multiaddr."""
        return self.status().swarm.addresses[0]

    @property
    def node(self) -> str:
        """The peer id."""
        return self.status().node

    def connect(self, other: "TestDaemon") -> None:
        """Connect to another daemon."""
        self.call(peers.CONNECT, peers.ConnectParams(address=other.address))

    def offers(self) -> tuple[market.OfferEntry, ...]:
        """Return offers.list."""
        result: market.OffersListResult = self.call(market.OFFERS, market.OffersListParams())
        return result.offers

    def job(self, reference: str) -> jobs.JobEntry:
        """Return one job."""
        detail: jobs.JobDetail = self.call(jobs.SHOW, jobs.JobParams(job=reference))
        return detail.entry

    def receipts(self) -> tuple[money.ReceiptEntry, ...]:
        """Return money.receipts."""
        result: money.ReceiptsResult = self.call(money.RECEIPTS, money.ReceiptsParams())
        return result.receipts

    def devices(self) -> tuple[lend.DeviceEntry, ...]:
        """Return lend.devices."""
        result: lend.DevicesResult = self.call(lend.DEVICES)
        return result.devices

    def run(self, *command: str, **changes: Any) -> str:
        """Submit a job on simulated devices; return its id. `changes`: fields of RunParams or Requirement."""
        wanted = {
            name: changes.pop(name) for name in list(changes) if name in market.Requirement.__struct_fields__
        }
        requirement = market.Requirement(
            **{"allow_simulated": True, "memory_mib": 256, "cpus_milli": 500, "disk_mib": 64, **wanted}
        )
        params = jobs.RunParams(requirement=requirement, command=command, **{"time_limit_ms": 600_000, **changes})
        result: jobs.RunResult = self.call(jobs.RUN, params)
        return result.job

    def output(self, job: str, stream: str = "stdout") -> bytes:
        """Return what a job has written so far."""
        params = jobs.LogsParams(job=job, streams=(jobs.LogStream(stream),))
        with self.client() as client:
            return b"".join(chunk.data for chunk in client.stream(jobs.LOGS, params))

    # --- waiting --------------------------------------------------------------------------------------------

    def wait_for(self, ask: Callable[[], T | None], what: str = "", job: str = "") -> T:
        """Ask until the answer is true, and return it; fail the test after a minute, with `job`'s history."""
        limit = time.monotonic() + WAIT_S_MAX
        while True:
            with suppress(DaemonUnreachable):
                answer = ask()
                if answer:
                    return answer
            if time.monotonic() > limit:
                why = self.call(jobs.WHY, jobs.WhyParams(job=job)) if job else ""
                pytest.fail(f"{self.name}: waited in vain for {what or ask}\n{why}\n{self.last_words()}")
            time.sleep(POLL_S)

    def wait_final(self, job: str) -> jobs.JobEntry:
        """Wait until a job is final, and return it."""
        return self.wait_for(
            lambda: entry if (entry := self.job(job)).state.is_final else None, f"job {job} to end", job
        )

    def wait_running(self, job: str) -> jobs.JobEntry:
        """Wait until a job runs."""

        def ask() -> jobs.JobEntry | None:
            entry = self.job(job)
            assert not entry.state.is_final, entry
            return entry if entry.state is jobs.JobState.RUNNING else None

        return self.wait_for(ask, f"job {job} to run", job)

    def wait_offers(self, count: int = 1) -> None:
        """Wait until this many offers with something free are known."""
        self.wait_for(lambda: sum(offer.free > 0 and not offer.own for offer in self.offers()) >= count, "offers")


class Daemons:
    """The daemons of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[TestDaemon] = []

    def make(
        self,
        name: str,
        *,
        lend: str = "",
        devices: str = "",
        extra: str = "",
        network: str = 'name = "demo"',
        environment: Mapping[str, str] | None = None,
    ) -> TestDaemon:
        """Return a daemon, not started; `lend`: TOML of [lend], when it is a provider, `network`: of [network]."""
        # A port of its own, not port 0: a daemon that is restarted must be found where it was.
        listen = f"/ip4/127.0.0.1/tcp/{free_port()}"
        settings = f'[network]\n{network}\nlisten = ["{listen}"]\n[tunnel]\nbind = "127.0.0.1"\n'
        if lend or devices:
            settings += f'[lend]\nenabled = true\nidle_after = "0s"\n{lend}\n'
        daemon_ = TestDaemon(self.folder, name, settings + extra + devices, environment)
        self.started.append(daemon_)
        return daemon_

    def provider(
        self, name: str = "provider", *, lend: str = "", devices: str = SIMULATED_A100, **rest: Any
    ) -> TestDaemon:
        """Start a provider of one simulated GPU."""
        return self.make(name, lend=lend, devices=devices, **rest).start()

    def renter(self, name: str = "renter", **rest: Any) -> TestDaemon:
        """Start a renter."""
        return self.make(name, **rest).start()

    def end(self) -> None:
        """End all daemons, then all keepers, and take down what keepers that were killed could not."""
        for daemon_ in self.started:
            daemon_.stop()
        for pid in self.keeper_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        take_down(self.folder)

    def mounts(self) -> list[str]:
        """Return what is mounted below this test's folder."""
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
        return [place for line in lines if (place := line.split()[1]).startswith(f"{self.folder}/")]

    def keepers(self) -> list[int]:
        """Return the pids of the keepers that hold a lease of this test's daemons; spares hold none."""
        holders = (holder_of(lease) for lease in self.folder.glob("*/state/*/leases/*"))
        return [holder.pid for holder in holders if holder is not None]

    def keeper_processes(self) -> list[int]:
        """Return the pids of every process of a keeper, or spare, that was started from this test's folder."""
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with suppress(OSError):
                    words = (process / "cmdline").read_bytes().split(b"\0")
                    if b"node.keeper" in words and any(
                        word.startswith(f"{self.folder}/".encode()) for word in words
                    ):
                        found.append(int(process.name))
        return found


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` is true; fail the test after a minute."""
    limit = time.monotonic() + WAIT_S_MAX
    while not condition():
        if time.monotonic() > limit:
            pytest.fail(f"waited in vain for {what}")
        time.sleep(POLL_S)


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def daemons() -> Iterator[Daemons]:
    """Make a short temporary folder (socket paths are short), and end everything in it."""
    with tempfile.TemporaryDirectory(prefix="gpn-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        running = Daemons(folder)
        try:
            yield running
        finally:
            running.end()
