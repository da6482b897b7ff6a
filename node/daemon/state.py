"""What the RPC's handlers share: the rooms of the running daemon, and the look-ups that many of them need.

Refuses to answer: the handlers do.
"""

from pathlib import Path

import msgspec
import trio

from node.config import Loaded
from node.errors import BadArgument, NotFound
from node.lease.files import LeaseStatus
from node.market.context import Context
from node.market.inventory import Inventory
from node.market.live_job import LiveJob
from node.market.market import Market
from node.ports import Probe
from node.rpc.api import Caller
from node.rpc.methods.daemon import StopMode
from node.store import JobRow, LeaseRow, PeerRow, Transaction
from protocol import codec
from protocol.errors import MalformedRecord
from protocol.identity import NodeId, node_from_peer_id, peer_id
from protocol.units import Millis

STATUS_SIZE_MAX = 256 * 1024
JOBS_LOOKED_AT_MAX = 10_000


class KnownJob(msgspec.Struct, frozen=True):
    """A job, finished or not: its row, its newest lease and that lease's last status."""

    row: JobRow
    lease: LeaseRow | None
    status: LeaseStatus | None
    live: LiveJob | None


class Daemon:
    """The running daemon."""

    def __init__(
        self,
        *,
        context: Context,
        market: Market,
        inventory: Inventory,
        loaded: Loaded,
        probes: tuple[Probe, ...],
        started_at: Millis,
        started_boot_ms: int,
        socket: Path,
        root: Path,
    ) -> None:
        self.context = context
        self.market = market
        self.inventory = inventory
        self.loaded = loaded
        self.probes = probes
        self.started_at = started_at
        self.started_boot_ms = started_boot_ms
        self.socket = socket
        self.root = root
        self.stop_wanted = trio.Event()
        self.stop_mode = StopMode.KEEP
        self.is_draining = False

    @property
    def peer_id(self) -> str:
        """Our own id as people see it."""
        return peer_id(self.context.node)

    async def find_job(self, reference: str, caller: Caller) -> KnownJob:
        """Return the job that `reference` names for `caller`: id or name, a unique prefix of either, or "-".

        Raises NotFound, BadArgument for an ambiguous prefix, Forbidden for somebody else's job.
        """
        rows = await self.context.store.transaction(
            lambda tx: list(tx.jobs.all(order_by="created_at desc"))[:JOBS_LOOKED_AT_MAX]
        )
        mine = [row for row in rows if row.uid == caller.uid]
        visible = rows if caller.is_admin else mine
        if reference == "-":
            if not mine:
                raise NotFound("you have no jobs yet", hint="start one with `gpunode run`")
            return await self.known_job(mine[0])
        row = _pick(reference, visible)
        if row is None:
            others = _pick(reference, rows)
            if others is not None:
                caller.require_owner(others.uid, f"job {reference!r}")
            raise NotFound(f"there is no job {reference!r}", hint="see `gpunode jobs`")
        return await self.known_job(row)

    async def known_job(self, row: JobRow) -> KnownJob:
        """Return a job with its lease and status, as they are now: `row` may be older."""
        live = self.market.jobs.by_id.get(row.id)
        if live is None:
            job_id = row.id
            now = await self.context.store.transaction(lambda tx: tx.jobs.get(job_id))
            row = row if now is None else now
        if live is not None and live.lease is not None:
            return KnownJob(live.row, live.lease.row, live.lease.status, live)
        lease_id = row.lease
        lease = None
        if lease_id is not None:
            lease = await self.context.store.transaction(lambda tx: tx.leases.get(lease_id))
        following = self.market.leases.live.get(lease_id) if lease_id is not None else None
        status = following.status if following is not None else decoded_status(lease)
        return KnownJob(live.row if live is not None else row, lease, status, live)

    def find_peer(self, reference: str, tx: Transaction) -> NodeId:
        """Return the peer that a peer id, or a unique prefix or suffix of a known one, names."""
        try:
            return node_from_peer_id(reference)
        except ValueError:
            pass
        known = {row.node for row in tx.peers.all()} | {peer.node for peer in self.context.network.peers()}
        known |= {row.peer for row in tx.leases.all()}
        matching = [
            node for node in known if peer_id(node).startswith(reference) or peer_id(node).endswith(reference)
        ]
        if not matching:
            raise NotFound(
                f"no peer {reference!r} is known", hint="see `gpunode peers ls`, or give the whole peer id"
            )
        if len(matching) > 1:
            raise BadArgument(f"{reference!r} names {len(matching)} peers", hint="give more of the peer id")
        return NodeId(matching[0])


def decoded_status(lease: LeaseRow | None) -> LeaseStatus | None:
    """Return the status that a lease's row remembers, or None."""
    if lease is None or not lease.status:
        return None
    try:
        return codec.decode_untrusted(lease.status, LeaseStatus, STATUS_SIZE_MAX)
    except MalformedRecord:
        return None  # written by another version; the account is in the receipt


def peer_row(tx: Transaction, node: bytes) -> PeerRow:
    """Return what we remember of a peer."""
    return tx.peers.get(node) or PeerRow(node=node)


def _pick(reference: str, rows: list[JobRow]) -> JobRow | None:
    for row in rows:
        if row.id == reference:
            return row
    named = [row for row in rows if row.name == reference]
    if named:
        return named[0]  # names repeat over time: the newest is meant
    matching = [row for row in rows if row.id.startswith(reference) or row.name.startswith(reference)]
    if len(matching) > 1:
        names = ", ".join(row.name for row in matching[:5])
        raise BadArgument(f"{reference!r} is the beginning of several jobs: {names}", hint="give more letters")
    return matching[0] if matching else None
