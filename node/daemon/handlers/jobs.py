"""jobs.*: submitting, watching, cancelling."""

from collections.abc import AsyncGenerator
from contextlib import suppress

import msgspec
import trio

from node.daemon.handlers.execution import run_in_job
from node.daemon.handlers.market import priced
from node.daemon.state import Daemon, KnownJob
from node.daemon.views import (
    job_entry,
    job_state,
    lease_cost,
    rejections_of,
    requirement_of,
    rpc_requirement,
    spec_of,
)
from node.errors import BadArgument, NoMatch
from node.jobs.logs import LogReader
from node.lease.link import LinkError
from node.market.jobspec import JobSpec, SpecInput, SpecOutput, with_room_for_inputs
from node.rpc.method import Caller, Handlers
from node.rpc.methods import jobs as api
from node.store import RecordRow, Transaction
from protocol.envelope import open_as_untrusted
from protocol.errors import ProtocolError
from protocol.identity import peer_id
from protocol.records import Offer
from protocol.units import Price, cost

LOG_CHUNK_MAX = 64 * 1024
LOG_POLL_S = 0.05
EVENT_MIN_INTERVAL_S = 0.05
PROGRESS_INTERVAL_S = 0.5
LOG_DIRECTORY = "log"


def handlers(state: Daemon) -> Handlers:
    """Return the group's handlers."""
    return {
        api.RUN.name: lambda params, caller: _run(state, params, caller),
        api.LIST.name: lambda params, caller: _list(state, params, caller),
        api.SHOW.name: lambda params, caller: _show(state, params, caller),
        api.CANCEL.name: lambda params, caller: _cancel(state, params, caller),
        api.WHY.name: lambda params, caller: _why(state, params, caller),
        api.FETCH.name: lambda params, caller: _fetch(state, params, caller),
        api.LOGS.name: lambda params, caller: _logs(state, params, caller),
        api.EXEC.name: lambda params, caller: run_in_job(state, params, caller),
        api.EVENTS.name: lambda params, caller: _events(state, params, caller),
    }


async def _run(state: Daemon, params: api.RunParams, caller: Caller) -> api.RunResult:
    if state.is_draining:
        raise BadArgument("the daemon is draining: it takes no new jobs")
    if params.time_limit_ms == 0:
        raise BadArgument("a job of no time at all can't run", hint="give it some with --time")
    wanted = requirement_of(params.requirement, params.time_limit_ms, state.context.node, params.environment)
    wanted = with_room_for_inputs(wanted, sum(item.size for item in params.inputs))
    matches = priced(state, wanted)
    if wanted.max_price is None:
        if not matches.candidates:
            raise NoMatch(
                f"none of {len(matches.rejections)} known offers matches, so there is no price to take as the cap",
                hint="see `gpunode why`, or name the highest price with --max-price and the job will wait",
            )
        wanted = msgspec.structs.replace(wanted, max_price=matches.candidates[0].price)
    cap = cost(Price(wanted.max_price or 0), wanted.quantity, params.time_limit_ms)
    spec = JobSpec(
        requirement=wanted,
        command=params.command,
        environment=params.environment,
        variables=params.variables,
        workdir=params.workdir,
        inputs=tuple(
            SpecInput(item.source, item.destination, bytes.fromhex(item.manifest), item.size, item.ignore)
            for item in params.inputs
        ),
        outputs=tuple(SpecOutput(item.remote, item.local) for item in params.outputs),
        time_limit_ms=params.time_limit_ms,
        max_spend=cap if params.max_spend is None else params.max_spend,
        prepay_ms=params.prepay_ms,
    )
    row = await state.market.buyer.submit(spec, params.name, caller.uid, caller.gid)
    return api.RunResult(job=row.id, name=row.name)


async def _list(state: Daemon, params: api.JobsListParams, caller: Caller) -> api.JobsListResult:
    show_all = params.all_users and caller.is_admin
    rows = await state.context.store.transaction(lambda tx: list(tx.jobs.all(order_by="created_at desc")))
    entries = []
    for row in rows:
        if not (show_all or row.uid == caller.uid):
            continue
        if params.unfinished and row.id not in state.market.jobs.by_id:
            continue
        entries.append(await entry_of(state, await state.known_job(row)))
        if len(entries) >= params.limit:
            break
    return api.JobsListResult(jobs=tuple(entries))


async def entry_of(state: Daemon, job: KnownJob) -> api.JobEntry:
    """Return a job in one line, with the model of its lease's offer."""
    return job_entry(job, await _model_of(state, job))


async def _model_of(state: Daemon, job: KnownJob) -> str:
    if job.lease is None:
        return ""
    bid_id = job.lease.bid_id
    row = await state.context.store.transaction(lambda tx: _offer_of(tx, bid_id))
    with suppress(ProtocolError):
        if row is not None:
            return open_as_untrusted(row.data, Offer, state.context.network_id).record.device.model
    return ""


def _offer_of(tx: Transaction, bid_id: bytes) -> RecordRow | None:
    bid = tx.records.get(bid_id)
    return None if bid is None or bid.reply_to is None else tx.records.get(bid.reply_to)


async def _show(state: Daemon, params: api.JobParams, caller: Caller) -> api.JobDetail:
    job = await state.find_job(params.job, caller)
    spec = spec_of(job)
    return api.JobDetail(
        entry=await entry_of(state, job),
        requirement=rpc_requirement(spec.requirement),
        environment=spec.environment,
        variables=tuple(spec.variables),
        workdir=spec.workdir,
        inputs=tuple(
            api.JobInput(
                source=item.source,
                destination=item.destination,
                manifest=item.manifest.hex(),
                size=item.size,
                ignore=item.ignore,
            )
            for item in spec.inputs
        ),
        outputs=_outputs(job),
        time_limit_ms=spec.time_limit_ms,
        prepay_ms=spec.prepay_ms,
        attempts=await _attempts(state, job),
        results_until=_results_until(job),
    )


async def _attempts(state: Daemon, job: KnownJob) -> tuple[api.JobAttempt, ...]:
    lease, status = job.lease, job.status
    if lease is None or job.row.state == "buying":
        return ()
    return (
        api.JobAttempt(
            lease=lease.lease.hex(),
            provider=peer_id(lease.peer),
            model=await _model_of(state, job),
            price=lease.price,
            quantity=lease.quantity,
            isolation=spec_of(job).requirement.isolation,
            simulated=lease.simulated,
            signed_at=lease.created_at,
            until=lease.until,
            started_at=(status.started_at or None) if status is not None else None,
            ended_at=lease.ended_at or None,
            metered_ms=status.metered_ms if status is not None else 0,
            paid=status.voucher_amount if status is not None else 0,
            cost=lease_cost(lease, status) if status is not None else 0,
            outcome=lease.outcome,
            receipt=lease.receipt_id.hex() if lease.receipt_id is not None else None,
        ),
    )


def _results_until(job: KnownJob) -> int | None:
    """Return until when the provider keeps results that are not here yet; None when all of them are."""
    if job.status is None or job.status.collected or all(output.collected for output in _outputs(job)):
        return None
    return job.status.kept_until or None


def _outputs(job: KnownJob) -> tuple[api.OutputEntry, ...]:
    known = {output.path: output for output in job.status.outputs} if job.status is not None else {}
    entries = []
    for wanted in spec_of(job).outputs:
        output = known.get(wanted.remote)
        manifest = output.manifest if output is not None else None
        entries.append(
            api.OutputEntry(
                remote=wanted.remote,
                local=wanted.local,
                collected=output is not None and output.fetched,
                missing=output is not None and manifest is None and job_state(job).is_final,
                manifest=manifest.hex() if manifest is not None else None,
                size=output.size if output is not None and manifest is not None else None,
            )
        )
    return tuple(entries)


async def _cancel(state: Daemon, params: api.JobParams, caller: Caller) -> api.CancelResult:
    job = await state.find_job(params.job, caller)
    changed = job.live is not None and not job_state(job).is_final
    if job.live is not None and changed:
        await state.market.renter.cancel(job.live)
        job = await state.known_job(job.live.row)
    return api.CancelResult(job=job.row.id, state=job_state(job), changed=changed)


async def _why(state: Daemon, params: api.WhyParams, caller: Caller) -> api.WhyResult:
    if (params.job is None) == (params.requirement is None):
        raise BadArgument("name a job or a requirement, one of them")
    history: tuple[api.WhyStep, ...] = ()
    if params.requirement is not None:
        wanted = requirement_of(params.requirement, 0, state.context.node)
        waits = True
        summary = ""
    else:
        job = await state.find_job(params.job or "-", caller)
        wanted = spec_of(job).requirement
        entry = await entry_of(state, job)
        waits = entry.state is api.JobState.BUYING
        summary = f"the job is {entry.state.value}" + (f" ({entry.outcome})" if entry.outcome else "")
        summary += f": {entry.detail}" if entry.detail else ""
        if job.live is not None:
            history = tuple(api.WhyStep(at=at, detail=text[:1024]) for at, text in job.live.history)
    matches = priced(state, wanted)
    rejections = rejections_of(matches)
    if params.requirement is not None:
        total = len(matches.candidates) + len(matches.rejections)
        summary = f"{len(matches.candidates)} of {total} known offers match"
    advice = ""
    if waits and not matches.candidates:
        advice = next((f"change {item.change}: {item.detail}" for item in rejections if item.change), "")
        skew = state.market.skew.problem()
        advice = (f"set the clock: {skew}" if skew else advice) or (
            "wait: the matching devices are taken"
            if rejections
            else "connect to a provider: gpunode peers connect"
        )
    return api.WhyResult(
        summary=summary, advice=advice, matching=len(matches.candidates), rejections=rejections, history=history
    )


async def _fetch(state: Daemon, params: api.JobParams, caller: Caller) -> api.FetchResult:
    job = await state.find_job(params.job, caller)
    outputs = _outputs(job)
    collecting = job.live is not None and not all(output.collected for output in outputs)
    if job.live is not None and job.live.lease is not None:
        with suppress(LinkError):  # a keeper that is being started tries at once anyway
            await state.market.leases.collect(job.live.lease)
    return api.FetchResult(job=job.row.id, outputs=outputs, collecting=collecting)


async def _logs(state: Daemon, params: api.LogsParams, caller: Caller) -> AsyncGenerator[api.LogChunk, None]:
    job = await state.find_job(params.job, caller)
    offsets = {api.LogStream.STDOUT: params.stdout_offset, api.LogStream.STDERR: params.stderr_offset}
    while True:
        job = await state.known_job(job.row)
        is_final = job_state(job).is_final
        sent = False
        if job.lease is not None:
            directory = state.context.lease_directory(job.lease.lease) / LOG_DIRECTORY
            for stream in params.streams:
                reader = LogReader(directory, stream.value)
                piece = await trio.to_thread.run_sync(reader.read, offsets[stream], LOG_CHUNK_MAX)
                if piece.data:
                    offsets[stream] = piece.offset + len(piece.data)
                    sent = True
                    yield api.LogChunk(stream=stream, offset=piece.offset, data=piece.data)
        if sent:
            continue
        if is_final or not params.follow:
            return
        await trio.sleep(LOG_POLL_S)


async def _events(state: Daemon, params: api.JobParams, caller: Caller) -> AsyncGenerator[api.JobEvent, None]:
    job = await state.find_job(params.job, caller)
    last: api.JobEvent | None = None
    while True:
        job = await state.known_job(job.row)
        event = api.JobEvent(
            at=state.context.clock.now(),
            entry=await entry_of(state, job),
            progress=_progress(job),
            receipt=_receipt(job),
        )
        if last is None or msgspec.structs.replace(event, at=last.at) != last:
            yield event
            last = event
        if event.entry.state.is_final:
            return
        await trio.sleep(EVENT_MIN_INTERVAL_S)
        await _wait_for_change(job)


async def _wait_for_change(job: KnownJob) -> None:
    if job.live is None:
        return
    with trio.move_on_after(PROGRESS_INTERVAL_S):
        await job.live.changed()


def _receipt(job: KnownJob) -> str | None:
    if job.lease is None or job.lease.receipt_id is None:
        return None
    return job.lease.receipt_id.hex()


def _progress(job: KnownJob) -> api.JobProgress | None:
    status = job.status
    if status is None:
        return None
    if job_state(job) is api.JobState.STAGING and status.staging_bytes:
        return api.JobProgress(done=status.staged_bytes, total=status.staging_bytes)
    if job_state(job) is api.JobState.COLLECTING and status.collecting_bytes:
        return api.JobProgress(done=status.collected_bytes, total=status.collecting_bytes)
    return None
