"""The renter's leases: from a checked grant to a started keeper, and from its last word to the accepted receipt.

Refuses to touch the caller's files: the keeper does, as the caller's uid.
"""

from functools import partial
from typing import Any

import msgspec
import trio

from node.errors import NodeError, StoreError
from node.lease.files import LeaseKeys, LeaseStatus
from node.log import get_logger
from node.market.buying import Buyer
from node.market.context import Context
from node.market.leases import LIVE_STATES, Leases, LeaseState, LiveLease
from node.market.live_job import ENDED, LEASED, LiveJob, LiveJobs
from node.market.papers import objection_to_grant, renter_keeper_papers
from node.market.settling import NOT_YET, entry_of, objection_to, reason_without_us, status_on_record
from node.ports import TaskStatus
from node.store import LeaseRow, Transaction
from protocol.envelope import Sealed, open_as_untrusted
from protocol.machines.lease import COMPLETED, OVER_PHASES, FailReason, LeasePhase
from protocol.machines.purchase import Phase
from protocol.records import Grant, GrantDelivery, Receipt, ReceiptAcceptance, Refusal

log = get_logger(__name__)

AGAIN_S = 1.0
CANCELLED_EARLY = "cancelled before a lease began"
DIRECTORY_GONE = "the lease's directory is gone"
RECEIPT_WAIT_S = 10.0
"""How long a finished job waits for its receipt before it is called ended without one."""
LAST_WORD_WAIT_S = 3.0
"""How long a receipt waits for our own keeper's last word."""


class Renter:
    """Every lease that this node rents."""

    def __init__(self, context: Context, leases: Leases, jobs: LiveJobs, buyer: Buyer) -> None:
        self._context = context
        self._leases = leases
        self._jobs = jobs
        self._buyer = buyer
        self._nursery: trio.Nursery | None = None
        self._ending: set[str] = set()

    async def run(self, *, task_status: TaskStatus = trio.TASK_STATUS_IGNORED) -> None:
        """Follow leases, until cancelled; finds those of earlier runs again."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            rows = await self._context.store.transaction(lambda tx: list(tx.leases.where("role = 'renter'")))
            for row in rows:
                await self._resume(row)
            for job in list(self._jobs.by_id.values()):
                if job.purchase.phase is Phase.CANCELLED:
                    await self._end_surely(job, FailReason.CANCELLED.value, CANCELLED_EARLY)
            task_status.started()
            await trio.sleep_forever()

    async def _resume(self, row: LeaseRow) -> None:
        """Go on with a lease of an earlier run. One whose grant never came is no lease of its job any more."""
        job = self._jobs.by_id.get(row.job_id)
        bid = job.purchase.bid if job is not None and job.purchase.phase is Phase.GRANTED else None
        if bid is None or bid.lease != row.lease:
            job = None
        is_over = row.state == LeaseState.SETTLED
        if row.state not in (*LIVE_STATES, LeaseState.FORGOTTEN) and not is_over:
            return
        if is_over and job is None and await self._leases.has_settled(row.lease):
            return
        if await trio.Path(self._context.lease_directory(row.lease)).exists():
            live = self._leases.adopt(row)
            if job is not None:
                job.lease = live
        elif job is not None and row.state == LeaseState.GRANTED:
            await self._start_lease(job, row.lease)
        elif job is not None:
            await self._end_surely(job, row.outcome or FailReason.PROVIDER_AWAY.value, DIRECTORY_GONE)

    async def on_grant(self, sealed: Sealed[GrantDelivery]) -> Refusal | None:
        """Take a grant: check it against the award, and start the lease's keeper. None: taken."""
        context = self._context
        grant = open_as_untrusted(sealed.record.grant, Grant, context.network_id)
        lease = grant.record.lease
        row = await context.store.transaction(lambda tx: tx.leases.get(lease))
        if row is None or row.role != "renter" or row.peer != sealed.signer:
            return Refusal(of=sealed.id, reason="unknown_lease")
        problem = objection_to_grant(context, sealed, grant, row)
        if problem:
            return Refusal(of=sealed.id, reason="not_as_agreed", detail=problem)
        job = self._jobs.by_id.get(row.job_id)
        if job is None or job.purchase.bid is None or job.purchase.bid.lease != lease:
            return Refusal(of=sealed.id, reason="not_wanted")
        if job.purchase.phase is not Phase.COUNTERSIGNED:
            return None if job.purchase.phase is Phase.GRANTED else Refusal(of=sealed.id, reason="not_wanted")
        records = [context.record_row(paper, lease=lease) for paper in (grant, sealed)]
        salt = sealed.record.salt

        def write(tx: Transaction) -> None:
            for record in records:
                tx.records.put(record)
            tx.leases.change(lease, state=LeaseState.GRANTED, grant_id=grant.id, salt=salt)
            tx.jobs.change(job.row.id, state=LEASED)

        await context.store.transaction(write)
        job.row = msgspec.structs.replace(job.row, state=LEASED)
        if await self._buyer.on_granted(job, lease) and self._nursery is not None:
            self._nursery.start_soon(self._start_lease, job, lease)
        return None

    async def _start_lease(self, job: LiveJob, lease: bytes) -> None:
        context = self._context
        try:
            row, secret, lease_file = await context.store.transaction(
                partial(renter_keeper_papers, context, job.spec, lease)
            )
            keys = LeaseKeys(tunnel=secret.tunnel, voucher=secret.voucher)
            job.lease = await self._leases.begin(row, lease_file, keys)
        except NodeError as error:
            log.error("renting.lease_not_started", job=job.row.id, problem=str(error))
            problem = f"the lease could not be started here: {error}"
            await self._end_surely(job, FailReason.STAGING_FAILED.value, problem)
            return
        job.note_change()
        try:
            await context.store.transaction(lambda tx: tx.lease_secrets.delete("lease = ?", lease))
        except StoreError as error:
            log.error("renting.secrets_kept", lease=lease.hex(), problem=str(error))  # until they expire

    async def cancel(self, job: LiveJob) -> None:
        """End a job: its lease's job when there is one, else its purchase."""
        lease = job.lease
        if lease is None:
            await self._buyer.cancel(job)
            if job.purchase.phase is not Phase.GRANTED:
                await self._end(job, FailReason.CANCELLED.value, CANCELLED_EARLY)
                return
            # Its keeper is being started: a job that was called ended now would run all the same.
            lease = await self._started(job)
        if lease is not None:
            await self._leases.cancel(lease.row.lease, FailReason.CANCELLED)

    async def _started(self, job: LiveJob) -> LiveLease | None:
        """Wait until a granted job has its lease; None: it could not be started, and the job has ended."""
        while job.lease is None and job.row.state != ENDED:
            await job.changed()
        return job.lease

    async def observe(self, live: LiveLease) -> None:
        """Take note of a renter keeper's status. Idempotent."""
        status, job = live.status, self._jobs.by_id.get(live.row.job_id)
        is_over = live.is_lost or (status is not None and status.phase in OVER_PHASES)
        if is_over and live.row.state == LeaseState.GRANTED:
            outcome = status.outcome if status is not None else FailReason.PROVIDER_AWAY.value
            now = self._context.clock.now()
            await self._leases.save(live, state=LeaseState.OVER, outcome=outcome, ended_at=now)
        # A provider that never comes back sends no receipt; one that comes late is judged by what is on record.
        if is_over and (live.row.state == LeaseState.SETTLED or job is None):
            await self._leases.settle(live)
        if job is None:
            return
        job.lease = live
        if is_over and self._nursery is not None and job.row.id not in self._ending:
            self._ending.add(job.row.id)
            self._nursery.start_soon(self._end_with_receipt, job, live)
        job.note_change()

    async def _end_with_receipt(self, job: LiveJob, live: LiveLease) -> None:
        status = live.status
        if self._is_receipt_near(status):
            with trio.move_on_after(RECEIPT_WAIT_S):
                while live.row.state != LeaseState.SETTLED:
                    await job.changed()
            status = live.status
        outcome = (status.outcome or COMPLETED) if status is not None else FailReason.PROVIDER_AWAY.value
        await self._end_surely(job, outcome, status.detail if status is not None else DIRECTORY_GONE)
        self._ending.discard(job.row.id)
        if live.row.state == LeaseState.SETTLED:
            return
        try:
            await self.observe(live)
        except NodeError as error:
            log.info("renting.keeper_not_settled", lease=live.row.lease.hex(), problem=str(error))

    def _is_receipt_near(self, status: LeaseStatus | None) -> bool:
        """Return whether the provider knows that the lease is over, too: not when it is away or keeps results."""
        if status is None or status.outcome == FailReason.PROVIDER_AWAY:
            return False
        return status.phase is LeasePhase.COLLECTED or status.kept_until <= self._context.clock.now()

    async def on_receipt(self, sealed: Sealed[Receipt]) -> ReceiptAcceptance | Refusal:
        """Check a provider's receipt against our keeper's account; accept it, or say why not."""
        receipt, context = sealed.record, self._context
        row = await context.store.transaction(lambda tx: tx.leases.get(receipt.lease))
        if row is None or row.role != "renter" or row.peer != sealed.signer:
            return Refusal(of=sealed.id, reason="unknown_lease")
        acceptance = ReceiptAcceptance(receipt_id=sealed.id, lease=row.lease, accepted_at=context.clock.now())
        if row.receipt_id == sealed.id:
            return acceptance
        live = self._leases.live.get(row.lease)
        if live is not None:
            await self._hear_last_word(live, receipt)
            await self.observe(live)
            row = live.row
        if row.state not in (LeaseState.OVER, LeaseState.SETTLED) and not self._was_given_up(row):
            return Refusal(of=sealed.id, reason=NOT_YET, detail="our keeper has not said its last word")
        status = live.status if live is not None else None
        status = status or status_on_record(row)
        problem = objection_to(receipt, row, status, context.node)
        if row.receipt_id is not None:
            problem = "there was another receipt of this lease"
        if problem:
            log.warning("renting.receipt_disputed", lease=row.lease.hex(), problem=problem)
            return Refusal(of=sealed.id, reason="disputed", detail=problem)
        await self._accept(sealed, live)
        return acceptance

    async def _hear_last_word(self, live: LiveLease, receipt: Receipt) -> None:
        """Wait till our keeper knows that the lease is over: from the provider's or, without a tunnel, from us."""
        with trio.move_on_after(LAST_WORD_WAIT_S):
            await live.wait_for(lambda status: status.phase in OVER_PHASES)
        status = live.status
        if status is None or status.phase in OVER_PHASES or status.connected:
            return
        reason, detail = reason_without_us(receipt)
        try:
            await self._leases.conclude(live, reason, detail)
        except NodeError as error:
            log.info("renting.keeper_not_concluded", lease=live.row.lease.hex(), problem=str(error))
            return
        with trio.move_on_after(LAST_WORD_WAIT_S):
            await live.wait_for(lambda status: status.phase in OVER_PHASES)

    def _was_given_up(self, row: LeaseRow) -> bool:
        """Return whether a lease was countersigned, and its job did not wait for the grant: it can owe nothing."""
        job = self._jobs.by_id.get(row.job_id)
        bid = job.purchase.bid if job is not None else None
        return row.state == LeaseState.COUNTERSIGNED and (bid is None or bid.lease != row.lease)

    async def _accept(self, sealed: Sealed[Receipt], live: LiveLease | None) -> None:
        lease = sealed.record.lease
        changes: dict[str, Any] = {"state": LeaseState.SETTLED, "receipt_id": sealed.id}
        record = self._context.record_row(sealed, lease=lease)

        def write(tx: Transaction) -> None:
            tx.records.put(record)
            tx.entries.put(entry_of(sealed, is_provider=False, confirmed=True))
            tx.leases.change(lease, **changes)

        await self._context.store.transaction(write)
        self._leases.noted(lease, **changes)
        if live is not None:
            await self.observe(live)

    async def _end_surely(self, job: LiveJob, outcome: str, detail: str) -> None:
        """As `_end`, for tasks that nobody asked for: wait until our disk takes it."""
        while True:
            try:
                return await self._end(job, outcome, detail)
            except StoreError as error:
                log.error("renting.end_not_written", job=job.row.id, problem=str(error))
                await trio.sleep(AGAIN_S)

    async def _end(self, job: LiveJob, outcome: str, detail: str) -> None:
        changes: dict[str, Any] = {
            "state": ENDED,
            "outcome": outcome,
            "detail": detail[:1000],
            "ended_at": self._context.clock.now(),
        }
        await self._context.store.transaction(lambda tx: tx.jobs.change(job.row.id, **changes))
        job.row = msgspec.structs.replace(job.row, **changes)
        job.remember(changes["ended_at"], detail or outcome)
        self._jobs.by_id.pop(job.row.id, None)
        job.woken.set()
        job.note_change()
