"""Who may run a command in whose job, and when: asked of the handler alone."""

from typing import Any

import pytest

from node.daemon.handlers.execution import run_in_job
from node.daemon.state import KnownJob
from node.errors import BadArgument, Forbidden
from node.market.jobspec import JobSpec
from node.market.live_job import BUYING, ENDED
from node.rpc.method import Caller
from node.rpc.methods import jobs
from node.store import JobRow
from protocol import codec
from protocol.matching import Requirement

OWNER = 1000


class OneJob:
    """As much of a daemon as the handler looks at."""

    def __init__(self, state: str) -> None:
        spec = JobSpec(requirement=Requirement(), command=("true",), time_limit_ms=1000, max_spend=0)
        self.job = KnownJob(
            JobRow(
                id="a1",
                name="amber",
                uid=OWNER,
                gid=OWNER,
                state=state,
                spec=codec.encode(spec),
                purchase=b"",
                created_at=0,
            ),
            None,
            None,
            None,
        )

    async def find_job(self, reference: str, caller: Caller) -> KnownJob:
        assert reference == "a1"
        return self.job


async def ask(state: str, uid: int, *, is_admin: bool = False) -> list[Any]:
    caller = Caller(uid=uid, gid=uid, pid=1, is_admin=is_admin)
    daemon: Any = OneJob(state)
    return [piece async for piece in run_in_job(daemon, jobs.ExecParams(job="a1", command=("true",)), caller)]


@pytest.mark.parametrize("is_admin", [False, True])
async def test_only_its_owner_runs_commands_in_a_job(is_admin: bool) -> None:
    with pytest.raises(Forbidden, match="belongs to uid 1000"):
        await ask(BUYING, 1001, is_admin=is_admin)


@pytest.mark.parametrize("uid", [OWNER, 0])
@pytest.mark.parametrize(("state", "hint"), [(BUYING, "gpunode attach a1"), (ENDED, "gpunode logs a1")])
async def test_a_job_that_does_not_run_is_said_to(uid: int, state: str, hint: str) -> None:
    with pytest.raises(BadArgument, match="does not run") as caught:
        await ask(state, uid, is_admin=uid == 0)
    assert hint in caught.value.hint
