"""The leases of this machine, both roles: each has a directory, a keeper, and a status that is followed here.

      begin ─▶ directory written ─▶ keeper started ─▶ link ─▶ statuses ─▶ observer (selling or buying)
      adopt ─▶ (after a restart) the same from the keeper on
                                      keeper gone, not settled ─▶ started again: it resumes, or fails the lease

A status is stored when its phase, outcome or voucher changes. Refuses to judge statuses: the observer of the
role does, and must be idempotent, since after a restart it is told again.
"""

import enum
import shutil
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

import msgspec
import trio

from node.errors import JobError, NodeError
from node.lease.files import LeaseFile, LeaseKeys, LeaseStatus, create_lease_directory, read_status
from node.lease.link import KeeperLink, LinkError, connect
from node.lease.lock import holder_of
from node.log import get_logger
from node.market.context import Context, HasEnded
from node.ports import TaskStatus
from node.store import LeaseRow
from node.store.table import SqlValue
from protocol import codec
from protocol.machines.lease import FailReason, LeasePhase

log = get_logger(__name__)

KEEPER_START_S = 20
"""How long a fresh keeper may take until its socket answers."""
RESTART_MIN_S = 0.2
RESTART_MAX_S = 30.0


class LeaseState(enum.StrEnum):
    """What the daemon has on record about a lease; the keeper's phases come between GRANTED and OVER."""

    AWARDED = "awarded"
    COUNTERSIGNED = "countersigned"
    GRANTED = "granted"
    OVER = "over"
    """The keeper is done, and the receipt is signed (provider) or awaited (renter)."""
    SETTLED = "settled"
    """The receipt has both signatures."""
    LAPSED = "lapsed"
    """It never began."""
    FORGOTTEN = "forgotten"
    """Only its directory was found: what was agreed is lost. Its keeper goes on, and is told to clear up."""


LIVE_STATES = (LeaseState.COUNTERSIGNED, LeaseState.GRANTED, LeaseState.OVER)

Observer = Callable[["LiveLease"], Awaitable[None]]


class LiveLease:
    """A lease with a keeper: its row, the keeper's newest status, and the link while there is one."""

    def __init__(self, row: LeaseRow, directory: Path) -> None:
        self.row = row
        self.directory = directory
        self.is_lost = False
        """The directory is gone: there is nothing to follow, and nothing more to learn."""
        self.status: LeaseStatus | None = None
        self.link: KeeperLink | None = None
        self.problem = ""
        """Why there is no keeper, for people."""
        self._changed = trio.Event()

    def note_status(self, status: LeaseStatus) -> None:
        """Take a newer status and wake whoever waits for it."""
        self.status = status
        self._changed.set()
        self._changed = trio.Event()

    async def wait_for(self, condition: Callable[[LeaseStatus], bool]) -> LeaseStatus:
        """Wait until a status satisfies `condition`, and return it."""
        while self.status is None or not condition(self.status):
            await self._changed.wait()
        return self.status

    async def changed(self) -> None:
        """Wait for the next status."""
        await self._changed.wait()


class Leases:
    """All live leases of this daemon."""

    def __init__(self, context: Context, observers: dict[str, Observer]) -> None:
        self._context = context
        self._observers = observers
        self.live: dict[bytes, LiveLease] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: TaskStatus = trio.TASK_STATUS_IGNORED) -> None:
        """Follow leases until cancelled; keepers go on without us."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    async def begin(self, row: LeaseRow, lease_file: LeaseFile, keys: LeaseKeys) -> LiveLease:
        """Write the lease's directory (unless an earlier run did) and follow it from now on."""
        directory = self._context.lease_directory(row.lease)
        try:
            await trio.to_thread.run_sync(_create, directory, lease_file, keys, row.uid, row.gid)
        except FileExistsError:
            log.info("lease.directory_exists", lease=row.lease.hex())
        except OSError as error:
            raise JobError(
                f"cannot write the lease's directory {directory}: {error.strerror}", hint="check the disk"
            ) from None
        return self.adopt(row)

    def adopt(self, row: LeaseRow) -> LiveLease:
        """Follow a lease whose directory exists. Idempotent."""
        if row.lease in self.live:
            return self.live[row.lease]
        live = LiveLease(row, self._context.lease_directory(row.lease))
        self.live[row.lease] = live
        if self._nursery is None:
            raise RuntimeError("leases are followed inside `run`")
        self._nursery.start_soon(self._follow, live)
        return live

    async def cancel(
        self, lease: bytes, reason: FailReason, detail: str = "", notice_ms: int | None = None
    ) -> None:
        """End a lease's job. Raises NotFound-like LinkError when its keeper does not answer."""
        live = self.live.get(lease)
        if live is None or live.link is None:
            raise LinkError("the lease's keeper does not answer right now")
        await live.link.cancel(reason, detail=detail, notice_ms=notice_ms)

    async def collect(self, live: LiveLease) -> None:
        """Have a renter's keeper try at once what waits to be tried again. Raises LinkError."""
        if live.link is None:
            raise LinkError("the lease's keeper does not answer right now")
        await live.link.collect()

    async def conclude(self, live: LiveLease, reason: FailReason, detail: str) -> None:
        """Tell a renter's keeper that its provider is done with the lease. Raises LinkError."""
        if live.link is None:
            raise LinkError("the lease's keeper does not answer right now")
        await live.link.conclude(reason, detail=detail)

    async def settle(self, live: LiveLease) -> None:
        """Tell the keeper that the accounts are closed; it erases and exits. Idempotent."""
        if live.link is not None:
            await live.link.settle()

    async def has_settled(self, lease: bytes) -> bool:
        """Return whether the lease's keeper has cleared up and ended for good, or left no directory."""
        directory = self._context.lease_directory(lease)
        status = await trio.to_thread.run_sync(_status_on_disk, directory)
        if status is None:
            return not await trio.Path(directory).exists()
        return status.phase is LeasePhase.SETTLED

    async def save(self, live: LiveLease, **changes: SqlValue) -> None:
        """Store changes of the lease's row."""
        await self._context.store.transaction(lambda tx: tx.leases.change(live.row.lease, **changes))
        self.noted(live.row.lease, **changes)

    def noted(self, lease: bytes, **changes: SqlValue) -> None:
        """Take note of changes to the lease's row that a committed transaction has made."""
        live = self.live.get(lease)
        if live is not None:
            live.row = msgspec.structs.replace(live.row, **changes)

    async def _follow(self, live: LiveLease) -> None:
        backoff_s = RESTART_MIN_S
        while True:
            last = await trio.to_thread.run_sync(_status_on_disk, live.directory)
            if last is not None and (live.status is None or last.sequence > live.status.sequence):
                await self._take(live, last)
            live.is_lost = not await trio.Path(live.directory).exists()
            if live.is_lost:
                await self._observe(live)
            if live.is_lost or (last is not None and last.phase is LeasePhase.SETTLED):
                await self._forget(live)
                return
            try:
                has_ended = await self._ensure_keeper(live)
                await self._listen(live, has_ended)
                backoff_s = RESTART_MIN_S
            except NodeError as error:
                live.problem = str(error)
                log.warning("lease.keeper_trouble", lease=live.row.lease.hex(), problem=str(error))
                await trio.sleep(backoff_s)
                backoff_s = min(RESTART_MAX_S, backoff_s * 2)

    async def _forget(self, live: LiveLease) -> None:
        """Follow a settled lease no more. A provider's directory goes; a renter's holds the job's output."""
        if live.row.role == "provider" and not live.is_lost:
            await trio.to_thread.run_sync(partial(shutil.rmtree, live.directory, ignore_errors=True))
        self.live.pop(live.row.lease, None)

    async def _ensure_keeper(self, live: LiveLease) -> HasEnded:
        holder = await trio.to_thread.run_sync(holder_of, live.directory)
        if holder is not None:
            return lambda: not holder.is_alive()
        socket = self._context.keepers.socket_path(live.row.lease)
        return await self._context.keepers.start(live.directory, socket, live.row.uid, live.row.gid)

    async def _listen(self, live: LiveLease, has_ended: HasEnded) -> None:
        socket = self._context.keepers.socket_path(live.row.lease)
        async with connect(socket, starting_s=KEEPER_START_S, has_ended=has_ended) as link:
            live.link, live.problem = link, ""
            try:
                async with aclosing(link.subscribe()) as statuses:
                    async for status in statuses:
                        await self._take(live, status)
            finally:
                live.link = None

    async def _take(self, live: LiveLease, status: LeaseStatus) -> None:
        before = live.status
        live.note_status(status)
        if before is None or _essence(before) != _essence(status):
            await self.save(live, status=codec.encode(status))
        await self._observe(live)

    async def _observe(self, live: LiveLease) -> None:
        try:
            await self._observers[live.row.role](live)
        except NodeError as error:
            # Our own disk, say: the observer is told again with the next status, or after a restart.
            log.error("lease.not_noted", lease=live.row.lease.hex(), problem=str(error))


def _essence(status: LeaseStatus) -> tuple[object, ...]:
    return (status.phase, status.outcome, status.voucher_number, status.generation, status.port)


def _create(directory: Path, lease_file: LeaseFile, keys: LeaseKeys, uid: int, gid: int) -> None:
    create_lease_directory(directory, lease_file, keys, uid=uid, gid=gid)


def _status_on_disk(directory: Path) -> LeaseStatus | None:
    try:
        return read_status(directory)
    except NodeError as error:
        log.error("lease.status_unreadable", directory=str(directory), problem=str(error))
        return None
