"""What a provider's keeper says on the streams that its renter opens.

Everything a renter sends is hostile until it has passed a parser. One that breaks the protocol loses its
connection; what else that means for the lease, the lease's machine decides. Of two connections the newer counts:
a renter whose address has changed must not wait until the old one times out.
"""

from collections import deque

import msgspec
import trio

from node.errors import DiskFull, NodeError, StagingError, TunnelError
from node.jobs.logs import LogReader
from node.jobs.reader import StreamCut
from node.jobs.transfer import TransferRefused
from node.keeper.job import JobRunner
from node.keeper.journal import Journal
from node.keeper.provider_files import ProviderFiles
from node.keeper.shell import serve_shell
from node.keeper.wire import FrameLink
from node.lease.files import LeaseFile
from node.log import get_logger
from node.ports import TunnelConnection, TunnelEndpoint
from protocol import frames
from protocol.errors import IllegalTransition, MalformedRecord, ProtocolError
from protocol.frames import (
    BulkOpened,
    ControlOpened,
    Direction,
    Hello,
    JobSubmitted,
    LogData,
    LogEnded,
    LogOpened,
    LogSource,
    ShellEnded,
    ShellOpened,
    StatusTold,
    VoucherSent,
    VoucherTaken,
)
from protocol.machines import provider_lease_types as machine
from protocol.machines.lease import AFTER_JOB_PHASES, JOB_PHASES, FailReason, LeasePhase
from protocol.machines.provider_lease_types import ProviderLease

STREAMS_MAX = 16
"""Most streams of one connection at a time."""
SHELLS_MAX = 4
ACKNOWLEDGEMENTS_MAX = 64
STATUS_INTERVAL_MAX_S = 10.0
"""A running job's meter is told at least this often."""
LOG_BYTES_EACH_S = 4 * 1024 * 1024
"""A running job's output travels no faster: what it writes beyond that is dropped between head and tail, instead
of the job (which is paid for by time) waiting for its own log."""
STAGING_NOTE_S = 1.0
"""The machine hears of staging progress this often."""

log = get_logger(__name__)


class ProviderTunnel:
    """The provider's side of the lease's tunnel."""

    journal: Journal[ProviderLease]
    """Set by the keeper before `serve`."""

    def __init__(self, lease_file: LeaseFile, files: ProviderFiles, runner: JobRunner) -> None:
        self._file = lease_file
        self._files = files
        self._runner = runner
        self._current: TunnelConnection | None = None
        self._acknowledgements: deque[VoucherTaken] = deque(maxlen=ACKNOWLEDGEMENTS_MAX)
        self._shells = 0
        self.staging_bytes: dict[int, int] = {}
        """Input -> bytes of it that are here, while it travels."""
        self.collecting_bytes: dict[int, int] = {}

    @property
    def peer_address(self) -> str:
        """The renter's address, "" without a tunnel."""
        return "" if self._current is None else self._current.peer_address

    def acknowledge(self, number: int, amount: int) -> None:
        """Tell the renter soon that its voucher is stored."""
        self._acknowledgements.append(VoucherTaken(number, amount))

    async def serve(self, endpoint: TunnelEndpoint) -> None:
        """Serve the renter's connections until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(self._serve_connection, await endpoint.accept())

    async def close(self, reason: str) -> None:
        """Close the present connection; the renter dials again."""
        if self._current is not None:
            await self._current.aclose(reason)

    async def _serve_connection(self, connection: TunnelConnection) -> None:
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    stream = await connection.accept_stream()
                    if len(nursery.child_tasks) >= STREAMS_MAX:
                        raise IllegalTransition(f"more than {STREAMS_MAX} streams")
                    nursery.start_soon(self._serve_stream, connection, stream)
        except* (TunnelError, IllegalTransition) as over:
            log.info("keeper.tunnel_over", reason=str(over.exceptions[0]))
        finally:
            with trio.CancelScope(shield=True):
                await connection.aclose()
                if self._current is connection:
                    self._current = None
                    await self.journal.feed(machine.TunnelLost())

    async def _serve_stream(self, connection: TunnelConnection, stream: trio.abc.HalfCloseableStream) -> None:
        try:
            async with stream:
                await self._serve_opened(connection, FrameLink(stream))
        except (StreamCut, TransferRefused, StagingError, DiskFull) as error:
            log.info("keeper.stream_over", reason=str(error))
        except (AssertionError, trio.Cancelled):
            raise
        except Exception as error:
            # Whatever a peer's bytes bring about here ends its connection, not the job.
            cause = _first(error)
            if not isinstance(cause, (ProtocolError, NodeError)):
                log.error("keeper.stream_failed", exc_info=error)
            if not isinstance(cause, StreamCut):
                log.warning("keeper.peer_fault", reason=str(cause))
                await self.journal.feed(machine.PeerBroke(f"the renter broke the protocol: {cause}"[:1000]))
            await connection.aclose(self._files.without_paths(str(cause))[:200])

    async def _serve_opened(self, connection: TunnelConnection, link: FrameLink) -> None:
        opened = await link.receive_as(ControlOpened, BulkOpened, LogOpened, ShellOpened)
        match opened:
            case ControlOpened():
                await self._serve_control(connection, link)
            case BulkOpened(Direction.INPUT, index):
                await self._serve_input(index, link)
            case BulkOpened(_, index):
                await self._serve_output(index, link)
            case LogOpened(stdout, stderr):
                await self._serve_log(link, {LogSource.STDOUT: stdout, LogSource.STDERR: stderr})
            case ShellOpened(argv):
                await self._serve_shell(argv, link)

    # --- control --------------------------------------------------------------------------------------------

    async def _serve_control(self, connection: TunnelConnection, link: FrameLink) -> None:
        hello = await link.receive_as(Hello)
        if hello.lease != self._file.lease or hello.version < frames.VERSION_MIN:
            raise MalformedRecord(f"hello of version {hello.version}, or of another lease")
        await self.journal.feed(machine.TunnelOpened(hello.generation))
        before, self._current = self._current, connection
        if before is not None and before is not connection:
            await before.aclose("replaced by a newer tunnel")
        await link.send(Hello(frames.VERSION, self._file.lease, self.journal.generation))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell, link)
            while (frame := await link.receive()) is not None:
                await self._take_untrusted(frame)
            nursery.cancel_scope.cancel()
        await connection.aclose("the renter closed its control stream")

    async def _take_untrusted(self, frame: frames.Frame) -> None:
        match frame:
            case JobSubmitted(data):
                job = await self._files.store_job_untrusted(data)
                await self.journal.feed(machine.JobArrived(len(job.inputs), job.time_limit_ms))
            case VoucherSent(data):
                await self.journal.feed(machine.VoucherReceived(data))
            case frames.CancelAsked(reason, detail):
                await self.journal.feed(machine.CancelAsked(FailReason(reason), detail))
            case frames.OutputsCollected(manifests):
                await self.journal.feed(machine.OutputsCollected(manifests))
            case frames.Goodbye():
                return
            case _:
                raise MalformedRecord(f"a frame {type(frame).__name__} does not belong on the control stream")

    async def _tell(self, link: FrameLink) -> None:
        """Tell every change of the lease as it is now, and the meter from time to time."""
        interval_s = min(self._file.terms.voucher_interval_ms / 1000, STATUS_INTERVAL_MAX_S)
        told: StatusTold | None = None
        told_at = 0.0
        while True:
            sequence = self.journal.sequence
            while self._acknowledgements:
                await link.send(self._acknowledgements.popleft())
            status = self._status()
            is_due = status.phase in JOB_PHASES and trio.current_time() >= told_at + interval_s
            if is_due or told is None or _without_meters(status) != _without_meters(told):
                await link.send(status)
                told, told_at = status, trio.current_time()
            with trio.move_on_after(interval_s):
                await self.journal.wait_beyond(sequence)

    def _status(self) -> StatusTold:
        state, now = self.journal.state, self.journal.clock.now()
        return StatusTold(
            phase=state.phase,
            outcome=state.outcome,
            detail=_note(self._files.without_paths(state.detail)),
            has_job=state.inputs is not None,
            staged=state.staged,
            started_at=state.started_at or 0,
            ended_at=state.ended_at or 0,
            metered_ms=state.metered_ms(now),
            frozen_ms=state.frozen_total_ms(state.ended_at or now),
            voucher_number=state.voucher_number,
            exit_status=state.exit_status,
            job_end=state.job_end,
            outputs=state.outputs,
            kept_until=state.kept_until or 0,
            usage=self._runner.usage,
        )

    # --- trees ----------------------------------------------------------------------------------------------

    async def _serve_input(self, index: int, link: FrameLink) -> None:
        state = self.journal.state
        if state.phase is not LeasePhase.STAGING or state.inputs is None or index >= state.inputs:
            raise IllegalTransition(f"input {index} while the lease is {state.phase}")
        if index in state.staged or index in self.staging_bytes:
            raise IllegalTransition(f"input {index} twice")
        try:
            await self._files.receive_input(index, link, lambda done, _total: self._note_staged(index, done))
        except DiskFull as error:
            problem = f"the inputs do not fit on the job's disk of {self._files.disk_mib} MiB: {error}"
            detail = _note(f"{problem}; ask for a larger one with --disk")
            await self.journal.feed(machine.InputFailed(FailReason.DISK_FULL, detail))
            raise
        except StagingError as error:
            await self.journal.feed(machine.InputFailed(FailReason.STAGING_FAILED, _note(str(error))))
            raise
        else:
            await self.journal.feed(machine.InputPlaced(index))
        finally:
            self.staging_bytes.pop(index, None)

    def _note_staged(self, index: int, done: int) -> None:
        self.staging_bytes[index] = done
        self.journal.note_progress()

    async def note_staging(self) -> None:
        """Tell the machine that inputs are moving, at a bounded rate, for ever."""
        seen: dict[int, int] = {}
        while True:
            await trio.sleep(STAGING_NOTE_S)
            if self.staging_bytes and self.staging_bytes != seen:
                seen = dict(self.staging_bytes)
                await self.journal.feed(machine.StagingMoved())

    async def _serve_output(self, index: int, link: FrameLink) -> None:
        state = self.journal.state
        if state.phase is not LeasePhase.COLLECTING or state.outputs is None or index >= len(state.outputs):
            raise IllegalTransition(f"output {index} while the lease is {state.phase}")
        try:
            await self._files.send_output(index, link, lambda done, _total: self._note_collected(index, done))
        finally:
            self.collecting_bytes.pop(index, None)

    def _note_collected(self, index: int, done: int) -> None:
        self.collecting_bytes[index] = done
        self.journal.note_progress()

    # --- shells ---------------------------------------------------------------------------------------------

    async def _serve_shell(self, argv: tuple[str, ...], link: FrameLink) -> None:
        job = self._runner.running
        if job is None or self.journal.state.phase is not LeasePhase.RUNNING:
            await link.send(ShellEnded(-1, f"the job does not run: the lease is {self.journal.state.phase}"))
        elif self._shells >= SHELLS_MAX:
            await link.send(ShellEnded(-1, f"{SHELLS_MAX} commands run in this job already"))
        else:
            self._shells += 1
            try:
                await serve_shell(job, argv, link)
            finally:
                self._shells -= 1

    # --- logs -----------------------------------------------------------------------------------------------

    async def _serve_log(self, link: FrameLink, offsets: dict[LogSource, int]) -> None:
        readers = {source: LogReader(self._runner.log_directory, source) for source in LogSource}
        while True:
            more = self._runner.output
            is_over = self._runner.is_output_over or self.journal.state.phase in AFTER_JOB_PHASES
            sizes: dict[LogSource, int] = {}
            has_sent = False
            for source, reader in readers.items():
                piece = await trio.to_thread.run_sync(reader.read, offsets[source], frames.LOG_DATA_MAX)
                sizes[source] = piece.size
                if piece.data:
                    await link.send(LogData(source, piece.offset, piece.data))
                    offsets[source] = piece.offset + len(piece.data)
                    has_sent = True
                    if not is_over:
                        await trio.sleep(len(piece.data) / LOG_BYTES_EACH_S)
            if has_sent:
                continue
            if is_over:
                await link.send(LogEnded(sizes[LogSource.STDOUT], sizes[LogSource.STDERR]))
                # Its reader closes the stream: a connection that is closed first would drop this.
                await link.receive()
                return
            await more.wait()


def _without_meters(status: StatusTold) -> StatusTold:
    return msgspec.structs.replace(status, metered_ms=0, frozen_ms=0, usage={})


def _note(text: str) -> str:
    """Return `text` as a record's note may be: printable and bounded."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)[:1000]


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
