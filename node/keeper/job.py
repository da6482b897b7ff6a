"""The job on its provider: from the start in its sandbox to its last byte of output.

Its output goes through pipes into bounded logs. Refuses to decide when the job starts, stands still or ends: the
lease's machine does, and this reports what has happened as the machine's events.
"""

import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio

from node.errors import NodeError
from node.jobs import logs
from node.jobs.draft import make_directory
from node.jobs.logs import LogWriter
from node.lease.files import LeaseFile, ProviderSide
from node.log import get_logger
from node.ports import JobEnd, RunningJob, Sandbox, SandboxLimits, SandboxSpec, Scratch
from node.sandbox import construct
from protocol.machines import provider_lease_types as machine
from protocol.machines.lease import FailReason
from protocol.records.job import Job

DRAIN_S = 2.0
"""How long after the job's end its pipes may stay open: something may have escaped with the other end."""
POLL_S = 2.0
"""How often use of processor, memory and disk is looked at."""
TMP_MIB_MAX = 1024
JOB_DIR = "/job"
"""Where a job sees its files."""

Report = Callable[[machine.Event], Awaitable[None]]

log = get_logger(__name__)


class JobRunner:
    """The lease's one job. Made once by a keeper; runs the job at most once."""

    def __init__(self, lease_file: LeaseFile, side: ProviderSide, log_directory: Path, report: Report) -> None:
        self._file = lease_file
        self._side = side
        self.log_directory = log_directory
        self._report = report
        self._job: RunningJob | None = None
        self._is_kill_wanted = False
        self.usage: dict[str, int] = {}
        self.scratch_used_mib = 0
        self.output = trio.Event()
        """Set, and replaced, whenever there is more output, and at its end."""
        self.is_output_over = False
        self.log_sizes = [0, 0]

    @property
    def name(self) -> str:
        """The name of the job's control group."""
        return f"gpunode-{self._file.lease.hex()[:24]}"

    @property
    def running(self) -> RunningJob | None:
        """The job while it runs."""
        return self._job

    def sandbox(self) -> Sandbox:
        """Return the tier that the lease names. Raises NodeError when this machine is not configured for it."""
        tiers = construct(
            environments={
                name: tuple(Path(path) for path in paths) for name, paths in self._side.environments.items()
            },
            allow_polled=self._side.allow_polled,
            allow_unsafe=self._side.allow_unsafe,
        )
        for tier in tiers:
            if tier.tier == self._file.isolation:
                return tier
        raise NodeError(f"this machine is not configured for the isolation tier {self._file.isolation!r}")

    async def sweep(self) -> None:
        """Kill and remove whatever an earlier keeper's job has left."""
        await self.sandbox().sweep(self.name)

    async def run(self, job: Job, scratch: Scratch) -> None:
        """Start the job, wait for its end and report both, or that it could not be started."""
        writers = [LogWriter(self.log_directory, source) for source in ("stdout", "stderr")]
        try:
            await self._run(job, scratch, writers)
        finally:
            for writer in writers:
                writer.close()

    async def _run(self, job: Job, scratch: Scratch, writers: list[LogWriter]) -> None:
        pipes = [logs.open_pipe(), logs.open_pipe()]
        async with trio.open_nursery() as pumps:
            for number, (read_end, _write_end) in enumerate(pipes):
                pumps.start_soon(self._pump, read_end, writers[number], number)
            try:
                started = await self._start(job, scratch, pipes[0][1], pipes[1][1])
            except NodeError as error:
                detail = f"{error} {error.hint}".strip()
                await self._report(machine.SandboxFailed(detail[:1000]))
                return
            finally:
                for _read_end, write_end in pipes:
                    os.close(write_end)
            end = await self._live(started, scratch)
            pumps.cancel_scope.deadline = trio.current_time() + DRAIN_S
        self._note_output_over()
        await self._report(machine.JobEnded(end.status, str(end.reason)))

    async def _start(self, job: Job, scratch: Scratch, stdout: int, stderr: int) -> RunningJob:
        sandbox = self.sandbox()
        await sandbox.sweep(self.name)
        make = partial(make_directory, scratch.path, job.workdir, owner=self._side.job_uid, seen_as=JOB_DIR)
        await trio.to_thread.run_sync(make)
        return await sandbox.start(self._spec(job, scratch, stdout, stderr))

    async def _live(self, started: RunningJob, scratch: Scratch) -> JobEnd:
        async with trio.open_nursery() as nursery:
            self._job = started
            nursery.start_soon(self._watch, started, scratch)
            if self._is_kill_wanted:
                nursery.start_soon(started.kill)
            await self._report(machine.JobStarted())
            end = await started.wait()
            self._job = None
            nursery.cancel_scope.cancel()
        self.usage = started.usage()
        return end

    async def _watch(self, started: RunningJob, scratch: Scratch) -> None:
        limit_mib = self._file.resources.disk_mib
        while True:
            self.usage = started.usage()
            self.scratch_used_mib = await trio.to_thread.run_sync(scratch.used_mib)
            if limit_mib and self.scratch_used_mib > limit_mib:
                detail = f"the job's files take {self.scratch_used_mib} MiB, and {limit_mib} were agreed on"
                await self._report(machine.CancelAsked(FailReason.DISK_FULL, detail))
            await trio.sleep(POLL_S)

    async def _pump(self, read_end: int, writer: LogWriter, number: int) -> None:
        def on_data() -> None:
            self.log_sizes[number] = writer.size
            self._wake_readers()

        await logs.pump(read_end, writer, on_data)

    def _note_output_over(self) -> None:
        self.is_output_over = True
        self._wake_readers()

    def _wake_readers(self) -> None:
        self.output.set()
        self.output = trio.Event()

    def terminate(self) -> None:
        """Send SIGTERM to the job's processes."""
        if self._job is not None:
            self._job.signal(signal.SIGTERM)

    def kill_soon(self, nursery: trio.Nursery) -> None:
        """Kill the job; one that is just being started, as soon as it has been."""
        self._is_kill_wanted = True
        if self._job is not None:
            nursery.start_soon(self._job.kill)

    def freeze(self) -> None:
        """Stop the job's processes where they are."""
        if self._job is not None:
            self._job.freeze()

    def thaw(self) -> None:
        """Let them go on."""
        if self._job is not None:
            self._job.thaw()

    def _spec(self, job: Job, scratch: Scratch, stdout: int, stderr: int) -> SandboxSpec:
        resources = self._file.resources
        devices = self._side.devices
        return SandboxSpec(
            name=self.name,
            argv=job.command,
            variables=dict(job.variables),
            root=scratch.path,
            workdir=f"{JOB_DIR}/{job.workdir}".rstrip("/"),
            uid=self._side.job_uid,
            limits=SandboxLimits(
                cpus_milli=resources.cpus_milli,
                memory_mib=resources.memory_mib,
                pids=resources.pids,
                shm_mib=resources.shm_mib or max(1, resources.memory_mib // 2),
                tmp_mib=max(1, min(TMP_MIB_MAX, resources.memory_mib // 4)),
            ),
            environment=job.environment,
            device_nodes=tuple(dict.fromkeys(node for device in devices for node in device.nodes)),
            read_only_mounts=tuple(dict.fromkeys(mount for device in devices for mount in device.mounts)),
            visible_devices=tuple(device.uuid for device in devices),
            stdout=stdout,
            stderr=stderr,
        )
