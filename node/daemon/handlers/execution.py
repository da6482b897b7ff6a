"""jobs.exec: another command in a running job's sandbox, through both keepers and their tunnel.

Nothing is buffered: output that the caller does not take holds the command back. Refuses everybody but the job's
owner, administrators included: what is in a sandbox is its owner's business.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from node.daemon.state import Daemon, KnownJob
from node.daemon.views import job_state
from node.errors import BadArgument, Forbidden, JobError
from node.lease.execution import execute
from node.rpc.method import Caller
from node.rpc.methods import jobs as api


async def run_in_job(state: Daemon, params: api.ExecParams, caller: Caller) -> AsyncGenerator[api.ExecPiece, None]:
    """Run the command, and yield what it writes and its exit status."""
    job = await state.find_job(params.job, caller)
    if caller.uid not in (job.row.uid, 0):
        raise Forbidden(
            f"job {params.job!r} belongs to uid {job.row.uid}: only its owner runs commands in it",
            hint="ask its owner, or call as root",
        )
    lease = _running_lease(job)
    async with execute(state.context.keepers.socket_path(lease), params.command) as execution:
        await execution.send_input(b"")
        async with aclosing(execution.output()) as pieces:
            async for piece in pieces:
                yield api.ExecPiece(stream=api.LogStream(piece.source.value), data=piece.data)
        ended = execution.ended
    if ended is None or ended.status < 0:
        detail = ended.detail if ended is not None else "its keeper said nothing more"
        raise JobError(f"the command was not run to its end: {detail}", hint=f"see: gpunode jobs {job.row.id}")
    yield api.ExecPiece(exit_status=ended.status)


def _running_lease(job: KnownJob) -> bytes:
    """Return the lease in which the job runs. Raises BadArgument."""
    where = job_state(job)
    if job.lease is None or where is not api.JobState.RUNNING:
        raise BadArgument(
            f"job {job.row.name} does not run: it is {where.value}",
            hint=f"see what it wrote: gpunode logs {job.row.id}"
            if where.is_final
            else f"wait until it runs: gpunode attach {job.row.id}",
        )
    return job.lease.lease
