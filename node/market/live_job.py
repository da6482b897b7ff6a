"""An unfinished job in memory, and the registry of all of them.

Refuses to buy, to run and to store: `node.market.buying` and `node.market.renting` do.
"""

import trio

from node.errors import NotFound
from node.market.jobspec import JobSpec
from node.market.leases import LiveLease
from node.store import JobRow
from protocol.machines.purchase import Phase, Purchase

BUYING = "buying"
LEASED = "leased"
ENDED = "ended"
HISTORY_MAX = 64


class LiveJob:
    """An unfinished job: its row, spec, purchase, and lease once there is one."""

    def __init__(self, row: JobRow, spec: JobSpec, purchase: Purchase) -> None:
        self.row = row
        self.spec = spec
        self.purchase = purchase
        self.lease: LiveLease | None = None
        self.history: list[tuple[int, str]] = []
        """(Unix ms, what happened), for `gpunode why`; of this daemon's run."""
        self.lock = trio.Lock()
        self.woken = trio.Event()
        self._changed = trio.Event()

    def note_change(self) -> None:
        """Wake whoever watches the job."""
        self._changed.set()
        self._changed = trio.Event()

    async def changed(self) -> None:
        """Wait for the next change of the job or of its lease."""
        await self._changed.wait()

    def remember(self, at: int, text: str) -> None:
        """Add to the job's history, unless it repeats the last line."""
        if text and (not self.history or self.history[-1][1] != text):
            self.history = [*self.history[-HISTORY_MAX + 1 :], (at, text)]

    def has_bid(self, bid_id: bytes) -> bool:
        """Return whether this is the job's open bid."""
        return self.purchase.bid is not None and self.purchase.bid.bid_id == bid_id


class LiveJobs:
    """All unfinished jobs."""

    def __init__(self) -> None:
        self.by_id: dict[str, LiveJob] = {}

    def get(self, job_id: str) -> LiveJob:
        """Return an unfinished job. Raises NotFound."""
        job = self.by_id.get(job_id)
        if job is None:
            raise NotFound(f"there is no unfinished job {job_id!r}")
        return job

    def with_bid(self, bid_id: bytes) -> LiveJob | None:
        """Return the job whose open bid this is."""
        return next((job for job in self.by_id.values() if job.has_bid(bid_id)), None)

    def countersigned_with(self, provider: bytes) -> list[LiveJob]:
        """Return the jobs that wait for a grant of `provider`."""
        return [
            job
            for job in self.by_id.values()
            if job.purchase.phase is Phase.COUNTERSIGNED
            and job.purchase.bid is not None
            and job.purchase.bid.provider == provider
        ]
