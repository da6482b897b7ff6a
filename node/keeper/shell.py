"""Another command in the job's sandbox, for its renter: bytes in, bytes out, an exit status; no terminal.

On the provider it runs inside the job's namespaces and limits, and ends with the job or with its stream; on the
renter its bytes are handed on between the daemon's link and the tunnel. Refuses to start one for anybody but the
renter, and to buffer what nobody reads.
"""

import os

import trio

from node.errors import NodeError, TunnelError
from node.jobs.reader import StreamCut
from node.keeper.wire import FrameLink
from node.lease.execution import ExecutionEnded, ExecutionInput, ExecutionOutput, Output
from node.lease.link import FrameStream
from node.ports import RunningJob, TunnelConnection
from protocol.errors import MalformedRecord
from protocol.frames import SHELL_DATA_MAX, LogSource, ShellEnded, ShellInput, ShellOpened, ShellOutput

DRAIN_S = 2.0
"""How long after the command's end its pipes may stay open."""
DETAIL_MAX = 1000


async def serve_shell(job: RunningJob, argv: tuple[str, ...], link: FrameLink) -> None:
    """Run `argv` in the job's sandbox and speak of it over `link` until it is over. Raises StreamCut."""
    lock = trio.Lock()
    input_read, input_write = os.pipe2(os.O_CLOEXEC)
    outputs = [os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)]
    theirs = [input_read, *(write_end for _read_end, write_end in outputs)]
    ended, is_cut = ShellEnded(-1, "the command was cut off"), False
    try:
        async with trio.open_nursery() as nursery:
            feeder = trio.CancelScope()
            nursery.start_soon(_feed, link, input_write, feeder)
            async with trio.open_nursery() as pumps:
                for source, (read_end, _write_end) in zip(LogSource, outputs, strict=True):
                    pumps.start_soon(_pump, read_end, source, link, lock)
                try:
                    ended = ShellEnded(await job.execute(argv, *theirs))
                except NodeError as error:
                    ended = ShellEnded(-1, f"{error} {error.hint}".strip()[:DETAIL_MAX])
                finally:
                    _close_all(theirs)
                pumps.cancel_scope.deadline = trio.current_time() + DRAIN_S
            feeder.cancel()
    except* StreamCut:
        is_cut = True
    finally:
        _close_all(theirs)
    if is_cut:
        raise StreamCut  # alone: its stream is over, and not the tunnel
    await link.send(ended)


async def _feed(link: FrameLink, input_write: int, scope: trio.CancelScope) -> None:
    """Write the renter's input to the command; go on taking it when nothing reads it any more."""
    with scope:
        async with trio.lowlevel.FdStream(input_write) as pipe:
            is_open = True
            while (frame := await link.receive()) is not None:
                if not isinstance(frame, ShellInput):
                    raise MalformedRecord(f"a frame {type(frame).__name__} does not belong in a shell")
                if not is_open:
                    continue
                try:
                    await pipe.send_all(frame.data)
                except trio.BrokenResourceError:
                    is_open = False
                if not frame.data:
                    await pipe.aclose()
                    is_open = False
        raise StreamCut


async def _pump(read_end: int, source: LogSource, link: FrameLink, lock: trio.Lock) -> None:
    async with trio.lowlevel.FdStream(read_end) as pipe:
        while data := await pipe.receive_some(SHELL_DATA_MAX):
            async with lock:
                await link.send(ShellOutput(source, bytes(data)))


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


async def relay_shell(connection: TunnelConnection, argv: tuple[str, ...], daemon: FrameStream) -> None:
    """Hand a command's bytes on between the renter's daemon and the tunnel until it is over.

    Ends with an `ExecutionEnded` to the daemon, whatever happens to the tunnel; raises what `daemon` raises.
    """
    ended = ExecutionEnded(-1, "the tunnel was cut")
    try:
        async with await connection.open_stream() as stream:
            link = FrameLink(stream)
            await link.send(ShellOpened(argv))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_relay_input, daemon, link)
                while True:
                    frame = await link.receive_any()
                    if isinstance(frame, ShellEnded):
                        ended = ExecutionEnded(frame.status, frame.detail)
                        break
                    if not isinstance(frame, ShellOutput):
                        raise MalformedRecord(f"a frame {type(frame).__name__} does not belong in a shell")
                    await daemon.send(ExecutionOutput(Output(frame.source), frame.data))
                nursery.cancel_scope.cancel()
    except* (StreamCut, TunnelError, MalformedRecord) as group:
        ended = ExecutionEnded(-1, f"the tunnel was cut: {group.exceptions[0]}"[:DETAIL_MAX])
    await daemon.send(ended)


async def _relay_input(daemon: FrameStream, link: FrameLink) -> None:
    while True:
        piece = await daemon.receive(ExecutionInput)
        await link.send(ShellInput(piece.data))
