"""Another command in a running job's sandbox, through both keepers."""

import os
from contextlib import aclosing

import pytest
from support.keeper_pair import Pair, pair

from node.lease.execution import ExecutionEnded, Output, execute

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="keepers of a provider run jobs under other uids")

SLEEPING = ("sh", "-c", "echo up; echo secret > file; sleep 600")


async def run(keepers: Pair, *argv: str, data: bytes = b"") -> tuple[ExecutionEnded | None, bytes, bytes]:
    outputs = {Output.STDOUT: b"", Output.STDERR: b""}
    async with execute(keepers.renter.socket, argv) as execution:
        if data:
            await execution.send_input(data)
        await execution.send_input(b"")
        async for piece in execution.output():
            outputs[piece.source] += piece.data
        return execution.ended, outputs[Output.STDOUT], outputs[Output.STDERR]


async def test_commands_run_beside_the_job() -> None:
    with pair(SLEEPING) as keepers:
        await keepers.start()
        await keepers.renter.wait_for(lambda status: status.stdout_size > 0)
        assert await run(keepers, "cat", "/job/file") == (ExecutionEnded(0), b"secret\n", b"")
        big = os.urandom(300_000)
        assert await run(keepers, "sh", "-c", "cat; echo no >&2; exit 9", data=big) == (
            ExecutionEnded(9),
            big,
            b"no\n",
        )
        async with (
            execute(keepers.renter.socket, ("sh", "-c", "echo up; sleep 600")) as execution,
            aclosing(execution.output()) as pieces,
        ):
            assert (await anext(pieces)).data == b"up\n"
        # Whoever goes away ends the command, and not the tunnel.
        for _ in range(10):
            assert await run(keepers, "true") == (ExecutionEnded(0), b"", b"")
        ended, _out, _err = await run(keepers, "/no/such/program")
        assert ended is not None
        assert ended.status != 0
        async with execute(keepers.provider.socket, ("id",)) as execution:
            assert [piece async for piece in execution.output()] == []
            assert execution.ended is not None
            assert "only the job's renter" in execution.ended.detail
