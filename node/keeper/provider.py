"""A provider's keeper: it binds the lease's port, runs the job for its renter, and keeps the results for it.

It owns the lease's journal and carries out what the machine decides. Refuses to act on anything that is not yet
durable, and to leave before the daemon has settled the lease.
"""

import socket
from pathlib import Path

import msgspec
import trio

from node.errors import NodeError
from node.jobs.logs import LogReader
from node.keeper.job import JobRunner
from node.keeper.journal import Journal, read_saved
from node.keeper.lease_clock import LeaseClock
from node.keeper.provider_files import ProviderFiles
from node.keeper.provider_tunnel import ProviderTunnel
from node.keeper.start import LAST_WORDS_S, facts_of, link_hello, reap_orphans
from node.lease import service
from node.lease.execution import ExecutionEnded
from node.lease.files import (
    LeaseFile,
    LeaseKeys,
    LeaseStatus,
    OutputStatus,
    ProviderSide,
    Role,
    delete_keys,
    read_status,
)
from node.lease.link import FrameStream
from node.log import get_logger
from node.ports import Clock
from node.tunnel import TunnelLimits, open_endpoint
from protocol.errors import IllegalTransition
from protocol.machines import provider_lease
from protocol.machines import provider_lease_types as machine
from protocol.machines.lease import OVER_PHASES, FailReason, LeasePhase
from protocol.machines.provider_lease_types import ProviderLease

ERASE_WAIT_S = 5.0
"""How long settling waits for the scratch to be gone."""

log = get_logger(__name__)


class ProviderKeeper:
    """One lease on its provider. Its journal's owner, and its link's service."""

    def __init__(
        self, directory: Path, lease_file: LeaseFile, side: ProviderSide, keys: LeaseKeys, generation: int
    ) -> None:
        self._directory = directory
        self._file = lease_file
        self._side = side
        self._keys = keys
        self._generation = generation
        self._runner = JobRunner(lease_file, side, directory / "log", self._report)
        self._files = ProviderFiles(directory, lease_file, side)
        self._port = 0
        self._is_erasing = False
        self._erased = trio.Event()
        self._leaving = trio.Event()
        self._nursery: trio.Nursery
        self._journal: Journal[ProviderLease]
        self._tunnel: ProviderTunnel

    async def run(self, listener: socket.socket, clock: Clock, limits: TunnelLimits) -> None:
        """Look after the lease until it is settled. Raises NodeError when it can't be begun."""
        before = await trio.to_thread.run_sync(read_status, self._directory)
        anchor, state = read_saved(before, ProviderLease)
        lease_clock = LeaseClock(clock, anchor)
        fresh = ProviderLease(facts=facts_of(self._file), began_at=lease_clock.now(), heard_at=lease_clock.now())
        self._tunnel = ProviderTunnel(self._file, self._files, self._runner)
        self._journal = Journal(self._directory, self, state or fresh, lease_clock, self._generation)
        self._tunnel.journal = self._journal
        self._port = 0 if before is None else before.port
        port_range = (self._side.port_min, self._side.port_max) if self._side.port_min else None
        async with open_endpoint(
            self._keys.tunnel,
            bind=self._side.bind_host,
            # A later keeper listens where the first one did: that is where the grant sends the renter.
            port=self._port,
            port_range=None if self._port else port_range,
            admit=frozenset({self._file.peer_tunnel_key}),
            limits=limits,
        ) as endpoint:
            self._port = endpoint.port
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                await self._take_up(is_fresh=state is None)
                nursery.start_soon(service.serve, listener, link_hello(self._file, self._generation), self)
                nursery.start_soon(self._journal.follow_time, self._on_suspend)
                nursery.start_soon(self._journal.tell_progress)
                nursery.start_soon(self._tunnel.note_staging)
                nursery.start_soon(reap_orphans)
                nursery.start_soon(self._tunnel.serve, endpoint)
                await self._leaving.wait()
                await self._erased.wait()
                await trio.sleep(LAST_WORDS_S)
                nursery.cancel_scope.cancel()

    async def _take_up(self, *, is_fresh: bool) -> None:
        """Go on where the keeper before was, or begin."""
        if not is_fresh:
            await self._files.load_job()
            for number, source in enumerate(("stdout", "stderr")):
                reader = LogReader(self._runner.log_directory, source)
                self._runner.log_sizes[number] = await trio.to_thread.run_sync(reader.size)
            if self._journal.state.phase not in OVER_PHASES:
                await self._runner.sweep()
        if self._journal.state.phase not in OVER_PHASES:
            self._nursery.start_soon(self._files.open_scratch)
        if is_fresh:
            await self._journal.write()
        else:
            await self._journal.feed(machine.KeeperRestarted())

    async def _on_suspend(self, length_ms: int) -> None:
        await self._journal.feed(machine.SuspendSeen(length_ms))
        await self._tunnel.close("the provider's machine was suspended")

    async def _report(self, event: machine.Event) -> None:
        await self._journal.feed(event)

    async def shut_down(self) -> None:
        """End the job because this machine goes down."""
        await self._journal.feed(machine.CancelAsked(FailReason.SHUTDOWN, "the provider's machine shuts down"))

    # --- the journal's owner --------------------------------------------------------------------------------

    def step(self, state: ProviderLease, event: machine.Event, now: int) -> machine.Step:
        """Step the provider's machine."""
        return provider_lease.step(state, event, now)

    def next_deadline(self, state: ProviderLease) -> int | None:
        """Return the machine's next deadline."""
        return provider_lease.next_deadline(state)

    def tick(self) -> machine.Event:
        """Return the event that tells the time."""
        return machine.Ticked()

    def essence(self, state: ProviderLease) -> ProviderLease:
        """Return `state` without what may be lost with this keeper."""
        return msgspec.structs.replace(state, heard_at=0, is_connected=False)

    def describe(self, state: ProviderLease, now: int) -> LeaseStatus:
        """Return the lease's status."""
        job = self._files.job
        staged = sum(job.inputs[index].size for index in state.staged) if job else 0
        outputs = state.outputs or ()
        is_collected = state.phase is LeasePhase.COLLECTED
        return LeaseStatus(
            lease=self._file.lease,
            role=Role.PROVIDER,
            generation=self._generation,
            sequence=0,
            phase=state.phase,
            outcome=state.outcome,
            detail=state.detail,
            port=self._port,
            connected=state.is_connected,
            peer_address=self._tunnel.peer_address,
            started_at=state.started_at or 0,
            ended_at=state.ended_at or 0,
            metered_ms=state.metered_ms(now),
            frozen_ms=state.frozen_total_ms(state.ended_at or now),
            amount=state.owed(now),
            voucher=state.voucher,
            voucher_number=state.voucher_number,
            voucher_amount=state.voucher_amount,
            exit_status=state.exit_status,
            job_end=state.job_end,
            outputs=tuple(OutputStatus(o.path, o.manifest, o.size, fetched=is_collected) for o in outputs),
            collected=is_collected,
            staged_bytes=staged + sum(self._tunnel.staging_bytes.values()),
            staging_bytes=sum(item.size for item in job.inputs) if job else 0,
            collected_bytes=sum(self._tunnel.collecting_bytes.values()),
            collecting_bytes=sum(output.size for output in outputs),
            stdout_size=self._runner.log_sizes[0],
            stderr_size=self._runner.log_sizes[1],
            kept_until=state.kept_until or 0,
            usage=self._runner.usage,
            scratch_used_mib=self._runner.scratch_used_mib,
        )

    async def carry_out(self, effect: machine.Effect) -> None:
        """Carry out what the machine wants, or start to."""
        match effect:
            case machine.StartJob():
                self._nursery.start_soon(self._run_job)
            case machine.TerminateJob():
                self._runner.terminate()
            case machine.KillJob():
                self._runner.kill_soon(self._nursery)
            case machine.FreezeJob():
                self._runner.freeze()
            case machine.ThawJob():
                self._runner.thaw()
            case machine.ListOutputs():
                self._nursery.start_soon(self._list_outputs)
            case machine.AcknowledgeVoucher(number, amount):
                self._tunnel.acknowledge(number, amount)
            case machine.EraseScratch():
                self._erase_soon()
            case machine.DeleteKeys():
                await trio.to_thread.run_sync(delete_keys, self._directory)
            case machine.Leave():
                self._leaving.set()

    async def _run_job(self) -> None:
        job = self._files.job
        if job is None:
            raise AssertionError("a job is started after it came")
        try:
            scratch = await self._files.scratch()
        except NodeError as error:
            await self._journal.feed(machine.SandboxFailed(str(error)[:1000]))
            return
        await self._runner.run(job, scratch)

    async def _list_outputs(self) -> None:
        outputs, detail = await self._files.list_outputs()
        await self._journal.feed(machine.OutputsListed(outputs, detail))

    def _erase_soon(self) -> None:
        if not self._is_erasing:
            self._is_erasing = True
            self._nursery.start_soon(self._erase)

    async def _erase(self) -> None:
        await self._files.erase()
        self._erased.set()

    # --- the link's service ---------------------------------------------------------------------------------

    def status(self) -> LeaseStatus:
        """Return the lease's status now."""
        return self._journal.status()

    async def changed(self, sequence: int) -> LeaseStatus:
        """Wait until the status has changed."""
        return await self._journal.changed(sequence)

    async def cancel(self, reason: FailReason, detail: str, notice_ms: int | None) -> None:
        """End the job."""
        await self._journal.feed(machine.CancelAsked(reason, detail, notice_ms))

    async def collect(self) -> None:
        """Refuse: results are the renter's to collect."""
        raise NodeError("a provider's keeper collects nothing")

    async def conclude(self, reason: FailReason, detail: str) -> None:
        """Refuse: a provider's lease ends when its job and its results do, whatever the renter signs."""
        raise NodeError(f"a provider's keeper is not concluded ({reason} {detail})".strip())

    async def settle(self) -> None:
        """Close the lease. Raises NodeError when it is not over."""
        if self._journal.state.phase in OVER_PHASES:
            # So that a settled lease has, as a rule, nothing mounted any more: its directory may be deleted.
            with trio.move_on_after(ERASE_WAIT_S):
                await self._erased.wait()
        try:
            await self._journal.feed(machine.SettleAsked())
        except IllegalTransition as error:
            raise NodeError(str(error)) from None

    async def execute(self, argv: tuple[str, ...], daemon: FrameStream) -> None:
        """Refuse: the job is its renter's alone."""
        log.warning("keeper.execute_refused", program=argv[:1])
        await daemon.send(ExecutionEnded(-1, "only the job's renter can run commands in it"))
