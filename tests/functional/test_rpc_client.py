import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.rpc_daemon import CannedDaemon
from support.rpc_samples import RESULTS, params_of

from node.errors import BadArgument, DaemonUnreachable, NotFound, RpcError
from node.rpc import api
from node.rpc.client import Client, ConnectionLost, RemoteError
from node.rpc.paths import socket_candidates


@pytest.fixture
def canned() -> CannedDaemon:
    return CannedDaemon()


@pytest.fixture
def socket_path(canned: CannedDaemon, tmp_path: Path) -> Iterator[Path]:
    with canned.in_thread(tmp_path / "rpc.sock") as path:
        yield path


def test_rpc_client_calls_every_method_typed(socket_path: Path) -> None:
    with Client(socket_path) as client:
        for name, method in api.METHODS.items():
            if isinstance(method, api.Call) and name != "rpc.discover":
                assert client.call(method, params_of(name)) == RESULTS[name], name
        assert client.call(api.daemon.DISCOVER, api.Nothing()).info["title"] == "gpunode"
        assert client.call_raw("jobs.cancel", {"job": "-"})["changed"] is True


def test_rpc_client_reads_two_subscriptions_on_one_connection(socket_path: Path) -> None:
    with Client(socket_path) as client:
        logs = client.subscribe(api.jobs.LOGS, api.jobs.LogsParams(job="-"))
        events = client.subscribe(api.jobs.EVENTS, api.jobs.JobParams(job="-"))
        assert client.call(api.jobs.CANCEL, api.jobs.JobParams(job="-")).changed, "a call between the items"
        seen: dict[Any, list[Any]] = {logs: [], events: []}
        for subscription, item in client.items():
            seen[subscription].append(item)
    assert seen == {logs: list(RESULTS["jobs.logs"]), events: list(RESULTS["jobs.events"])}


def test_rpc_client_raises_the_errors_of_the_house(canned: CannedDaemon, socket_path: Path) -> None:
    canned.replies["jobs.show"] = NotFound("no job 'x'", "see: gpunode jobs")
    canned.replies["jobs.logs"] = [NotFound("the log is gone")]
    canned.replies["jobs.list"] = KeyError("oops")
    with Client(socket_path) as client:
        with pytest.raises(NotFound, match="no job 'x'") as caught:
            client.call(api.jobs.SHOW, api.jobs.JobParams(job="x"))
        assert caught.value.hint == "see: gpunode jobs"
        with pytest.raises(NotFound, match="the log is gone"):
            list(client.stream(api.jobs.LOGS, api.jobs.LogsParams(job="x")))
        with pytest.raises(RemoteError, match="internal error") as internal:
            client.call(api.jobs.LIST, api.jobs.JobsListParams())
        assert internal.value.number == -32603
        with pytest.raises(RemoteError, match="no method"):
            client.call_raw("no.such", {})


def test_rpc_client_says_where_it_looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUNODE_SOCKET", str(tmp_path / "none.sock"))
    with pytest.raises(DaemonUnreachable, match=r"none\.sock") as caught:
        Client()
    assert caught.value.hint.startswith("start it with: gpunode start")


def test_rpc_client_looks_in_the_documented_places() -> None:
    system = Path("/run/gpunode/rpc.sock")
    assert socket_candidates({}) == (Path(f"/run/user/{os.geteuid()}/gpunode/rpc.sock"), system)
    assert socket_candidates({"XDG_RUNTIME_DIR": "/run/user/7"}) == (Path("/run/user/7/gpunode/rpc.sock"), system)
    assert socket_candidates({"XDG_RUNTIME_DIR": "/run/user/7", "GPUNODE_SOCKET": "/x"}) == (Path("/x"),)
    assert socket_candidates({"GPUNODE_RUNTIME_DIR": "/y"}) == (Path("/y/rpc.sock"),)


class Odd:
    """A listener that says one thing and closes."""

    def __init__(self, path: Path, answer: bytes | None) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._answer = answer
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.recv(65536)
            if self._answer is None:
                self._done.wait(10)
            else:
                connection.sendall(self._answer)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(10)
        self._listener.close()


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (b"", ConnectionLost, "closed the connection"),
        (b"not json\n", RpcError, "shape"),
        (b'{"jsonrpc":"2.0","id":1,"result":{"jobs":3}}\n', RpcError, "jobs.list answered in a shape"),
        (b'{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"too many"}}\n', RemoteError, "too many"),
    ],
)
def test_rpc_client_survives_odd_daemons(tmp_path: Path, answer: bytes, error: type[RpcError], says: str) -> None:
    with (
        Odd(tmp_path / "s", answer),
        Client(tmp_path / "s") as client,
        pytest.raises(error, match=says) as caught,
    ):
        client.call(api.jobs.LIST, api.jobs.JobsListParams())
    assert caught.value.hint or error is RemoteError


def test_rpc_client_gives_up_on_a_silent_daemon(tmp_path: Path) -> None:
    with (
        Odd(tmp_path / "s", None),
        Client(tmp_path / "s", timeout_s=0.05) as client,
        pytest.raises(RpcError, match="did not answer") as caught,
    ):
        client.call(api.jobs.LIST, api.jobs.JobsListParams())
    assert "log" in caught.value.hint


def test_rpc_client_needs_no_trio() -> None:
    program = (
        "import sys, node.rpc.client, node.rpc.api; print({'trio', 'libp2p', 'aioquic'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"set()\n"


def test_rpc_client_names_what_is_no_text(socket_path: Path) -> None:
    params = api.jobs.JobParams(job="caf\udce9")
    with Client(socket_path) as client, pytest.raises(BadArgument, match=r"caf\\xe9 is not UTF-8"):
        client.call(api.jobs.SHOW, params)
