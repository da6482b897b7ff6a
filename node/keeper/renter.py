"""A renter's keeper: it sends the job and its inputs, pays by vouchers, and brings logs and outputs home.

It owns the lease's journal and carries out what the machine decides. Its own death ends nothing: the next one
dials again and goes on. Refuses to sign anything that is not yet durable, and to leave before the daemon has
settled the lease.
"""

import socket
from pathlib import Path
from typing import Literal

import msgspec
import trio

from node.errors import NodeError, TunnelError
from node.keeper.journal import Journal, read_saved
from node.keeper.lease_clock import LeaseClock
from node.keeper.renter_files import RenterFiles
from node.keeper.renter_tunnel import RenterTunnel
from node.keeper.start import LAST_WORDS_S, facts_of, link_hello
from node.keys import LeaseKey
from node.lease import service
from node.lease.files import (
    LeaseFile,
    LeaseKeys,
    LeaseStatus,
    OutputStatus,
    RenterSide,
    Role,
    delete_keys,
    read_status,
)
from node.lease.link import FrameStream
from node.log import get_logger
from node.ports import Clock, EndReason
from node.tunnel import TunnelLimits, open_endpoint
from protocol.envelope import seal
from protocol.errors import IllegalTransition
from protocol.frames import CancelAsked, LogSource, OutputsCollected, StatusTold, VoucherSent
from protocol.identity import NetworkId
from protocol.machines import renter_lease
from protocol.machines import renter_lease_types as machine
from protocol.machines.lease import OVER_PHASES, FailReason, LeasePhase
from protocol.machines.renter_lease_types import RenterLease
from protocol.records.money import Voucher

log = get_logger(__name__)

TELLABLE: dict[str, Literal["staging_failed", "disk_full", "meters_diverged"]] = {
    "staging_failed": "staging_failed",
    "disk_full": "disk_full",
    "meters_diverged": "meters_diverged",
}
"""Reasons that a provider is told; any other is none of its business."""


class RenterKeeper:
    """One lease on its renter. Its journal's owner, and its link's service."""

    def __init__(
        self, directory: Path, lease_file: LeaseFile, side: RenterSide, keys: LeaseKeys, generation: int
    ) -> None:
        if keys.voucher is None:
            raise NodeError("the lease's keys lack the one that signs vouchers")
        self._directory = directory
        self._file = lease_file
        self._side = side
        self._keys = keys
        self._voucher_key = LeaseKey(keys.voucher)
        self._generation = generation
        self._files = RenterFiles(directory, lease_file.lease, side)
        self._tunnel = RenterTunnel(lease_file, side, self._files, generation)
        self._leaving = trio.Event()
        self._journal: Journal[RenterLease]

    async def run(self, listener: socket.socket, clock: Clock, limits: TunnelLimits) -> None:
        """Look after the lease until it is settled. Raises NodeError when it can't be begun."""
        before = await trio.to_thread.run_sync(read_status, self._directory)
        anchor, state = read_saved(before, RenterLease)
        lease_clock = LeaseClock(clock, anchor)
        self._journal = Journal(
            self._directory, self, state or self._fresh(lease_clock.now()), lease_clock, self._generation
        )
        self._tunnel.journal = self._journal
        if state is None:
            await self._journal.write()
        else:
            await self._journal.feed(machine.KeeperRestarted())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(service.serve, listener, link_hello(self._file, self._generation), self)
                nursery.start_soon(self._journal.follow_time, self._on_suspend)
                nursery.start_soon(self._journal.tell_progress)
                nursery.start_soon(self._read_inputs)
                nursery.start_soon(self._keep_tunnel, limits)
                await self._leaving.wait()
                await trio.sleep(LAST_WORDS_S)
                nursery.cancel_scope.cancel()
        finally:
            self._files.close()

    def _fresh(self, now: int) -> RenterLease:
        return RenterLease(
            facts=facts_of(self._file),
            inputs=len(self._side.job.inputs),
            prepay_ms=self._side.prepay_ms,
            time_limit_ms=self._side.job.time_limit_ms,
            began_at=now,
            lost_at=now,
            idle_at=now,
        )

    async def _keep_tunnel(self, limits: TunnelLimits) -> None:
        # "::" speaks IPv4 too, where the machine has IPv6 at all.
        for bind in ("::", "0.0.0.0"):  # noqa: S104 - it dials, and admits nobody
            try:
                async with open_endpoint(self._keys.tunnel, bind=bind, limits=limits) as endpoint:
                    await self._tunnel.keep(endpoint)
            except TunnelError as error:
                log.info("keeper.not_bound", bind=bind, reason=str(error))
        raise NodeError("no UDP socket could be opened")

    async def _read_inputs(self) -> None:
        """Read the inputs while the tunnel is being opened."""
        if self._journal.state.phase not in (LeasePhase.SIGNED, LeasePhase.CONNECTED, LeasePhase.STAGING):
            return
        try:
            await self._files.prepare_inputs()
        except NodeError as error:
            await self._journal.feed(machine.InputFailed(FailReason.STAGING_FAILED, str(error)[:1000]))

    async def _on_suspend(self, _length_ms: int) -> None:
        await self._tunnel.close("the renter's machine was suspended")

    # --- the journal's owner --------------------------------------------------------------------------------

    def step(self, state: RenterLease, event: machine.Event, now: int) -> machine.Step:
        """Step the renter's machine."""
        return renter_lease.step(state, event, now)

    def next_deadline(self, state: RenterLease) -> int | None:
        """Return the machine's next deadline."""
        return renter_lease.next_deadline(state)

    def tick(self) -> machine.Event:
        """Return the event that tells the time."""
        return machine.Ticked()

    def essence(self, state: RenterLease) -> RenterLease:
        """Return `state` without what the provider will tell again."""
        told = state.told
        if told is not None:
            told = msgspec.structs.replace(told, metered_ms=0, frozen_ms=0, usage={})
        return msgspec.structs.replace(
            state, told=told, told_at=0, idle_at=0, lost_at=0, is_connected=False, is_told=False
        )

    def describe(self, state: RenterLease, now: int) -> LeaseStatus:
        """Return the lease's status."""
        told = state.told
        outputs = () if told is None else told.outputs or ()
        inputs = self._side.job.inputs
        staged = () if told is None else told.staged
        return LeaseStatus(
            lease=self._file.lease,
            role=Role.RENTER,
            generation=self._generation,
            sequence=0,
            phase=state.phase,
            outcome=state.outcome,
            detail=_wait_in_words(state) or state.detail or _end_in_words(told) or self._absence(state),
            connected=state.is_connected,
            peer_address=self._tunnel.peer_address,
            started_at=0 if told is None else told.started_at,
            ended_at=0 if told is None else told.ended_at,
            metered_ms=state.metered_ms(now),
            frozen_ms=0 if told is None else told.frozen_ms,
            amount=state.owed(),
            voucher=state.voucher,
            voucher_number=state.voucher_number,
            voucher_amount=state.voucher_amount,
            exit_status=-1 if told is None else told.exit_status,
            job_end="" if told is None else told.job_end,
            outputs=tuple(
                OutputStatus(o.path, o.manifest, o.size, fetched=index in state.fetched)
                for index, o in enumerate(outputs)
            ),
            collected=state.phase is LeasePhase.COLLECTED,
            staged_bytes=sum(inputs[index].size for index in staged if index < len(inputs))
            + sum(self._tunnel.staging_bytes.values()),
            staging_bytes=sum(item.size for item in inputs),
            collected_bytes=sum(outputs[index].size for index in state.fetched)
            + sum(self._tunnel.collecting_bytes.values()),
            collecting_bytes=sum(output.size for output in outputs),
            stdout_size=self._files.logs[LogSource.STDOUT].size,
            stderr_size=self._files.logs[LogSource.STDERR].size,
            kept_until=0 if told is None else told.kept_until,
            usage={} if told is None else dict(told.usage),
        )

    def _absence(self, state: RenterLease) -> str:
        return "" if state.is_connected or state.phase in OVER_PHASES else self._tunnel.problem

    async def carry_out(self, effect: machine.Effect) -> machine.Event | None:
        """Carry out what the machine wants, or start to."""
        match effect:
            case machine.SendJob():
                self._tunnel.post_job()
            case machine.SignVoucher(number, amount, covers_ms):
                return self._signed(number, amount, covers_ms)
            case machine.SendVoucher(data):
                self._tunnel.post(VoucherSent(data))
            case machine.SendCancel(reason, detail):
                self._tunnel.post(CancelAsked(TELLABLE.get(reason, "cancelled"), detail))
            case machine.SendCollected(manifests):
                self._tunnel.post(OutputsCollected(manifests))
            case machine.DeleteKeys():
                await trio.to_thread.run_sync(delete_keys, self._directory)
                await trio.to_thread.run_sync(self._files.discard_drafts)
            case machine.Leave():
                self._leaving.set()
        return None

    def _signed(self, number: int, amount: int, covers_ms: int) -> machine.VoucherSigned:
        voucher = Voucher(lease=self._file.lease, number=number, amount=amount, covers_ms=covers_ms)
        sealed = seal(voucher, self._voucher_key, NetworkId(self._file.network))
        return machine.VoucherSigned(sealed.data, number, amount, covers_ms)

    # --- the link's service ---------------------------------------------------------------------------------

    def status(self) -> LeaseStatus:
        """Return the lease's status now."""
        return self._journal.status()

    async def changed(self, sequence: int) -> LeaseStatus:
        """Wait until the status has changed."""
        return await self._journal.changed(sequence)

    async def cancel(self, reason: FailReason, detail: str, notice_ms: int | None) -> None:
        """End the job; the provider's terms say how much notice it gets."""
        log.info("keeper.cancel", reason=str(reason), notice_ms=notice_ms)
        await self._journal.feed(machine.CancelAsked(reason, detail))

    async def collect(self) -> None:
        """Try at once what waits: an output that could not be stored, a tunnel that could not be opened."""
        self._tunnel.hurry()
        await trio.lowlevel.checkpoint()

    async def conclude(self, reason: FailReason, detail: str) -> None:
        """Take note that the provider has signed for the lease's end."""
        log.info("keeper.provider_done", reason=str(reason))
        await self._journal.feed(machine.ProviderDone(reason, detail))

    async def settle(self) -> None:
        """Close the lease. Raises NodeError when it is not over."""
        try:
            await self._journal.feed(machine.SettleAsked())
        except IllegalTransition as error:
            raise NodeError(str(error)) from None

    async def execute(self, argv: tuple[str, ...], daemon: FrameStream) -> None:
        """Run another command in the job's sandbox."""
        await self._tunnel.execute(argv, daemon)


def _wait_in_words(state: RenterLease) -> str:
    return f"{state.waits}; it is tried again, or at once with: gpunode fetch" if state.waits else ""


def _end_in_words(told: StatusTold | None) -> str:
    """Return what the job's owner can do about how it ended, "" when that is the job's own business."""
    if told is not None and told.job_end == EndReason.OUT_OF_MEMORY:
        return "the job ran out of memory and was killed: ask for more with --memory"
    return ""
