"""A lease's files on its provider: the job as it came, its inputs, its scratch, its outputs.

Inputs go into the scratch before the job starts, outputs are read out of it after it has ended; nobody else
writes there at those times, and no link of the job's making is followed all the same. Refuses to erase anything
unless it is told to.
"""

from functools import partial
from pathlib import Path

import trio

from node.errors import NodeError, StagingError
from node.jobs.draft import DraftTree
from node.jobs.transfer import TreeReceiver, send_tree
from node.jobs.tree import ScannedTree, scan_beneath
from node.keeper.job import JOB_DIR
from node.keeper.wire import FrameLink
from node.lease.files import LeaseFile, LeaseFileError, ProviderSide, read_bounded, write_atomically
from node.log import get_logger
from node.ports import Progress, Scratch
from node.sandbox import open_scratch, sweep_scratch
from protocol import codec
from protocol.errors import MalformedRecord
from protocol.frames import OutputTold
from protocol.identity import hash_bytes
from protocol.manifest import Manifest
from protocol.records.job import JOB_SIZE_MAX, Job

JOB_FILE = "job.cbor"
UNSAFE_TIER = "unsafe-process"
DISK_MIB_DEFAULT = 1024
"""Size of the scratch when the lease names none."""
ERASE_RETRY_S = 1.0
ERASE_RETRY_MAX_S = 60.0
DETAIL_MAX = 1000
OUTPUT_SIZE_FACTOR = 2
"""An output may be so many times the scratch's size: holes and second links count as if they were full."""

log = get_logger(__name__)


class ProviderFiles:
    """The files of one lease."""

    def __init__(self, directory: Path, lease_file: LeaseFile, side: ProviderSide) -> None:
        self._directory = directory
        self._file = lease_file
        self._side = side
        self._scratch: Scratch | None = None
        self._scratch_problem: NodeError | None = None
        self._is_scratch_known: trio.Event | None = None
        self._receivers: dict[int, TreeReceiver] = {}
        self._trees: list[ScannedTree | None] = []
        self.job: Job | None = None

    # --- the job --------------------------------------------------------------------------------------------

    async def load_job(self) -> None:
        """Take up the job that an earlier keeper has stored, if any. Raises LeaseFileError."""
        try:
            data = await trio.to_thread.run_sync(read_bounded, self._directory / JOB_FILE, JOB_SIZE_MAX)
            self.job = self._parse_untrusted(data)
        except FileNotFoundError:
            return
        except MalformedRecord as error:
            raise LeaseFileError(f"the stored job is damaged: {error}") from None

    async def store_job_untrusted(self, data: bytes) -> Job:
        """Check that `data` is the lease's job, store it durably and return it. Raises MalformedRecord."""
        job = self._parse_untrusted(data)
        if self.job is None:
            await trio.to_thread.run_sync(write_atomically, self._directory / JOB_FILE, data)
            self.job = job
        return job

    def _parse_untrusted(self, data: bytes) -> Job:
        if hash_bytes(data) != self._file.job_hash:
            raise MalformedRecord("this is not the job that the lease names")
        return codec.decode_untrusted(data, Job, JOB_SIZE_MAX)

    # --- scratch --------------------------------------------------------------------------------------------

    @property
    def disk_mib(self) -> int:
        """Size of the scratch."""
        return self._file.resources.disk_mib or DISK_MIB_DEFAULT

    async def open_scratch(self) -> None:
        """Make the scratch, or find it again; `scratch` waits for that."""
        known = self._is_scratch_known = trio.Event()
        try:
            async with open_scratch(self._directory, self.disk_mib, self._side.job_uid) as scratch:
                self._scratch = scratch
        except NodeError as error:
            self._scratch_problem = error
        finally:
            known.set()

    async def scratch(self) -> Scratch:
        """Return the scratch once it is there. Raises the NodeError because of which it is not."""
        if self._is_scratch_known is not None:
            await self._is_scratch_known.wait()
        if self._scratch is None:
            raise self._scratch_problem or NodeError("the scratch is erased")
        return self._scratch

    async def erase(self) -> None:
        """Erase all of the job's files, trying until it is done. Idempotent."""
        if self._is_scratch_known is not None:
            await self._is_scratch_known.wait()
        self._scratch = None
        self._trees = []
        retry_s = ERASE_RETRY_S
        while True:
            try:
                await sweep_scratch(self._directory)
            except NodeError as error:
                log.warning("keeper.scratch_not_erased", reason=str(error), hint=error.hint)
                await trio.sleep(retry_s)
                retry_s = min(ERASE_RETRY_MAX_S, retry_s * 2)
            else:
                (self._directory / JOB_FILE).unlink(missing_ok=True)
                return

    # --- inputs ---------------------------------------------------------------------------------------------

    async def receive_input(self, index: int, link: FrameLink, progress: Progress) -> None:
        """Receive the job's `index`-th input into its place; raises what `TreeReceiver.receive` does."""
        if self.job is None:
            raise StagingError("the job has not come yet")
        scratch = await self.scratch()
        wanted = self.job.inputs[index]

        def make_draft(manifest: Manifest) -> DraftTree:
            owner = self._side.job_uid
            return DraftTree(
                scratch.path, wanted.destination, manifest, f"in{index}", owner=owner, seen_as=JOB_DIR
            )

        receiver = self._receivers.get(index)
        if receiver is None:
            receiver = TreeReceiver(make_draft, size_max=wanted.size, expected=wanted.manifest)
            self._receivers[index] = receiver
        await receiver.receive(link.stream, link.reader, progress)
        del self._receivers[index]

    # --- outputs --------------------------------------------------------------------------------------------

    async def list_outputs(self) -> tuple[tuple[OutputTold, ...], str]:
        """Read the job's outputs; return them in the job's order, and what people should know about them."""
        job = self.job
        if job is None:
            return (), ""
        problems: list[str] = []
        trees: list[ScannedTree | None] = []
        for path in job.outputs:
            try:
                scratch = await self.scratch()
                seen_as = str(scratch.path) if self._file.isolation == UNSAFE_TIER else JOB_DIR
                size_max = OUTPUT_SIZE_FACTOR * self.disk_mib * 2**20
                scan = partial(scan_beneath, seen_as=seen_as, size_max=size_max)
                tree = await trio.to_thread.run_sync(scan, scratch.path, path)
            except NodeError as error:
                problems.append(f"{path} was not kept: {self.without_paths(str(error))}")
                trees.append(None)
                continue
            if tree is None:
                problems.append(f"the job made no {path}")
            else:
                problems += [f"in {path}: {problem}" for problem in tree.skipped]
            trees.append(tree)
        self._trees = trees
        told = tuple(
            OutputTold(path, None, 0) if tree is None else OutputTold(path, tree.manifest.id, tree.manifest.size)
            for path, tree in zip(job.outputs, trees, strict=True)
        )
        return told, "; ".join(problems)[:DETAIL_MAX]

    def without_paths(self, text: str) -> str:
        """Return `text` with the job's paths where it names this machine's."""
        if self._scratch is not None:
            text = text.replace(str(self._scratch.path), JOB_DIR)
        return text.replace(str(self._directory), "")

    async def send_output(self, index: int, link: FrameLink, progress: Progress) -> None:
        """Send the job's `index`-th output; raises what `send_tree` does."""
        tree = self._trees[index] if index < len(self._trees) else None
        if tree is None:
            raise StagingError(f"there is no output {index}")
        await send_tree(link.stream, link.reader, tree, progress)
