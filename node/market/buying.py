"""The renter's purchases: jobs that look for a GPU, bid, and countersign, until they have a grant.

      submit ─▶ seek (match the book) ─▶ bid ─▶ acknowledged ─▶ award ─▶ countersigned ─▶ grant: `renting`
                  ▲ offers changed, price fell, rejected, no answer │
                  └──────────────────────────────────────────────────┘

Refuses to decide when to bid and whom to believe: `protocol.machines.purchase` does.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, assert_never

import msgspec
import trio

from node.errors import BadArgument, StoreError
from node.log import get_logger
from node.market.bookkeeping import Bookkeeper
from node.market.context import Context, decode_stored, random_bytes
from node.market.jobspec import JobSpec
from node.market.leases import LeaseState
from node.market.live_job import BUYING, ENDED, LiveJob, LiveJobs
from node.market.outbox import Answer, Outbox, Undelivered
from node.market.papers import BID_LIFETIME_MS, make_bid, objection_to_award, renter_lease_row
from node.market.skew import ClockSkew
from node.ports import TaskStatus
from node.store import JobRow, LeaseRow, OutboxRow, RecordRow, Transaction
from protocol import codec
from protocol.envelope import Sealed, open_as_untrusted
from protocol.identity import NodeId
from protocol.machines import purchase as machine
from protocol.machines.purchase import Phase, Purchase
from protocol.matching import Candidate, match
from protocol.records import Award, Bid, BidAck, BidRejected, Countersignature, Offer, Refusal, RejectReason
from protocol.units import format_duration, format_price

log = get_logger(__name__)

COUNTERSIGNATURE_LIFETIME_MS = machine.GRANT_MS
"""As long as its purchase waits: a provider that is restarted meanwhile says whether it has taken it."""
JOBS_MAX = 1000
"""Most unfinished jobs of this daemon."""
BURST_S = 0.05
"""Changes of the book within this time are looked at together."""
RETRY_S = 1.0
SPARE_LINGER_S = 600.0
"""How long a spare keeper waits for a job's lease, and for the next job."""
SPEC_SIZE_MAX = 2**20
_NAMES = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "iris", "jade", "kelp", "lotus")

Found = dict[bytes, Candidate]


class Transfer:
    """What one step of a purchase writes and sends."""

    def __init__(self) -> None:
        self.writes: list[Callable[[Transaction], None]] = []
        self.mail: list[tuple[bytes, Sealed[Any], int]] = []


class Buyer:
    """Every purchase of this node."""

    def __init__(
        self, context: Context, outbox: Outbox, jobs: LiveJobs, book: Bookkeeper, skew: ClockSkew
    ) -> None:
        self._context = context
        self._skew = skew
        self._outbox = outbox
        self._jobs = jobs
        self._book = book
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: TaskStatus = trio.TASK_STATUS_IGNORED) -> None:
        """Buy, until cancelled; goes on with the jobs of earlier runs."""
        rows = await self._context.store.transaction(lambda tx: list(tx.jobs.where("state != ?", ENDED)))
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for row in rows:
                spec = decode_stored(row.spec, JobSpec, "job", SPEC_SIZE_MAX)
                self._start(LiveJob(row, spec, decode_stored(row.purchase, Purchase, "purchase")))
            task_status.started()
            while True:
                await self._book.changed()
                await trio.sleep(BURST_S)
                for job in self._jobs.by_id.values():
                    if job.purchase.phase is Phase.SEEKING:
                        job.woken.set()

    async def submit(self, spec: JobSpec, name: str, uid: int, gid: int) -> JobRow:
        """Store a job and begin to buy for it. Raises BadArgument."""
        if len(self._jobs.by_id) >= JOBS_MAX:
            raise BadArgument(
                f"there are {JOBS_MAX} unfinished jobs already", hint="wait for some, or cancel some"
            )
        taken = {job.row.name for job in self._jobs.by_id.values() if job.row.uid == uid}
        if name in taken:
            raise BadArgument(f"you have an unfinished job named {name!r}", hint="choose another name")
        try:
            encoded = codec.encode(spec)
        except ValueError as error:
            raise BadArgument(f"the job's description is too large: {error}") from None
        if len(encoded) > SPEC_SIZE_MAX:
            raise BadArgument(
                f"the job's description is too large: {len(encoded)} bytes, at most {SPEC_SIZE_MAX}",
                hint="put long arguments into an input file",
            )
        purchase = Purchase(max_price=spec.max_price)
        row = JobRow(
            id=random_bytes(5).hex(),
            name=name or _free_name(taken),
            uid=uid,
            gid=gid,
            state=BUYING,
            spec=encoded,
            purchase=codec.encode(purchase),
            created_at=self._context.clock.now(),
        )
        await self._context.store.transaction(lambda tx: tx.jobs.add(row))
        self._start(LiveJob(row, spec, purchase))
        return row

    async def cancel(self, job: LiveJob) -> None:
        """Stop buying for a job that has no lease yet."""
        await self._step(job, machine.Cancelled())

    def _start(self, job: LiveJob) -> None:
        self._context.keepers.expect(SPARE_LINGER_S)
        self._jobs.by_id[job.row.id] = job
        if self._nursery is not None:
            self._nursery.start_soon(self._drive, job)

    async def _drive(self, job: LiveJob) -> None:
        """Match the book while the job seeks, and let its deadlines pass."""
        while job.purchase.phase not in (Phase.GRANTED, Phase.CANCELLED):
            job.woken = trio.Event()
            try:
                if job.purchase.phase is Phase.SEEKING:
                    await self._seek(job)
                await self._wait_for_news(job)
            except StoreError as error:
                log.error("buying.not_written", job=job.row.id, problem=str(error))
                await trio.sleep(RETRY_S)

    async def _wait_for_news(self, job: LiveJob) -> None:
        deadline = job.purchase.deadline
        delay_s = float("inf") if deadline is None else max(0, deadline - self._context.clock.now()) / 1000
        with trio.move_on_after(delay_s) as waiting:
            await job.woken.wait()
        if waiting.cancelled_caught:
            await self._step(job, machine.TimePassed())

    async def _seek(self, job: LiveJob) -> None:
        now = self._context.clock.now()
        matches = match(job.spec.requirement, self._book.known_offers(), now)
        candidates = tuple(
            machine.Candidate(
                offer_id=found.offer.id,
                provider=found.offer.signer,
                listing=found.offer.record.listing,
                price=found.price,
                affordable_at=found.affordable_at,
            )
            for found in matches.candidates
        )
        total = len(matches.rejections)
        none_because = f"none of {total} offers matches (gpunode why)" if total else "no offers are known yet"
        none_because = self._skew.problem() or none_because
        found_by_id = {found.offer.id: found for found in matches.candidates}
        await self._step(job, machine.CandidatesRanked(candidates, none_because), found_by_id)

    async def _step(
        self,
        job: LiveJob,
        event: machine.PurchaseEvent,
        found: Found | None = None,
        awarded: tuple[LeaseRow, RecordRow] | None = None,
    ) -> tuple[machine.PurchaseEffect, ...]:
        """Step the job's purchase, persist, send; return the effects, for callers that answer with them.

        `found`: the offers of ranked candidates; `awarded`: the lease of a received award, and the award.
        """
        async with job.lock:
            now = self._context.clock.now()
            purchase, effects = machine.step(job.purchase, event, now)
            if purchase == job.purchase and not effects:
                return ()
            transfer = Transfer()
            for effect in effects:
                purchase = self._plan(transfer, purchase, effect, job.spec, found or {})
                if isinstance(effect, machine.Countersign) and awarded is not None:
                    # With the countersignature and not before: another award may have come in the meantime.
                    transfer.writes.insert(0, partial(_put_lease, *awarded))
            row = msgspec.structs.replace(
                job.row, purchase=codec.encode(purchase), lease=purchase.bid.lease if purchase.bid else None
            )

            def write(tx: Transaction) -> list[OutboxRow]:
                tx.jobs.change(row.id, purchase=row.purchase, lease=row.lease)
                for note in transfer.writes:
                    note(tx)
                return [self._outbox.enqueue(tx, *item) for item in transfer.mail]

            mail = await self._context.store.transaction(write)
            job.row, job.purchase = row, purchase
        job.remember(now, purchase.note)
        self._outbox.kick(*mail)
        if not isinstance(event, machine.CandidatesRanked):
            job.woken.set()  # a ranking comes from the task that would be woken
        job.note_change()
        return effects

    def _plan(
        self, transfer: Transfer, purchase: Purchase, effect: machine.PurchaseEffect, spec: JobSpec, found: Found
    ) -> Purchase:
        context, now = self._context, self._context.clock.now()
        match effect:
            case machine.PlaceBid(candidate):
                offer = found[candidate.offer_id].offer
                papers = make_bid(context, spec, found[candidate.offer_id])
                # The offer is no one lease's: other bids of ours may name it, too.
                bid = context.record_row(papers.bid, lease=papers.opened.lease, reply_to=offer.id)
                records = [bid, context.record_row(offer)]
                transfer.writes.append(lambda tx: tx.lease_secrets.put(papers.secret))
                transfer.writes.extend(partial(_put_record, record) for record in records)
                transfer.mail.append((offer.signer, papers.bid, BID_LIFETIME_MS))
                context.network.add_address(offer.signer, offer.record.addresses)
                purchase, _ = machine.step(purchase, machine.BidSigned(papers.opened), now)
            case machine.Countersign(award_id, bid):
                signed = context.seal(Countersignature(award_id=award_id, lease=bid.lease, signed_at=now))
                record = context.record_row(signed, lease=bid.lease)
                state = LeaseState.COUNTERSIGNED
                transfer.writes.append(lambda tx: tx.records.put(record))
                transfer.writes.append(
                    lambda tx: tx.leases.change(bid.lease, state=state, countersignature_id=signed.id)
                )
                transfer.mail.append((bid.provider, signed, COUNTERSIGNATURE_LIFETIME_MS))
            case machine.StartLease() | machine.Seek() | machine.RefuseAward():
                pass  # carried out by whoever brought the event
            case _:
                assert_never(effect)
        return purchase

    # --- messages of providers ------------------------------------------------------------------------------

    async def on_answer(self, row: OutboxRow, answer: Answer) -> None:
        """Take the provider's answer to a bid or a countersignature of ours."""
        if row.kind == "countersignature":
            await self._on_countersignature_answer(row, answer)
            return
        job = self._jobs.with_bid(row.record_id)
        if job is None:
            return
        if isinstance(answer, Undelivered):
            await self._step(job, machine.BidFailed(row.record_id, None, answer.problem, None))
        elif isinstance(answer.record, BidAck):
            closes_in_ms = answer.record.closes_at - answer.record.received_at
            await self._step(job, machine.BidAcknowledged(row.record_id, closes_in_ms))
        elif isinstance(answer.record, BidRejected) and answer.record.bid_id == row.record_id:
            await self.on_rejection(answer)

    async def _on_countersignature_answer(self, row: OutboxRow, answer: Answer) -> None:
        if isinstance(answer, Undelivered) or not isinstance(answer.record, Refusal):
            return  # taken, or to be given up when the grant does not come in time
        detail = answer.record.detail or answer.record.reason
        for job in self._jobs.countersigned_with(row.peer):
            bid = job.purchase.bid
            if bid is not None and answer.record.of == row.record_id:
                lease = await self._context.store.transaction(partial(_lease_of, bid.lease))
                if lease is not None and lease.countersignature_id == row.record_id:
                    await self._step(job, machine.CountersignatureRefused(bid.lease, detail))

    async def on_connect(self, provider: NodeId) -> None:
        """Bid again on the offers of a provider that was silent and has just connected."""
        for job in list(self._jobs.by_id.values()):
            if job.purchase.rests:
                await self._step(job, machine.ProviderReached(provider))

    async def on_rejection(self, sealed: Sealed[BidRejected]) -> None:
        """Take a rejection of a bid of ours: at once, or after its batch."""
        rejected = sealed.record
        job = self._jobs.with_bid(rejected.bid_id)
        if job is None or job.purchase.bid is None or job.purchase.bid.provider != sealed.signer:
            return
        now = self._context.clock.now()
        retry_in_ms = None if rejected.retry_at is None else rejected.retry_at - now
        again = "" if retry_in_ms is None else f"; to be tried again in {format_duration(max(0, retry_in_ms))}"
        detail = (
            f"{rejected.detail or 'no reason given'}; the price is {format_price(rejected.price_now)} now{again}"
        )
        event = machine.BidFailed(rejected.bid_id, rejected.reason, detail, retry_in_ms)
        await self._step(job, event)
        if rejected.reason is RejectReason.STALE_OFFER and self._nursery is not None:
            # We have missed its newer offer: gossip promises nothing.
            self._nursery.start_soon(self._book.fetch_page, sealed.signer)

    async def on_award(self, sealed: Sealed[Award]) -> Refusal | None:
        """Take an award: countersign it, or say why not. None: taken."""
        award, context = sealed.record, self._context
        job = self._jobs.with_bid(award.bid_id)
        if job is None or job.purchase.bid is None or job.purchase.bid.provider != sealed.signer:
            return Refusal(of=sealed.id, reason="not_wanted")
        bid_row, offer = await context.store.transaction(lambda tx: _bid_and_offer(context, award.bid_id, tx))
        if bid_row is None:
            return Refusal(of=sealed.id, reason="not_wanted")
        allow_simulated = job.spec.requirement.allow_simulated
        problem = objection_to_award(context, award, bid_row.record, offer, allow_simulated=allow_simulated)
        if job.purchase.phase is Phase.COUNTERSIGNED:
            taken = await context.store.transaction(partial(_lease_of, award.lease))
            # Delivered twice: the countersignature is on its way. Another award binds nobody.
            is_taken = taken is not None and taken.award_id == sealed.id
            return None if is_taken else Refusal(of=sealed.id, reason="not_wanted")
        lease = renter_lease_row(sealed, bid_row, job.row, context.clock.now())
        event = machine.AwardReceived(sealed.id, award.bid_id, award.price, problem)
        effects = await self._step(job, event, awarded=(lease, context.record_row(sealed, lease=award.lease)))
        refused = next((effect for effect in effects if isinstance(effect, machine.RefuseAward)), None)
        return Refusal(of=sealed.id, reason=refused.reason, detail=problem) if refused else None

    async def on_granted(self, job: LiveJob, lease: bytes) -> bool:
        """Note a checked grant; return whether the lease is to be started now."""
        effects = await self._step(job, machine.GrantReceived(lease))
        return any(isinstance(effect, machine.StartLease) for effect in effects)


def _put_record(record: RecordRow, tx: Transaction) -> None:
    tx.records.put(record)


def _put_lease(row: LeaseRow, record: RecordRow, tx: Transaction) -> None:
    tx.leases.put(row)
    tx.records.put(record)


def _lease_of(lease: bytes, tx: Transaction) -> LeaseRow | None:
    return tx.leases.get(lease)


def _bid_and_offer(context: Context, bid_id: bytes, tx: Transaction) -> tuple[Sealed[Bid] | None, Offer | None]:
    row = tx.records.get(bid_id)
    if row is None:
        return None, None
    bid = open_as_untrusted(row.data, Bid, context.network_id)
    offer_row = tx.records.get(bid.record.offer_id)
    if offer_row is None:
        return bid, None
    return bid, open_as_untrusted(offer_row.data, Offer, context.network_id).record


def _free_name(taken: set[str]) -> str:
    while True:
        name = f"{_NAMES[random_bytes(1)[0] % len(_NAMES)]}-{int.from_bytes(random_bytes(2), 'big') % 1000}"
        if name not in taken:
            return name
