"""Two real keepers on loopback, the daemons' part played by the test: it writes their papers and reads them.

Most keepers are forked from one process that has imported everything: an import takes longer than a job.
"""

import atexit
import contextlib
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import trio

from node.clock import SystemClock
from node.jobs.logs import LogReader
from node.jobs.tree import scan_tree
from node.keys import LeaseKey
from node.lease import link
from node.lease.files import (
    InputSource,
    LeaseFile,
    LeaseKeys,
    LeaseStatus,
    ProviderSide,
    RenterSide,
    Role,
    create_lease_directory,
    read_status,
)
from node.lease.lock import holder_of
from protocol.identity import network_id
from protocol.machines.lease import OVER_PHASES, LeasePhase
from protocol.records.job import Job, JobInput, Resources, job_hash
from protocol.records.offer import Terms

JOB_UID = 231_072
DEADLINE_S = 60
IDLE_MS = 2_000
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
PRICE = 1_000_000
"""Nano-credits per second: 1 ms of job time costs 1000."""
RESOURCES = Resources(cpus_milli=1000, memory_mib=256, disk_mib=64, pids=64)
TERMS = Terms(voucher_interval_ms=200, window_intervals=3, grace_ms=10_000, checkpoint_ms=10_000)


FORKER = """
import json, os, sys, node.keeper.__main__ as keeper
for line in sys.stdin:
    command = json.loads(line)
    if "wait" in command:
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(command["wait"], 0)[1])), flush=True)
        continue
    pid = os.fork()
    if pid:
        print(json.dumps(pid), flush=True)
        continue
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0), os.dup2(log, 1), os.dup2(log, 2)
    os.setsid()
    sys.argv = command["argv"]
    status = 1
    try:
        status = keeper.main()
    finally:
        os._exit(status)
"""


class Forker:
    """Starts keepers by forking a process that has imported everything."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT
        )
        self._lock = threading.Lock()

    def ask(self, command: dict[str, object]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
            return int(json.loads(self._process.stdout.readline()))

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Keeper:
    """One keeper process and its lease directory."""

    def __init__(self, directory: Path, socket: Path, forker: Forker) -> None:
        self.directory = directory
        self.socket = socket
        self.pid: int | None = None
        self._forker = forker

    def start(self) -> None:
        options = ["--idle-ms", str(IDLE_MS)]
        argv = ["keeper", str(self.directory), str(self.socket), *options]
        self.pid = self._forker.ask({"argv": argv, "log": str(self.directory / "keeper.log")})

    def kill(self) -> None:
        """End it as a crash would."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            self._forker.ask({"wait": self.pid})
            self.pid = None

    def signal(self, number: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    async def wait_exit(self) -> int:
        pid, self.pid = self.pid, None
        assert pid is not None
        return await trio.to_thread.run_sync(self._forker.ask, {"wait": pid})

    def is_alive(self) -> bool:
        return holder_of(self.directory) is not None

    def on_disk(self) -> LeaseStatus:
        status = read_status(self.directory)
        assert status is not None
        return status

    async def wait_listening(self) -> None:
        with trio.fail_after(DEADLINE_S):
            while True:
                try:
                    async with link.connect(self.socket):
                        return
                except link.LinkError:
                    await trio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def link(self) -> AsyncIterator[link.KeeperLink]:
        """Open the link as soon as the keeper listens."""
        await self.wait_listening()
        async with link.connect(self.socket) as opened:
            yield opened

    async def wait_for(self, condition: Callable[[LeaseStatus], bool]) -> LeaseStatus:
        """Follow the keeper's status until it satisfies `condition`."""
        last: LeaseStatus | None = None
        try:
            with trio.fail_after(DEADLINE_S):
                async with self.link() as keeper, contextlib.aclosing(keeper.subscribe()) as statuses:
                    async for status in statuses:
                        last = status
                        if condition(status):
                            return status
        except trio.TooSlowError:
            raise AssertionError(f"waited too long; last: {last}\n{self.log()}") from None
        raise AssertionError(f"the keeper went away; last: {last}\n{self.log()}")

    async def wait_phase(self, *phases: LeasePhase) -> LeaseStatus:
        return await self.wait_for(lambda status: status.phase in phases)

    async def settle(self) -> int:
        """Settle as the daemon does, and wait for the keeper's end."""
        async with self.link() as keeper:
            await keeper.settle()
        return await self.wait_exit()

    def output(self, name: str = "stdout") -> bytes:
        """Return the log that is kept, head and tail."""
        reader, data, offset = LogReader(self.directory / "log", name), b"", 0
        while (piece := reader.read(offset)).data:
            data += piece.data
            offset = piece.offset + len(piece.data)
        return data

    def log(self) -> str:
        return (self.directory / "keeper.log").read_text(errors="replace")


@functools.cache
def shared_forker() -> Forker:
    """Return the forker of this test run; it ends with it."""
    forker = Forker()
    atexit.register(forker.end)
    return forker


class Pair:
    """A lease between two keepers on loopback."""

    def __init__(self, root: Path, provider_file: LeaseFile, renter_file: LeaseFile, forker: Forker) -> None:
        self._keys = [LeaseKey.new() for _ in range(3)]
        provider_key, renter_key, voucher_key = self._keys
        self.lease = provider_file.lease
        assert renter_file.renter_side is not None
        self.job = renter_file.renter_side.job
        self.provider_key, self.provider_seed = provider_key.public_key, provider_key.reveal_seed()
        self.renter_key, self.renter_seed = renter_key.public_key, renter_key.reveal_seed()
        self._renter_file = msgspec.structs.replace(
            renter_file, peer_tunnel_key=provider_key.public_key, voucher_key=voucher_key.public_key
        )
        provider_file = msgspec.structs.replace(
            provider_file, peer_tunnel_key=renter_key.public_key, voucher_key=voucher_key.public_key
        )
        root.chmod(0o755)
        self.provider = Keeper(root / "provider", root / "p.sock", forker)
        self.renter = Keeper(root / "renter", root / "r.sock", forker)
        create_lease_directory(self.provider.directory, provider_file, LeaseKeys(provider_key.reveal_seed()))

    async def start(self) -> None:
        """Start the provider's keeper, then the renter's, as a grant does."""
        self.provider.start()
        status = await self.provider.wait_for(lambda status: status.port != 0)
        self.write_renter((f"127.0.0.1:{status.port}",))
        self.renter.start()

    def write_renter(self, addresses: tuple[str, ...], uid: int | None = None) -> None:
        side = self._renter_file.renter_side
        assert side is not None
        renter_file = msgspec.structs.replace(
            self._renter_file, renter_side=msgspec.structs.replace(side, addresses=addresses)
        )
        _provider_key, renter_key, voucher_key = self._keys
        keys = LeaseKeys(renter_key.reveal_seed(), voucher_key.reveal_seed())
        create_lease_directory(self.renter.directory, renter_file, keys, uid=uid, gid=uid)

    async def finish(self) -> tuple[LeaseStatus, LeaseStatus]:
        """Wait until both are over; return (provider's, renter's) status."""
        ends: list[LeaseStatus | None] = [None, None]

        async def wait(number: int, keeper: Keeper) -> None:
            ends[number] = await keeper.wait_phase(*OVER_PHASES)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, 0, self.provider)
            nursery.start_soon(wait, 1, self.renter)
        assert ends[0] is not None
        assert ends[1] is not None
        return ends[0], ends[1]

    def end(self) -> None:
        """End what still runs, and take the scratch down."""
        for keeper in (self.provider, self.renter):
            keeper.kill()
        subprocess.run(["umount", "-l", self.provider.directory / "scratch"], capture_output=True, check=False)


@contextlib.contextmanager
def pair(
    command: tuple[str, ...],
    *,
    inputs: dict[str, Path] | None = None,
    outputs: dict[str, Path] | None = None,
    isolation: str = "bubblewrap",
    terms: Terms = TERMS,
    resources: Resources = RESOURCES,
    time_limit_ms: int = 60_000,
    prepay_ms: int = 0,
    max_spend: int = 10**12,
    lease_ms: int = 600_000,
    workdir: str = "",
    forker: Forker | None = None,
) -> Iterator[Pair]:
    """Write the papers of a lease whose job is `command`; what still runs in the end is ended."""
    inputs, outputs = inputs or {}, outputs or {}
    manifests = {destination: scan_tree(source).manifest for destination, source in inputs.items()}
    job = Job(
        command=command,
        workdir=workdir,
        inputs=tuple(JobInput(where, tree.id, tree.size) for where, tree in manifests.items()),
        outputs=tuple(outputs),
        resources=resources,
        time_limit_ms=time_limit_ms,
    )
    common = LeaseFile(
        role=Role.PROVIDER,
        lease=secrets.token_bytes(16),
        network=network_id("test"),
        provider=bytes(32),
        renter=bytes(32),
        peer_tunnel_key=bytes(32),
        voucher_key=bytes(32),
        price=PRICE,
        quantity=1,
        max_spend=max_spend,
        until=SystemClock().now() + lease_ms,
        terms=terms,
        job_hash=job_hash(job),
        resources=resources,
        isolation=isolation,
        simulated=False,
        provider_side=ProviderSide(bind_host="127.0.0.1", job_uid=JOB_UID, allow_unsafe=True),
    )
    renter = msgspec.structs.replace(
        common,
        role=Role.RENTER,
        provider_side=None,
        renter_side=RenterSide(
            addresses=("127.0.0.1:1",),
            job=job,
            inputs=tuple(InputSource(str(path)) for path in inputs.values()),
            outputs=tuple(str(path) for path in outputs.values()),
            prepay_ms=prepay_ms,
        ),
    )
    # Not pytest's: a socket's path is short.
    with tempfile.TemporaryDirectory(prefix="gpk-", ignore_cleanup_errors=True) as root:
        keepers = Pair(Path(root), common, renter, forker or shared_forker())
        try:
            yield keepers
        finally:
            keepers.end()
