import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.rpc_daemon import CannedDaemon
from support.rpc_samples import ENTRY, PRICE, RESULTS, SETTLED

from node.jobs.tree import scan_tree
from node.rpc.api import jobs, market

GPUNODE = (sys.executable, "-c", "from node.cli import main; main()")
LOG = b"epoch 1\n\xff\x00raw\n"


class Bench:
    """A folder, a canned daemon, and gpunode as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.daemon = CannedDaemon()
        self.folder = folder
        self.socket = folder / "rpc.sock"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("GPUNODE_")}
        self.environment = {**inherited, "GPUNODE_SOCKET": str(self.socket), "TERM": "xterm", "COLUMNS": "150",
                            "PYTHONPATH": str(Path(__file__).parents[2])}  # fmt: skip

    def run(self, *arguments: str, daemon: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Run gpunode to its end, without a terminal."""
        with self.daemon.in_thread(self.socket) if daemon else contextlib.nullcontext():
            return subprocess.run(
                [*GPUNODE, *arguments], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
                capture_output=True, check=False, timeout=60,
            )  # fmt: skip

    @contextlib.contextmanager
    def process(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start gpunode; it is killed at the end if it still runs."""
        with subprocess.Popen(
            [*GPUNODE, *arguments], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()

    def ending(self, **changes: Any) -> None:
        """Let the job end with these changes of its last event's entry."""
        entry = msgspec.structs.replace(SETTLED.entry, **changes)
        self.daemon.replies["jobs.events"] = (msgspec.structs.replace(SETTLED, entry=entry),)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_cli_run_submits_what_was_typed(bench: Bench) -> None:
    (bench.folder / "code").mkdir()
    (bench.folder / "code/train.py").write_text("print(1)")
    (bench.folder / "data.csv").write_text("1,2\n")
    ran = bench.run(
        "run", "--yes", "--name", "t", "--gpus", "A100:2", "--max-price", "0.36", "--max-spend", "5",
        "--time", "2h", "--prepay", "1h", "-w", "code", "-i", "data.csv:in/d.csv", "-o", "results",
        "-o", "ckpt:/tmp/ckpt-here", "-e", "A=b", "-e", "HOME", "--", "python", "train.py", "--yes", "-x",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    params = bench.daemon.params_of("jobs.run")
    code, data = scan_tree(bench.folder / "code").manifest, scan_tree(bench.folder / "data.csv").manifest
    assert params == jobs.RunParams(
        requirement=market.Requirement(quantity=2, model="A100", max_price=100_000),
        command=("python", "train.py", "--yes", "-x"),
        name="t",
        variables={"A": "b", "HOME": os.environ["HOME"]},
        inputs=(
            jobs.JobInput(source=f"{bench.folder}/code", destination=".", manifest=code.id.hex(), size=code.size),
            jobs.JobInput(
                source=f"{bench.folder}/data.csv", destination="in/d.csv", manifest=data.id.hex(), size=data.size
            ),
        ),
        outputs=(
            jobs.JobOutput(remote="results", local=f"{bench.folder}/results"),
            jobs.JobOutput(remote="ckpt", local="/tmp/ckpt-here"),
        ),
        time_limit_ms=7_200_000,
        max_spend=5_000_000_000,
        prepay_ms=3_600_000,
    )


def test_cli_run_prints_the_job_s_bytes_and_what_it_cost(bench: Bench) -> None:
    ran = bench.run("run", "--yes", "--", "python", "train.py")
    assert ran.returncode == 0
    assert ran.stdout == LOG
    told = ran.stderr.decode()
    assert "warming up\n" in told
    assert "A100-SXM4" in told
    assert "never more than $0.399999 in all" in told
    assert told.splitlines()[-1] == "train: completed, ran 1m 00s, cost $0.006666, receipt abababababab"
    params = bench.daemon.params_of("jobs.run")
    assert params.requirement.max_price == PRICE, "the plan's price is the cap"
    assert params.max_spend == PRICE * 3600
    assert params.time_limit_ms == 3_600_000


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"exit_status": 3}, 3, "completed with exit status 3"),
        ({"exit_status": 137}, 137, "exit status 137"),
        ({"exit_status": 127}, 127, "exit status 127"),
        ({"outcome": "time_limit", "exit_status": 143, "state": jobs.JobState.FAILED}, 124, "time limit"),
        ({"outcome": "keeper_died", "exit_status": None, "state": jobs.JobState.FAILED, "detail": "it died"}, 125,
         "it died\n  hint: gpunode why j7f3k2"),
        ({"outcome": "cancelled", "exit_status": None, "state": jobs.JobState.FAILED}, 125, "cancelled"),
        ({"simulated": True}, 0, "SIMULATED"),
    ],
)  # fmt: skip
def test_cli_run_exits_as_the_job_did(bench: Bench, changes: dict[str, Any], status: int, says: str) -> None:
    bench.ending(**changes)
    ran = bench.run("attach", "-")
    assert ran.returncode == status
    assert says in ran.stderr.decode()


def test_cli_run_json_is_one_object_and_logs_go_to_stderr(bench: Bench) -> None:
    ran = bench.run("run", "--yes", "--json", "--", "true")
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["entry"]["outcome"] == "completed"
    assert LOG in ran.stderr


def test_cli_run_detached_prints_the_id(bench: Bench) -> None:
    ran = bench.run("run", "-d", "--yes", "--", "true")
    assert (ran.returncode, ran.stdout) == (0, b"j7f3k2\n")
    ran = bench.run("run", "-d", "--yes", "--json", "--", "true")
    assert json.loads(ran.stdout) == {"job": "j7f3k2", "name": "train"}


def test_cli_run_without_a_terminal_wants_yes(bench: Bench) -> None:
    ran = bench.run("run", "--", "true")
    assert ran.returncode == 125
    assert b"add --yes" in ran.stderr
    assert "jobs.run" not in [name for name, _, _ in bench.daemon.asked]


@pytest.mark.parametrize(("answer", "status", "bought"), [(b"n\n", 125, False), (b"y\n", 0, True)])
def test_cli_run_asks_on_a_terminal(bench: Bench, answer: bytes, status: int, bought: bool) -> None:
    ours, theirs = pty.openpty()
    with (
        bench.daemon.in_thread(bench.socket),
        subprocess.Popen(
            [*GPUNODE, "run", "--", "true"],
            env=bench.environment,
            stdin=theirs,
            stderr=theirs,
            stdout=subprocess.PIPE,
            cwd=bench.folder,
        ) as process,
    ):
        os.close(theirs)
        seen = b""
        while b"[y/N]" not in seen:
            seen += os.read(ours, 65_536)
        os.write(ours, answer)
        with contextlib.suppress(OSError):  # the terminal is gone with its last process
            while data := os.read(ours, 65_536):
                seen += data
        assert process.wait(60) == status
    os.close(ours)
    assert b"A100-SXM4" in seen
    assert (b"nothing was bought" in seen) is not bought
    assert ("jobs.run" in [name for name, _, _ in bench.daemon.asked]) is bought


def test_cli_run_dry_run_buys_nothing(bench: Bench) -> None:
    ran = bench.run("run", "--dry-run", "--json", "--", "true")
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["max_price"] == PRICE
    assert b"A100-SXM4" in bench.run("run", "--dry-run", "--", "true").stdout
    assert {name for name, _, _ in bench.daemon.asked} == {"quote"}


def test_cli_run_without_a_match_fails_unless_a_price_is_named(bench: Bench) -> None:
    bench.daemon.replies["quote"] = msgspec.structs.replace(
        RESULTS["quote"], candidates=(), max_price=None, max_spend=None
    )
    ran = bench.run("run", "--yes", "--", "true")
    assert ran.returncode == 125
    assert b"3 offers have 24 GiB or less" in ran.stderr
    assert b"--gpu-memory 24G" in ran.stderr
    ran = bench.run("run", "--yes", "-d", "--max-price", "1", "--", "true")
    assert ran.returncode == 0
    assert b"will wait" in ran.stderr


def test_cli_run_reads_a_job_file(bench: Bench) -> None:
    (bench.folder / "there").mkdir()
    (bench.folder / "there/data").mkdir()
    (bench.folder / "here").mkdir()
    (bench.folder / "there/job.toml").write_text(
        'name = "f"\ngpus = 2\ninput = ["data"]\noutput = ["out"]\nmax-price = 0.36\n'
        'command = ["echo", "hi"]\n[env]\nA = "file"\nB = "file"\n'
    )
    ran = bench.run("run", "--yes", "-f", "there/job.toml", "-e", "A=flag", "-i", "here")
    assert ran.returncode == 0, ran.stderr
    params = bench.daemon.params_of("jobs.run")
    assert params.command == ("echo", "hi")
    assert params.variables == {"A": "flag", "B": "file"}
    assert [item.source for item in params.inputs] == [f"{bench.folder}/here"], "flags win"
    assert [item.local for item in params.outputs] == [f"{bench.folder}/there/out"], "relative to the file"
    ran = bench.run("run", "--yes", "-f", "there/job.toml", "--", "other")
    assert bench.daemon.params_of("jobs.run").command == ("other",)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "--yes"), "no command"),
        (("run", "--yes", "-i", "none", "--", "true"), "none"),
        (("run", "--yes", "-i", "rpc.sock", "--", "true"), "rpc.sock"),
        (("run", "--yes", "-o", "../x", "--", "true"), "not inside the job"),
        (("run", "--yes", "-o", "a:x", "-o", "b:x", "--", "true"), "two outputs go to"),
        (("run", "--yes", "-w", ".", "-i", "x:.", "--", "true"), "two inputs go to"),
        (("run", "--yes", "-e", "1X=2", "--", "true"), "name of a variable"),
        (("run", "--yes", "-f", "none.toml"), "cannot read none.toml"),
        (("attach", "-", "extra"), "extra"),
    ],
)
def test_cli_run_refuses_before_it_buys(bench: Bench, arguments: tuple[str, ...], says: str) -> None:
    ran = bench.run(*arguments)
    assert ran.returncode == 125
    assert says in ran.stderr.decode()
    assert b"Traceback" not in ran.stderr
    assert "jobs.run" not in [name for name, _, _ in bench.daemon.asked]


def test_cli_run_ctrl_c_detaches_and_leaves_the_job(bench: Bench) -> None:
    bench.daemon.replies["jobs.events"] = [jobs.JobEvent(at=1, entry=ENTRY), None]
    bench.daemon.replies["jobs.logs"] = [RESULTS["jobs.logs"][0], None]
    with (
        bench.daemon.in_thread(bench.socket),
        bench.process("run", "--yes", "--", "true") as process,
    ):
        assert process.stdout is not None
        assert process.stdout.read(len(LOG)) == LOG
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"gpunode attach j7f3k2" in told
    assert b"gpunode cancel j7f3k2" in told
    assert b"Traceback" not in told
    assert "jobs.cancel" not in [name for name, _, _ in bench.daemon.asked]


def test_cli_run_goes_on_when_the_daemon_is_restarted(bench: Bench) -> None:
    whole = b"".join(b"line %d\n" % number for number in range(1000))
    bench.daemon.replies["jobs.events"] = [jobs.JobEvent(at=1, entry=ENTRY), None]
    bench.daemon.replies["jobs.logs"] = [
        jobs.LogChunk(stream=jobs.LogStream.STDOUT, offset=0, data=whole[:500]),
        None,
    ]

    def rest(params: jobs.LogsParams, caller: object) -> list[jobs.LogChunk]:
        # A daemon may send again what was sent: chunks need not begin at the offset that was asked for.
        begin = params.stdout_offset - 100
        return [jobs.LogChunk(stream=jobs.LogStream.STDOUT, offset=begin, data=whole[begin:])]

    first = contextlib.ExitStack()
    first.enter_context(bench.daemon.in_thread(bench.socket))
    with first, bench.process("attach", "j7f3k2") as process:
        assert process.stdout is not None
        assert process.stdout.read(500) == whole[:500]
        first.close()
        bench.daemon.replies["jobs.events"] = [SETTLED]
        bench.daemon.replies["jobs.logs"] = rest
        with bench.daemon.in_thread(bench.socket):
            out, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert out == whole[500:]
    assert b"waiting for the daemon" in told


@pytest.mark.parametrize("command", ["attach", "logs"])
def test_cli_run_says_where_output_was_dropped(bench: Bench, command: str) -> None:
    bench.daemon.replies["jobs.logs"] = [
        jobs.LogChunk(stream=jobs.LogStream.STDOUT, offset=0, data=b"head\n"),
        jobs.LogChunk(stream=jobs.LogStream.STDOUT, offset=5_000_005, data=b"tail\n"),
    ]
    ran = bench.run(command, "-")
    assert ran.stdout == b"head\ntail\n"
    assert b"[5.0 MB of stdout were dropped" in ran.stderr


def test_cli_logs_are_the_bytes_that_were_written(bench: Bench) -> None:
    ran = bench.run("logs", "train")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, LOG, b"warming up\n")


def test_cli_closed_pipe_ends_quietly(bench: Bench) -> None:
    bench.daemon.replies["jobs.logs"] = [
        jobs.LogChunk(stream=jobs.LogStream.STDOUT, offset=0, data=bytes(65_536)) for _ in range(40)
    ]
    with bench.daemon.in_thread(bench.socket), bench.process("logs", "-") as process:
        assert process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(60) == 141
