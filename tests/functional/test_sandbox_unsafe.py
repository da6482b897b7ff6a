"""The unsafe-process tier, run for real, with a control group where there is one and without."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_jobs import JOB_UID, Bench, children, descriptors, groups, needs_jobs, nothing, until

from node.errors import SandboxError
from node.ports import EndReason, JobEnd, SandboxLimits
from node.sandbox import UnsafeProcessSandbox

UID = JOB_UID if os.geteuid() == 0 else os.geteuid()


@pytest.fixture(params=["polled", pytest.param("grouped", marks=needs_jobs)])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    before = (children(), descriptors())
    polled = request.param == "polled"
    yield Bench(UnsafeProcessSandbox(polled=polled, probe_uid=UID), tmp_path, UID)
    assert (children(), descriptors()) == before
    if not polled:
        assert groups() == []


async def test_a_job_runs_as_its_uid_in_its_directory_with_its_variables(bench: Bench) -> None:
    (bench.root / "src").mkdir()
    os.chown(bench.root / "src", UID, -1)
    end, text = await bench.run(
        *("sh", "-c", "id -u; echo $KEY; echo x > out; ls /proc/self/fd | wc -l; exit 4"),
        variables={"KEY": "a b"},
        workdir="/job/src",
    )
    assert (end, text) == (JobEnd(EndReason.EXITED, 4), f"{UID}\na b\n4\n")
    assert (bench.root / "src/out").stat().st_uid == UID


async def test_ends_are_told_exactly(bench: Bench) -> None:
    assert (await bench.run("sh", "-c", "kill -9 $$"))[0] == JobEnd(EndReason.SIGNALLED, 137)
    assert (await bench.run("no-such-command"))[0] == JobEnd(EndReason.EXITED, 127)
    assert (await bench.run("/etc/passwd"))[0] == JobEnd(EndReason.EXITED, 126)
    # Python ignores SIGPIPE: the job must not inherit that.
    assert (await bench.run("sh", "-c", "kill -PIPE $$"))[0] == JobEnd(EndReason.SIGNALLED, 128 + signal.SIGPIPE)


async def test_signals_kill_and_leftovers(bench: Bench) -> None:
    script = "trap 'echo no' TERM; sleep 1000 & echo ready; while :; do sleep 0.01; done"
    job, output = await bench.start("sh", "-c", script)
    await output.until(b"ready")
    job.signal(signal.SIGTERM)
    await output.until(b"no")
    await job.kill()
    assert await job.wait() == JobEnd(EndReason.KILLED, 137)
    await output.rest()  # nobody holds the pipe any more
    output.close()


async def test_what_the_first_process_leaves_is_killed(bench: Bench) -> None:
    job, output = await bench.start("sh", "-c", "sleep 1000 & echo ready")
    assert await job.wait() == JobEnd(EndReason.EXITED, 0)
    assert await output.rest() == "ready\n"
    output.close()


async def test_freezing_and_executing(bench: Bench) -> None:
    job, output = await bench.start("sh", "-c", "echo ready; exec sleep 1000")
    await output.until(b"ready")
    null = nothing()
    assert await job.execute(("sh", "-c", "exit 6"), null, null, null) == 6
    job.freeze()
    await until(job.frozen)
    job.thaw()
    await until(lambda: not job.frozen())
    await job.kill()
    with pytest.raises(SandboxError, match="ended"):
        await job.execute(("true",), null, null, null)
    os.close(null)
    output.close()


async def test_a_memory_hog_is_ended(bench: Bench) -> None:
    limits = SandboxLimits(cpus_milli=1_000, memory_mib=64, pids=64, shm_mib=1, tmp_mib=1)
    source = "import time\na = bytearray(200 << 20)\nwhile True: time.sleep(1)"
    end, text = await bench.run("python3", "-I", "-c", source, limits=limits)
    assert end.reason is EndReason.OUT_OF_MEMORY or "MemoryError" in text


async def test_start_failures_leave_nothing(bench: Bench) -> None:
    with pytest.raises(SandboxError, match="could not be started"):
        await bench.start("true", workdir="/job/missing")
    with pytest.raises(SandboxError, match="cannot be opened"):
        await bench.start("true", root=Path("/nonexistent"))
    with pytest.raises(SandboxError, match="not below"):
        await bench.start("true", workdir="/etc")


async def test_the_probe_says_that_it_proves_nothing(bench: Bench) -> None:
    probe = await bench.sandbox.probe()  # type: ignore[attr-defined]
    assert probe.works, probe.proves
    assert "nothing keeps it" in probe.proves
    await bench.sandbox.sweep("test-nothing")  # type: ignore[attr-defined]
