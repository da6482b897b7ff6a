import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from support.rpc_daemon import CannedDaemon
from support.rpc_samples import NODE, PROVIDER, RESULTS

from node.cli.root import run
from node.errors import NotFound
from node.rpc.api import daemon, jobs, lend, market, money, peers


class Ran(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Return its one JSON object."""
        return json.loads(self.out)


Gpunode = Callable[..., Ran]


@pytest.fixture
def canned() -> CannedDaemon:
    return CannedDaemon()


@pytest.fixture
def gpunode(
    canned: CannedDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Gpunode]:
    """Run a command line against the canned daemon."""
    monkeypatch.setenv("GPUNODE_SOCKET", str(tmp_path / "rpc.sock"))

    def call(*arguments: str) -> Ran:
        capfd.readouterr()
        status = run(arguments, os.environ)
        return Ran(status, *capfd.readouterr())

    with canned.in_thread(tmp_path / "rpc.sock"):
        yield call


ANSWERS = [
    ("status", "daemon.status"),
    ("quote --gpus A100", "quote"),
    ("offers", "offers.list"),
    ("jobs", "jobs.list"),
    ("jobs -", "jobs.show"),
    ("why -", "jobs.why"),
    ("why --gpus 2", "jobs.why"),
    ("fetch -", "jobs.fetch"),
    ("lend", "lend.status"),
    ("lend on 0", "lend.on"),
    ("lend off", "lend.off"),
    ("lend pause --for 2h", "lend.pause"),
    ("lend reclaim --all --yes", "lend.reclaim"),
    ("lend devices", "lend.devices"),
    ("lend price", "lend.price"),
    ("peers ls", "peers.list"),
    ("peers connect /ip4/10.0.0.7/tcp/4100", "peers.connect"),
    ("peers invite", "peers.invite"),
    ("peers show 7E7h", "peers.show"),
    ("money ledger", "money.ledger"),
    ("money receipts", "money.receipts"),
    ("money settle 7E7h 1.5 --paid --yes", "money.settle"),
    ("money accept abab", "money.accept"),
    ("config show --running", "daemon.config"),
]


@pytest.mark.parametrize(("line", "method"), ANSWERS)
def test_cli_json_is_the_daemon_s_answer(gpunode: Gpunode, line: str, method: str) -> None:
    ran = gpunode(*line.split(), "--json")
    assert ran.status == 0
    assert ran.json == json.loads(msgspec.json.encode(RESULTS[method]))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("status", ["0.1.0", NODE, "lab", "private", "3 connected, 7 known", "the clock is 7 s ahead", "A100-SXM4",
                    "$0.4000/h", "leased", PROVIDER[-12:], "SIMULATED", "train", "/run/gpunode/rpc.sock",
                    "2 of other"]),
        ("quote --gpus A100", ["A100-SXM4", "$0.4000/h", "bubblewrap", "24 GiB or less", "--gpu-memory 24G"]),
        ("offers", ["A100-SXM4", "40 GiB", "12.4", "2/4", "eu/lab-3"]),
        ("jobs", ["j7f3k2", "train", "running", "python train.py"]),
        ("jobs -", ["of uid 1000", "TOKEN", "/home/ada/data -> data", "here", "$0.4000/h"]),
        ("why -", ["No offer has 80 GiB.", "price too low", "next: Ask for less"]),
        ("fetch -", ["results -> /home/ada/results (99 B): here"]),
        ("cancel a b", ["j7f3k2: ending, now collecting"]),
        ("lend", ["lending is on", "bubblewrap", "SIMULATED", "$0.4000/h", "running"]),
        ("lend devices", ["GPU-8d1f0a2b", "87%", "61 C", "SIMULATED"]),
        ("lend price", ["a100", "formula", "$0.8000/h"]),
        ("lend reclaim 0 --yes", ["interrupting cdcdcdcdcdcd", "free by"]),
        ("peers ls", ["12 ms", "$100.000000", "-$1.500000", "out"]),
        ("peers show 7E7h", [PROVIDER, "2 x A100", "4: earned $0.000000, spent $1.500000"]),
        ("peers limit 7E7h 100", [PROVIDER, "may owe $100.000000"]),
        ("peers invite", ["gpn1abcdef"]),
        ("money ledger", ["owed by us $1.500000", "$1.500000", "accept it"]),
        ("money receipts", ["abababababab", "spent", "completed", "$0.006666"]),
        ("config show --running", ['network.name = "lab"']),
        ("rpc", ["jobs.run", "admin"]),
    ],
)  # fmt: skip
def test_cli_tells_people(gpunode: Gpunode, line: str, words: list[str]) -> None:
    ran = gpunode(*line.split())
    assert ran.status == 0, ran.err
    assert not [word for word in words if word not in ran.out]
    assert "\x1b" not in ran.out, "colour without a terminal"


@pytest.mark.parametrize(
    ("line", "method", "params"),
    [
        ("stop", "daemon.stop", daemon.StopParams(mode=daemon.StopMode.KEEP)),
        ("stop --drain", "daemon.stop", daemon.StopParams(mode=daemon.StopMode.DRAIN)),
        ("stop --now", "daemon.stop", daemon.StopParams(mode=daemon.StopMode.NOW)),
    ],
)
def test_cli_stop_says_how_and_waits(
    canned: CannedDaemon, gpunode: Gpunode, monkeypatch: pytest.MonkeyPatch, line: str, method: str, params: Any
) -> None:
    waited: list[int] = []
    monkeypatch.setattr("node.cli.daemon.wait_until_gone", lambda client, pid: waited.append(pid))
    assert gpunode(*line.split()).status == 0
    assert canned.params_of(method) == params
    assert waited == [os.getpid()], "the canned daemon is this process"
    assert gpunode("stop", "--drain", "--now").status == 125


QUOTE_ALL = (
    "quote --gpus A100:2 --gpu-memory 40G --cuda 12.4 --cpus 8 --memory 64G --disk 100G --shm 2G "
    f"--isolation gvisor --net none --provider {PROVIDER} --region eu --max-price 0.36 --allow-simulated --time 2h"
)


@pytest.mark.parametrize(
    ("line", "method", "params"),
    [
        (QUOTE_ALL, "quote", market.QuoteParams(
            requirement=market.Requirement(
                quantity=2, model="A100", gpu_memory_mib=40_960, cuda=12_040, cpus_milli=8_000, memory_mib=65_536,
                disk_mib=102_400, shm_mib=2_048, isolation="gvisor", network_mode="none", provider=PROVIDER,
                region="eu", max_price=100_000, allow_simulated=True,
            ),
            duration_ms=7_200_000,
        )),
        ("quote", "quote", market.QuoteParams(requirement=market.Requirement(), duration_ms=3_600_000)),
        (f"quote --provider ..{PROVIDER[-12:]}", "quote", market.QuoteParams(
            requirement=market.Requirement(provider=PROVIDER), duration_ms=3_600_000)),
        ("offers A100", "offers.list", market.OffersListParams(model="A100")),
        ("jobs -a -u -n 5", "jobs.list", jobs.JobsListParams(all_users=True, unfinished=True, limit=5)),
        ("why --max-price 0.36", "jobs.why", jobs.WhyParams(requirement=market.Requirement(max_price=100_000))),
        ("logs x --stderr", "jobs.logs", jobs.LogsParams(job="x", streams=(jobs.LogStream.STDERR,))),
        ("logs x -f", "jobs.logs", jobs.LogsParams(job="x", follow=True)),
        ("exec x -- ls -l", "jobs.exec", jobs.ExecParams(job="x", command=("ls", "-l"))),
        ("exec - -- -- true", "jobs.exec", jobs.ExecParams(job="-", command=("--", "true"))),
        ("exec - true", "jobs.exec", jobs.ExecParams(job="-", command=("true",))),
        ("lend on 0 GPU-8", "lend.on", lend.DevicesParams(devices=("0", "GPU-8"))),
        ("lend pause --for 90m", "lend.pause", lend.PauseParams(duration_ms=5_400_000)),
        ("lend reclaim 1 --now --yes", "lend.reclaim", lend.ReclaimParams(devices=("1",), now=True)),
        ("lend price A100 --start 0.72 --reserve 0.36", "lend.price",
         lend.PriceParams(model="A100", start=200_000, reserve=100_000)),
        ("lend price A100 --auto", "lend.price", lend.PriceParams(model="A100", automatic=True)),
        ("peers show ..7E7h", "peers.show", peers.PeerParams(peer="7E7h")),
        ("peers limit 7E7h none", "peers.limit", peers.LimitParams(peer="7E7h", credit_limit=None)),
        ("peers limit 7E7h 2.5", "peers.limit", peers.LimitParams(peer="7E7h", credit_limit=2_500_000_000)),
        ("money receipts --job - --peer ..7E7h -n 3", "money.receipts",
         money.ReceiptsParams(job="-", peer="7E7h", limit=3)),
        ("money settle 7E7h 1.5 --received --reference cash --yes", "money.settle",
         money.SettleParams(peer="7E7h", amount=1_500_000_000, paid_by_us=False, reference="cash")),
        ("money accept abab", "money.accept", money.AcceptParams(settlement="abab")),
    ],
)  # fmt: skip
def test_cli_flags_become_params(
    canned: CannedDaemon, gpunode: Gpunode, line: str, method: str, params: Any
) -> None:
    ran = gpunode(*line.split())
    assert ran.status == 0, ran.err
    assert canned.params_of(method) == params


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("frob", "No such command 'frob'"),
        ("quote --gsp 2", "--gpus"),
        ("quote --gpus 0", "not a number of GPUs"),
        ("quote --time 8", "length of time"),
        ("quote --net internet", "'none'"),
        ("quote --provider nobody", "no provider of a live offer ends in nobody"),
        ("why", "name a JOB"),
        ("why - --gpus 2", "not both"),
        ("cancel", "Missing argument"),
        ("lend reclaim", "say --all"),
        ("lend reclaim 0 --all", "say --all"),
        ("lend reclaim --all", "add --yes"),
        ("lend price A --reserve 2 --start 1", "--reserve is above --start"),
        ("lend price A --auto --start 1", "--auto excludes"),
        ("lend --json on", "after the command"),
        ("money settle 7E7h 1.5 --yes", "say who paid"),
        ("money settle 7E7h 1.5 --paid", "add --yes"),
        ("peers limit 7E7h much", "amount of dollars"),
        ("rpc jobs.list [", "PARAMS is not JSON"),
        ("rpc jobs.list []", "not a JSON object"),
        ("rpc no.such", "no method"),
        ("run --yes -i caf\udce9 -- true", r"caf\xe9 is not UTF-8"),
        ('rpc jobs.logs {"jbo":1}', "jbo"),
        ("config show --set network.nmae=x", "network.name"),
        ("config show --set x", "has no value"),
        ("config check /nonexistent.toml", "/nonexistent.toml"),
        ("start --set network.name=NOT!", "network.name"),
    ],
)
def test_cli_failures_are_125_and_say_what_and_why(gpunode: Gpunode, line: str, says: str) -> None:
    ran = gpunode(*line.split())
    assert ran.status == 125
    assert ran.out == "" or "--json" in line
    assert ran.err.startswith("error: ")
    assert says in ran.err
    assert "Traceback" not in ran.err


def test_cli_error_of_the_daemon_is_told_with_its_hint(canned: CannedDaemon, gpunode: Gpunode) -> None:
    canned.replies["jobs.show"] = NotFound("no job 'x'\x1b[2J", "see: gpunode jobs")
    ran = gpunode("jobs", "x", "--json")
    assert ran.status == 125
    assert ran.err == "error: no job 'x'\ufffd[2J\n  hint: see: gpunode jobs\n"
    assert ran.json == {"error": {"code": 2303, "message": "no job 'x'\ufffd[2J", "hint": "see: gpunode jobs"}}


def test_cli_internal_error_names_the_log_entry(canned: CannedDaemon, gpunode: Gpunode) -> None:
    canned.replies["jobs.list"] = KeyError("x")
    ran = gpunode("jobs")
    assert ran.status == 125
    assert "internal error in jobs.list" in ran.err
    assert "journalctl" in ran.err


def test_cli_without_a_daemon_says_how_to_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUNODE_SOCKET", "/nonexistent/a.sock")
    assert run(["status"], os.environ) == 125
    captured = capsys.readouterr()
    assert "no daemon answers at /nonexistent/a.sock" in captured.err
    assert "hint: start it with: gpunode start" in captured.err
    assert run(["--socket", "/nonexistent/b.sock", "status"], os.environ) == 125
    assert "/nonexistent/b.sock" in capsys.readouterr().err


def test_cli_a_bug_is_told_without_a_traceback(gpunode: Gpunode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.cli.market.call", lambda *_: 1 // 0)
    ran = gpunode("offers")
    assert ran.status == 125
    assert ran.err.startswith("error: a bug in gpunode: ZeroDivisionError")
    assert "Traceback" not in ran.err


def test_cli_quote_without_a_match_is_125_and_says_why(canned: CannedDaemon, gpunode: Gpunode) -> None:
    canned.replies["quote"] = msgspec.structs.replace(
        RESULTS["quote"], candidates=(), max_price=None, max_spend=None
    )
    ran = gpunode("quote", "--gpus", "H100")
    assert ran.status == 125
    assert "none of the 4 known offers matches" in ran.out
    assert "try --gpu-memory 24G" in ran.out
    assert gpunode("quote", "--json").json["candidates"] == []


def test_cli_rpc_prints_results_and_items(gpunode: Gpunode) -> None:
    assert gpunode("rpc", "jobs.cancel", '{"job": "-"}').json["changed"] is True
    items = [json.loads(line) for line in gpunode("rpc", "jobs.events", '{"job": "-"}').out.splitlines()]
    assert [item["entry"]["state"] for item in items] == ["running", "settled"]
    assert gpunode("rpc", "rpc.discover").json["openrpc"] == "1.3.2"


def test_cli_fetch_waits_until_outputs_are_here(canned: CannedDaemon, gpunode: Gpunode) -> None:
    away = msgspec.structs.replace(RESULTS["jobs.fetch"].outputs[0], collected=False)
    canned.replies["jobs.fetch"] = jobs.FetchResult(job="j7f3k2", outputs=(away,), collecting=True)
    ran = gpunode("fetch", "-")
    assert (ran.status, ran.out) == (0, "results -> /home/ada/results (99 B): here\n")
    canned.replies["jobs.fetch"] = jobs.FetchResult(job="j7f3k2", outputs=(away,), collecting=False)
    ran = gpunode("fetch", "-")
    assert ran.status == 125
    assert "not here yet" in ran.out


def test_cli_doctor_fails_when_a_check_fails(canned: CannedDaemon, gpunode: Gpunode) -> None:
    canned.replies["daemon.status"] = msgspec.structs.replace(RESULTS["daemon.status"], config_path="")
    ran = gpunode("doctor", "--json", "--set", "network.listen=/ip4/127.0.0.1/tcp/0")
    found = {check["name"]: check["status"] for check in ran.json["checks"]}
    assert found["daemon"] == found["database"] == found["config"] == "ok"
    assert ran.status == (0 if ran.json["ok"] else 1)
    canned.replies["doctor.run"] = daemon.DoctorResult(
        checks=(daemon.Check(name="database", status=daemon.CheckStatus.FAIL, detail="torn", hint="restore it"),)
    )
    ran = gpunode("doctor")
    assert ran.status == 1
    assert "FAIL  database: torn\n      mend: restore it" in ran.out
    assert gpunode("doctor", "--set", "network.listen=nowhere").status == 1
    canned.replies["daemon.status"] = msgspec.structs.replace(RESULTS["daemon.status"], config_path="/none.toml")
    assert "FAIL  config: there is no configuration file /none.toml" in gpunode("doctor").out


def test_cli_completes_jobs(gpunode: Gpunode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_GPUNODE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "gpunode cancel tr")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert gpunode().out == "plain,train\n"
    monkeypatch.setenv("COMP_WORDS", "gpunode mon")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert gpunode().out == "plain,money\n"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_cli_completion_script(gpunode: Gpunode, shell: str) -> None:
    ran = gpunode("completion", shell)
    assert ran.status == 0
    assert "_GPUNODE_COMPLETE" in ran.out
