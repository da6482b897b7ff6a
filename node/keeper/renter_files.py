"""A lease's files on its renter: the inputs that it sends, the outputs and logs that it gets.

Runs as the user whose job it is, so that it reads what that user may read and writes what that user may write.
An output goes into its place when all of it is verified; what is in the way there is left alone. Refuses to send
an input that is not the one that was agreed on.
"""

from functools import partial
from pathlib import Path

import trio

from node.errors import StagingError
from node.jobs.draft import DraftTree, discard_draft
from node.jobs.logs import LogWriter
from node.jobs.transfer import TreeReceiver, send_tree
from node.jobs.tree import ScannedTree, scan_tree
from node.keeper.wire import FrameLink
from node.lease.files import RenterSide
from node.log import get_logger
from node.ports import Progress
from protocol.errors import IllegalTransition
from protocol.frames import LogData, LogEnded, LogSource, OutputTold
from protocol.manifest import Manifest

DRAFT_NAME_SIZE = 12
LOG_RETRY_S = 1.0

log = get_logger(__name__)


class RenterFiles:
    """The files of one lease."""

    def __init__(self, directory: Path, lease: bytes, side: RenterSide) -> None:
        self._side = side
        self._lease = lease
        self._trees: dict[int, ScannedTree] = {}
        self._receivers: dict[int, TreeReceiver] = {}
        self.logs = {source: LogWriter(directory / "log", source) for source in LogSource}

    def close(self) -> None:
        """Close the logs."""
        for writer in self.logs.values():
            writer.close()

    async def send_input(self, index: int, link: FrameLink, progress: Progress) -> None:
        """Send the job's `index`-th input; raises what `send_tree` does."""
        tree = await self._scanned(index)
        await send_tree(link.stream, link.reader, tree, progress)

    async def _scanned(self, index: int) -> ScannedTree:
        if index not in self._trees:
            source = self._side.inputs[index]
            tree = await trio.to_thread.run_sync(partial(scan_tree, ignore=source.ignore), Path(source.path))
            if tree.manifest.id != self._side.job.inputs[index].manifest:
                raise StagingError(
                    f"{source.path} is no longer what it was when the job was submitted",
                    "run again when nothing writes to it",
                )
            self._trees[index] = tree
        return self._trees[index]

    async def prepare_inputs(self) -> None:
        """Read all inputs ahead. Raises StagingError."""
        for index in range(len(self._side.inputs)):
            await self._scanned(index)

    async def fetch_output(self, index: int, told: OutputTold, link: FrameLink, progress: Progress) -> str:
        """Fetch the job's `index`-th output into its place; return what people should know about where it is.

        Raises what `TreeReceiver.receive` does.
        """
        wanted = Path(self._side.outputs[index])
        await trio.to_thread.run_sync(_make_parent, wanted)
        place = await trio.to_thread.run_sync(wanted.resolve)

        def make_draft(manifest: Manifest) -> DraftTree:
            return DraftTree(place.parent, place.name, manifest, self._draft_name(index))

        receiver = self._receivers.get(index)
        if receiver is None:
            receiver = TreeReceiver(make_draft, size_max=told.size, expected=told.manifest, is_durable=True)
            self._receivers[index] = receiver
        _manifest, placement = await receiver.receive(link.stream, link.reader, progress)
        del self._receivers[index]
        if placement.in_the_way:
            return f"{placement.in_the_way}: {told.path} is in {placement.path}"
        return ""

    def discard_drafts(self) -> None:
        """Remove what was fetched in part: nobody will fetch the rest any more. Blocks on the disk."""
        for index, output in enumerate(self._side.outputs):
            place = Path(output).resolve()
            discard_draft(place.parent, place.name, self._draft_name(index))

    def _draft_name(self, index: int) -> str:
        return f"{self._lease.hex()[:DRAFT_NAME_SIZE]}-{index}"

    async def append_log(self, data: LogData) -> None:
        """Write some of the job's output, once there is room for it: the provider keeps the rest meanwhile.

        Raises IllegalTransition when it does not come after the last.
        """
        writer = self.logs[data.source]
        if data.offset < writer.size:
            raise IllegalTransition("the provider sends the log backwards")
        while True:
            try:
                writer.skip_to(data.offset)
                await trio.to_thread.run_sync(writer.append, data.data[writer.size - data.offset :])
            except OSError as error:
                log.error("keeper.log_not_written", reason=str(error))
                await trio.sleep(LOG_RETRY_S)
            else:
                return

    def is_log_complete(self, ended: LogEnded) -> bool:
        """Return whether both logs are here up to the provider's end."""
        sizes = (self.logs[LogSource.STDOUT].size, self.logs[LogSource.STDERR].size)
        return sizes == (ended.stdout, ended.stderr)


def _make_parent(place: Path) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StagingError(f"cannot make {place.parent}: {error.strerror}") from None
