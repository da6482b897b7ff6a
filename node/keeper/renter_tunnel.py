"""What a renter's keeper says and hears over the tunnel, and how it keeps one.

It dials for as long as the lease lives; on every new tunnel it says again what may not have arrived, and lets
transfers and logs go on where they were. What the provider sends is hostile until it has passed a parser. Refuses
to judge what the provider tells: the lease's machine does.
"""

from collections import deque

import trio

from node.errors import DiskFull, StagingError, TunnelError
from node.jobs.reader import StreamCut
from node.jobs.transfer import TransferRefused
from node.keeper.journal import Journal
from node.keeper.renter_files import RenterFiles
from node.keeper.shell import relay_shell
from node.keeper.wire import FrameLink
from node.lease.execution import ExecutionEnded
from node.lease.files import LeaseFile, RenterSide
from node.lease.link import FrameStream
from node.log import get_logger
from node.ports import TunnelConnection, TunnelEndpoint
from protocol import codec, frames
from protocol.errors import IllegalTransition, MalformedRecord, ProtocolError
from protocol.frames import (
    BulkOpened,
    ControlOpened,
    Direction,
    Frame,
    Goodbye,
    Hello,
    JobSubmitted,
    LogData,
    LogEnded,
    LogOpened,
    LogSource,
    StatusTold,
    VoucherTaken,
)
from protocol.machines import renter_lease_types as machine
from protocol.machines.lease import OVER_PHASES, FailReason
from protocol.machines.renter_lease import wanted_input, wanted_output
from protocol.machines.renter_lease_types import RenterLease

DIAL_TIMEOUT_MS = 5_000
DIAL_PAUSE_MIN_S = 0.1
DIAL_PAUSE_MAX_S = 15.0
FETCH_PAUSE_S = 10.0
"""Before an output that could not be stored is fetched again: its user may make room."""
OUTBOX_MAX = 64

log = get_logger(__name__)


class RenterTunnel:
    """The renter's side of the lease's tunnel."""

    journal: Journal[RenterLease]
    """Set by the keeper before `keep`."""

    def __init__(self, lease_file: LeaseFile, side: RenterSide, files: RenterFiles, generation: int) -> None:
        self._file = lease_file
        self._side = side
        self._files = files
        self._generation = generation
        self._connection: TunnelConnection | None = None
        self._outbox: deque[Frame] = deque(maxlen=OUTBOX_MAX)
        self._mail = trio.Event()
        self._hurry = trio.Event()
        self.problem = ""
        """Why there is no tunnel, for people."""
        self.staging_bytes: dict[int, int] = {}
        self.collecting_bytes: dict[int, int] = {}

    @property
    def peer_address(self) -> str:
        """The provider's address, "" without a tunnel."""
        return "" if self._connection is None else self._connection.peer_address

    def post(self, frame: Frame) -> None:
        """Send `frame` on the control stream, if there is one: the machine says it again on the next."""
        self._outbox.append(frame)
        self._mail.set()

    def post_job(self) -> None:
        """Send the job."""
        self.post(JobSubmitted(codec.encode(self._side.job)))

    async def keep(self, endpoint: TunnelEndpoint) -> None:
        """Keep a tunnel to the provider until the lease is over and cancelled."""
        pause_s = DIAL_PAUSE_MIN_S
        while True:
            if self.journal.state.phase in OVER_PHASES:
                await self.journal.wait_for(lambda state: state.phase not in OVER_PHASES)
            connection = await self._dial(endpoint)
            if connection is not None and await self._use(connection):
                pause_s = DIAL_PAUSE_MIN_S
            await self._pause(pause_s)
            pause_s = min(DIAL_PAUSE_MAX_S, pause_s * 2)

    def hurry(self) -> None:
        """Try again now what waits to be tried again."""
        self._hurry.set()
        self._hurry = trio.Event()

    async def _pause(self, length_s: float) -> None:
        with trio.move_on_after(length_s):
            await self._hurry.wait()

    async def close(self, reason: str) -> None:
        """Close the present tunnel; `keep` dials again."""
        if self._connection is not None:
            await self._connection.aclose(reason)

    async def execute(self, argv: tuple[str, ...], daemon: FrameStream) -> None:
        """Run another command in the job's sandbox, and speak of it over `daemon` until it is over."""
        if self._connection is None:
            await daemon.send(ExecutionEnded(-1, f"there is no tunnel now: {self.problem}"))
        else:
            await relay_shell(self._connection, argv, daemon)

    async def _dial(self, endpoint: TunnelEndpoint) -> TunnelConnection | None:
        for address in self._side.addresses:
            host, _, port = address.rpartition(":")
            try:
                return await endpoint.connect(
                    host.strip("[]"), int(port), self._file.peer_tunnel_key, timeout_ms=DIAL_TIMEOUT_MS
                )
            except (TunnelError, ValueError) as error:
                self.problem = f"no tunnel to {address}: {error}"
                log.info("keeper.dial_failed", address=address, reason=str(error))
        self.journal.note_progress()
        return None

    async def _use(self, connection: TunnelConnection) -> bool:
        """Do what is to be done over one tunnel until it ends; return whether the provider said hello."""
        reason = ""
        try:
            await self._converse(connection)
        except (AssertionError, trio.Cancelled):
            raise
        except Exception as error:
            cause = _first(error)
            reason = str(cause)
            if isinstance(cause, ProtocolError):
                log.warning("keeper.peer_fault", reason=reason)
                await self.journal.feed(machine.PeerBroke(f"the provider broke the protocol: {cause}"[:1000]))
            elif not isinstance(cause, (StreamCut, TunnelError)):
                log.error("keeper.tunnel_failed", exc_info=error)
        finally:
            with trio.CancelScope(shield=True):
                await connection.aclose(reason[:200])
                was_open, self._connection = self._connection is not None, None
                if was_open:
                    await self.journal.feed(machine.TunnelLost())
        return was_open

    async def _converse(self, connection: TunnelConnection) -> None:
        link = FrameLink(await connection.open_stream())
        await link.send(ControlOpened())
        await link.send(Hello(frames.VERSION, self._file.lease, self._generation))
        hello = await link.receive_as(Hello)
        if hello.lease != self._file.lease or hello.version < frames.VERSION_MIN:
            raise MalformedRecord(f"hello of version {hello.version}, or of another lease")
        self._outbox.clear()
        self._connection, self.problem = connection, ""
        await self.journal.feed(machine.TunnelOpened(hello.generation))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_mail, link)
            nursery.start_soon(self._follow_logs, connection)
            nursery.start_soon(self._transfer, connection)
            while (frame := await link.receive()) is not None:
                await self._take_untrusted(frame)
            nursery.cancel_scope.cancel()

    async def _send_mail(self, link: FrameLink) -> None:
        while True:
            while self._outbox:
                await link.send(self._outbox.popleft())
            self._mail = trio.Event()
            await self._mail.wait()

    async def _take_untrusted(self, frame: Frame) -> None:
        match frame:
            case StatusTold():
                if len(frame.outputs or ()) > len(self._side.outputs):
                    raise IllegalTransition("the provider tells of outputs that the job does not have")
                await self.journal.feed(machine.ToldStatus(frame))
            case VoucherTaken() | Goodbye():
                log.debug("keeper.told", frame=type(frame).__name__)
            case _:
                raise MalformedRecord(f"a frame {type(frame).__name__} does not belong on the control stream")

    # --- trees ----------------------------------------------------------------------------------------------

    async def _transfer(self, connection: TunnelConnection) -> None:
        """Send inputs and fetch outputs, one at a time, as the state wants them."""
        sent: set[int] = set()
        while True:
            sequence = self.journal.sequence
            state = self.journal.state
            index = wanted_input(state)
            if index is not None and index not in sent:
                await self._send_input(connection, index)
                sent.add(index)
                continue
            index = wanted_output(state)
            if index is not None:
                await self._fetch_output(connection, index)
                continue
            await self.journal.wait_beyond(sequence)

    async def _send_input(self, connection: TunnelConnection, index: int) -> None:
        def note(done: int, _total: int) -> None:
            self.staging_bytes[index] = done
            self.journal.note_progress()

        try:
            async with await connection.open_stream() as stream:
                link = FrameLink(stream)
                await link.send(BulkOpened(Direction.INPUT, index))
                await self._files.send_input(index, link, note)
        except DiskFull as error:
            detail = f"the inputs do not fit on the job's disk: {error}; ask for a larger one with --disk"
            await self.journal.feed(machine.InputFailed(FailReason.DISK_FULL, detail[:1000]))
        except (StagingError, TransferRefused) as error:
            await self.journal.feed(machine.InputFailed(FailReason.STAGING_FAILED, str(error)[:1000]))
        finally:
            self.staging_bytes.pop(index, None)

    async def _fetch_output(self, connection: TunnelConnection, index: int) -> None:
        told = self.journal.state.told
        if told is None or told.outputs is None:
            raise AssertionError("outputs are fetched after they were told of")
        output = told.outputs[index]

        def note(done: int, _total: int) -> None:
            self.collecting_bytes[index] = done
            self.journal.note_progress()

        try:
            async with await connection.open_stream() as stream:
                link = FrameLink(stream)
                await link.send(BulkOpened(Direction.OUTPUT, index))
                detail = await self._files.fetch_output(index, output, link, note)
        except (DiskFull, StagingError, TransferRefused) as error:
            await self.journal.feed(machine.FetchFailed(f"{output.path} waits at the provider: {error}"[:900]))
            await self._pause(FETCH_PAUSE_S)
        else:
            await self.journal.feed(machine.OutputFetched(index, output.manifest or b"", detail))
        finally:
            self.collecting_bytes.pop(index, None)

    # --- logs -----------------------------------------------------------------------------------------------

    async def _follow_logs(self, connection: TunnelConnection) -> None:
        if self.journal.state.has_logs:
            return
        async with await connection.open_stream() as stream:
            link = FrameLink(stream)
            sizes = {source: writer.size for source, writer in self._files.logs.items()}
            await link.send(LogOpened(sizes[LogSource.STDOUT], sizes[LogSource.STDERR]))
            while True:
                frame = await link.receive()
                match frame:
                    case LogData():
                        await self._files.append_log(frame)
                        self.journal.note_progress()
                    case LogEnded():
                        if not self._files.is_log_complete(frame):
                            raise IllegalTransition("the provider's log ends before its own size")
                        await self.journal.feed(machine.LogsFetched())
                        return
                    case None:
                        raise StreamCut
                    case _:
                        raise MalformedRecord(f"a frame {type(frame).__name__} does not belong in a log")


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
