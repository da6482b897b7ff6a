"""Jobs in the bubblewrap tier, run for real: how they end, what limits them, what they leave behind (nothing)."""

import functools
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from sandbox_jobs import JOB_UID, LIMITS, Bench, Output, children, descriptors, groups, needs_jobs, nothing, until

from node.errors import SandboxError
from node.ports import EndReason, JobEnd, SandboxLimits
from node.sandbox import BubblewrapSandbox, available
from node.sandbox.control_group import MONITORS_MAX

pytestmark = needs_jobs
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    before = (children(), descriptors())
    yield Bench(BubblewrapSandbox(probe_uid=JOB_UID), tmp_path)
    assert (children(), descriptors()) == before
    assert groups() == []


async def test_a_job_says_hello_and_its_status_comes_back(bench: Bench) -> None:
    end, text = await bench.run("sh", "-c", "echo hello; exit 7")
    assert (end, text) == (JobEnd(EndReason.EXITED, 7), "hello\n")


async def test_stdout_and_stderr_are_kept_apart_and_stdin_is_empty(bench: Bench) -> None:
    errors = Output()
    job, output = await bench.start("sh", "-c", "cat; echo out; echo err >&2", stderr=errors.write_end)
    errors.close_write_end()
    assert (await output.rest(), await errors.rest()) == ("out\n", "err\n")
    await job.wait()
    output.close()
    errors.close()


async def test_a_job_may_open_its_output_by_name(bench: Bench) -> None:
    assert (await bench.run("sh", "-c", "echo a > /dev/stdout; echo b > /dev/stderr"))[1] == "a\nb\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
async def test_a_signal_reads_as_128_and_its_number(bench: Bench, number: signal.Signals) -> None:
    end, _ = await bench.run("sh", "-c", f"kill -{int(number)} $$")
    assert end == JobEnd(EndReason.SIGNALLED, 128 + number)


async def test_a_missing_command_is_127_and_a_closed_one_126(bench: Bench) -> None:
    assert (await bench.run("no-such-command"))[0].status == 127
    assert (await bench.run("/etc/passwd"))[0].status == 126


async def test_the_environment_is_ours_and_the_jobs_own(bench: Bench) -> None:
    os.environ["GPUNODE_TEST_SECRET"] = "of the keeper"
    try:
        _, text = await bench.run(
            "env", variables={"EPOCHS": "3", "LANG": "de_DE", "ODD": "a\nb'"}, visible_devices=("GPU-1", "GPU-2")
        )
    finally:
        del os.environ["GPUNODE_TEST_SECRET"]
    assert "GPUNODE_TEST_SECRET" not in text
    for line in ("EPOCHS=3", "LANG=de_DE", "ODD=a\nb'", "HOME=/job", "CUDA_VISIBLE_DEVICES=GPU-1,GPU-2"):
        assert line in text


async def test_python_and_bash_work_inside(bench: Bench) -> None:
    source = "import ssl, sqlite3, pwd, os; print(pwd.getpwuid(os.getuid()).pw_dir, os.path.expanduser('~'))"
    end, text = await bench.python(source)
    assert (end.status, text) == (0, "/job /job\n")
    _, text = await bench.run("bash", "-c", "echo $BASH_VERSION | wc -l; echo x | awk '{print $1}'; hostname")
    assert text == "1\nx\njob\n"


async def test_a_crash_starts_no_handler_of_the_host(bench: Bench) -> None:
    """With a core limit of 0 the kernel would still pipe the core to a program of the host, as root."""
    assert (await bench.python("import resource as r; print(r.getrlimit(r.RLIMIT_CORE))"))[1] == "(1, 1)\n"


async def test_loopback_is_up_and_private(bench: Bench) -> None:
    source = (
        "import socket; a = socket.create_server(('127.0.0.1', 8080)); "
        "b = socket.create_connection(('localhost', 8080)); print(b.getpeername())"
    )
    assert (await bench.python(source))[1] == "('127.0.0.1', 8080)\n"


async def test_files_of_the_job_belong_to_its_uid_outside(bench: Bench) -> None:
    await bench.run("sh", "-c", "echo result > out; mkdir deep; id -u > deep/uid")
    assert (bench.root / "out").read_text() == "result\n"
    assert (bench.root / "deep/uid").read_text() == "1000\n"
    assert (bench.root / "out").stat().st_uid == JOB_UID


async def test_a_fork_bomb_ends_at_its_own_limit(bench: Bench) -> None:
    source = """
import os, time
n = 0
try:
    while n < 5000:
        if os.fork() == 0:
            time.sleep(1000)
        n += 1
except BlockingIOError:
    print(n)
"""
    end, text = await bench.python(source)
    assert end.status == 0
    # The monitors' room is the job's too when no command is being executed beside it: 2 are always taken.
    assert LIMITS.pids - 1 <= int(text) <= LIMITS.pids + MONITORS_MAX - 3


async def test_a_memory_hog_is_killed_and_said_to_be_one(bench: Bench) -> None:
    end, _ = await bench.python("a = []\nwhile True: a.append(bytearray(1 << 20))")
    assert end == JobEnd(EndReason.OUT_OF_MEMORY, 137)


async def test_shared_memory_counts_as_the_jobs_memory(bench: Bench) -> None:
    big = SandboxLimits(cpus_milli=1_000, memory_mib=32, pids=24, shm_mib=1_000, tmp_mib=1_000)
    end, _ = await bench.run(
        "dd", "if=/dev/zero", "of=/dev/shm/x", "bs=1M", "count=100", "status=none", limits=big
    )
    assert end.reason is EndReason.OUT_OF_MEMORY


@pytest.mark.parametrize(("place", "size_mib"), [("/tmp", LIMITS.tmp_mib), ("/dev/shm", LIMITS.shm_mib)])
async def test_temporary_space_is_limited(bench: Bench, place: str, size_mib: int) -> None:
    end, text = await bench.run("sh", "-c", f"dd if=/dev/zero of={place}/x bs=64k; stat -c %s {place}/x")
    assert "No space left on device" in text
    assert int(text.split()[-1]) == size_mib << 20
    assert end.status == 0


async def test_cpu_time_is_limited_and_measured(bench: Bench) -> None:
    half = SandboxLimits(cpus_milli=500, memory_mib=96, pids=24, shm_mib=2, tmp_mib=4)
    source = (
        "import time\nw = time.monotonic()\nwhile time.process_time() < 0.3: pass\nprint(time.monotonic() - w)"
    )
    job, output = await bench.start("python3", "-I", "-c", source, limits=half)
    await job.wait()
    # No upper bound: the machine may be busy. But 0.3 s of CPU cannot take less than about 0.55 s at half a CPU.
    assert float(await output.rest()) > 0.45
    output.close()
    assert job.usage()["cpu_ms"] >= 300
    assert 0 < job.usage()["memory_peak_mib"] <= 96


async def test_signals_reach_the_job_and_not_its_monitors(bench: Bench) -> None:
    source = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"saved\\n"), os._exit(3)))
os.write(1, b"ready\\n")
while True: signal.pause()
"""
    job, output = await bench.start("python3", "-I", "-c", source)
    await output.until(b"ready")
    job.signal(signal.SIGTERM)
    assert await job.wait() == JobEnd(EndReason.EXITED, 3)
    assert await output.rest() == "ready\nsaved\n"
    output.close()
    job.signal(signal.SIGTERM)  # ended: nothing happens


async def test_a_job_that_ignores_sigterm_is_killed(bench: Bench) -> None:
    job, output = await bench.start("sh", "-c", "trap 'echo no' TERM; echo ready; while :; do sleep 0.01; done")
    await output.until(b"ready")
    job.signal(signal.SIGTERM)
    await output.until(b"no")
    await job.kill()
    assert await job.wait() == JobEnd(EndReason.KILLED, 137)
    await job.kill()  # idempotent
    output.close()


async def test_wait_may_be_cancelled_and_shared(bench: Bench) -> None:
    job, output = await bench.start("sleep", "1000")
    with trio.move_on_after(0.01):
        await job.wait()
    ends = []

    async def wait() -> None:
        ends.append(await job.wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await job.kill()
    assert ends == [JobEnd(EndReason.KILLED, 137)] * 2
    output.close()


async def test_what_detaches_itself_dies_with_the_job(bench: Bench) -> None:
    source = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        print("daemon", flush=True)
        time.sleep(1000)
    os._exit(0)
os.wait()
while not os.path.exists("go"): time.sleep(0.005)
"""
    job, output = await bench.start("python3", "-I", "-c", source)
    await output.until(b"daemon")
    (bench.root / "go").touch()
    assert await job.wait() == JobEnd(EndReason.EXITED, 0)
    await output.rest()  # the pipe is closed: the daemon is gone
    output.close()


async def test_freezing_stops_a_counter_and_thawing_moves_it(bench: Bench) -> None:
    source = "import itertools\nfor n in itertools.count(): open('n', 'w').write(str(n))"
    job, output = await bench.start("python3", "-I", "-c", source)
    counter = bench.root / "n"

    def count() -> int:
        return int(counter.read_text() or 0) if counter.exists() else 0

    await until(lambda: count() > 10)
    job.freeze()
    await until(job.frozen)
    stopped = count()
    await bench.run("true")  # meanwhile the machine has done a thousand times as much
    assert count() == stopped
    job.thaw()
    await until(lambda: count() > stopped)
    job.freeze()
    await job.kill()
    assert (await job.wait()).reason is EndReason.KILLED
    output.close()


async def test_execute_runs_inside_the_same_walls(bench: Bench) -> None:
    job, output = await bench.start("sh", "-c", "echo of-the-job > /tmp/mine; echo ready; exec sleep 1000")
    await output.until(b"ready")
    said = Output()
    source = (
        "cat /tmp/mine; id -u; grep -E '^(Seccomp|NoNewPrivs|CapBnd|CapEff)' /proc/self/status; hostname; pwd; "
        "echo $KEY; ls /proc/self/fd | wc -l; unshare --user true 2>/dev/null || echo no-namespace; exit 5"
    )
    null = nothing()
    assert await job.execute(("sh", "-c", source), null, said.write_end, said.write_end) == 5
    said.close_write_end()
    text = await said.rest()
    assert await job.execute(("no-such-command",), null, null, null) == 127
    lines = [line.split() for line in text.splitlines()]
    assert lines[:2] == [["of-the-job"], ["1000"]]
    assert sorted(lines[2:7]) == sorted(
        [
            ["CapEff:", "0" * 16],
            ["CapBnd:", "0" * 16],
            ["NoNewPrivs:", "1"],
            ["Seccomp:", "2"],
            ["Seccomp_filters:", "1"],
        ]
    )
    assert lines[7:] == [["job"], ["/job"], [], ["4"], ["no-namespace"]]
    await job.kill()
    said.close()
    output.close()
    with pytest.raises(SandboxError, match="ended"):
        await job.execute(("true",), null, null, null)
    os.close(null)


async def test_an_executed_command_ends_with_its_caller_and_with_the_job(bench: Bench) -> None:
    job, output = await bench.start("sleep", "1000")
    said = Output()
    null = nothing()
    statuses = []

    async def execute() -> None:
        statuses.append(await job.execute(("sh", "-c", "echo ready; sleep 1000"), null, said.write_end, null))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(execute)
        await said.until(b"ready")
        nursery.cancel_scope.cancel()
    said.text = b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(execute)
        await said.until(b"ready")
        await job.kill()
    assert statuses == [137]
    said.close_write_end()
    assert await said.rest() == "ready\n"
    said.close()
    output.close()
    os.close(null)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workdir": "/job/missing"}, "chdir"),
        ({"workdir": "/job/../etc"}, "not below /job"),
        ({"environment": "pytorch"}, "no environment 'pytorch'"),
        ({"uid": 0}, "never runs as root"),
        ({"uid": JOB_UID + 1}, "does not belong to uid"),
        ({"root": Path("/nonexistent")}, "cannot be opened"),
        ({"name": "../up"}, "no name for a job"),
        ({"device_nodes": ("/dev/no-such-gpu",)}, "cannot be shown"),
        ({"read_only_mounts": (("/no/such/file", "/usr/lib/x"),)}, "no/such/file"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    bench: Bench, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(SandboxError, match=message):
        await bench.start("true", **changes)


async def test_a_cancelled_start_leaves_nothing(bench: Bench) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await bench.start("sleep", "1000")
    assert scope.cancelled_caught


async def test_a_name_in_use_is_refused_and_the_running_job_is_not_harmed(bench: Bench) -> None:
    job, output = await bench.start("sh", "-c", "echo ready; sleep 1000", name="test-twice")
    await output.until(b"ready")
    with pytest.raises(SandboxError, match="exists already"):
        await bench.start("true", name="test-twice")
    assert await job.execute(("true",), 0, 1, 2) == 0
    await job.kill()
    output.close()


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """A directory that every uid can reach, which pytest's are not."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def test_configured_paths_devices_and_mounts_are_shown_read_only(bench: Bench, public_dir: Path) -> None:
    trainer = public_dir / "tools/bin/trainer"
    trainer.parent.mkdir(parents=True)
    trainer.write_text("#!/bin/sh\necho trained\n")
    trainer.chmod(0o755)
    library = public_dir / "library"
    library.write_text("of the driver\n")
    bench.sandbox = BubblewrapSandbox(environments={"lab": (public_dir / "tools",)})
    _, text = await bench.run(
        *(
            "sh",
            "-c",
            'trainer; cat /run/driver; echo x > /run/driver; echo x > "$0"; stat -c %F /dev/loop-control',
        ),
        str(trainer),
        environment="lab",
        device_nodes=("/dev/loop-control",),
        read_only_mounts=((str(library), "/run/driver"),),
    )
    lines = text.splitlines()
    assert (lines[:2], lines[-1]) == (["trained", "of the driver"], "character special file")
    assert text.count("Read-only file system") == 2
    assert library.read_text() == "of the driver\n"


async def test_a_configured_path_that_jobs_cannot_reach_is_said(bench: Bench, tmp_path: Path) -> None:
    lab = tmp_path / "closed" / "lab"
    lab.mkdir(parents=True)
    lab.parent.chmod(0o700)
    bench.sandbox = BubblewrapSandbox(environments={"lab": (lab,)})
    with pytest.raises(SandboxError, match="Permission denied") as caught:
        await bench.start("true", environment="lab")
    assert "chmod" in caught.value.hint


async def test_the_probe_works_here_and_the_tier_is_listed(bench: Bench) -> None:
    probe = await bench.sandbox.probe()  # type: ignore[attr-defined]
    assert probe.works, probe.proves
    assert [sandbox.tier for sandbox in await available(probe_uid=JOB_UID)] == ["bubblewrap"]
    tiers = [sandbox.tier for sandbox in await available(probe_uid=JOB_UID, allow_unsafe=True)]
    assert tiers == ["bubblewrap", "unsafe-process"]


async def test_a_probe_without_bubblewrap_fails_and_says_what_to_install(bench: Bench) -> None:
    probe = await BubblewrapSandbox(bwrap="/nonexistent/bwrap").probe()
    assert (probe.works, "bwrap" in probe.proves) == (False, True)


KEEPER = """
import os, sys, trio
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from sandbox_jobs import Bench
from node.sandbox import BubblewrapSandbox
async def main():
    bench = Bench.__new__(Bench)
    bench.sandbox, bench.uid, bench.root = BubblewrapSandbox(), int(sys.argv[2]), Path(sys.argv[1])
    job, output = await bench.start("sh", "-c", "echo ready; exec sleep 1000", name=sys.argv[4])
    await output.until(b"ready")
    if sys.argv[5] == "frozen":
        job.freeze()
    os.write(1, b"running\\n")
    await trio.sleep_forever()
trio.run(main)
"""


@pytest.mark.parametrize("state", ["frozen", "running"])
async def test_the_job_of_a_keeper_killed_by_force_is_swept(bench: Bench, state: str) -> None:
    name = f"test-{os.getpid()}-orphan"
    argv = [sys.executable, "-c", KEEPER, str(bench.root), str(JOB_UID), str(Path(__file__).parent), name, state]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    said = Output()
    async with trio.open_nursery() as nursery:
        run = functools.partial(trio.run_process, argv, stdout=said.write_end, env=environment, check=False)
        keeper: trio.Process = await nursery.start(run)
        said.close_write_end()
        await said.until(b"running")
        assert groups() != []
        keeper.kill()
    said.close()
    await bench.sandbox.sweep(name)  # type: ignore[attr-defined]
    assert groups() == []
    await bench.sandbox.sweep(name)  # type: ignore[attr-defined]


async def test_a_job_outlives_the_thread_pools_idle_time(bench: Bench) -> None:
    """bubblewrap dies with the *thread* that started it, and trio's idle threads end after 10 s."""
    await trio.to_thread.run_sync(lambda: None)
    end, text = await bench.run("sh", "-c", "sleep 15; echo lived")
    assert (end.status, text) == (0, "lived\n")
