import contextlib
import json
import os
import random
import socket
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from pytest_trio import trio_fixture
from support.rpc_daemon import CannedDaemon
from support.rpc_samples import RESULTS, params_of

from node.errors import ConfigError, NotFound, RpcError
from node.rpc import api, server, wire
from node.rpc.binding import bound_socket

pytestmark = pytest.mark.filterwarnings("error")


class Talk:
    """One raw connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = b""

    async def say(self, method: str, params: Any = None, request_id: Any = 1) -> None:
        tree = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": {} if params is None else params}
        await self.stream.send_all(msgspec.json.encode(tree) + b"\n")

    async def hear(self) -> Any:
        """Return the next line as a tree, or None at the end."""
        with trio.fail_after(10):
            while b"\n" not in self._buffer:
                data = await self.stream.receive_some()
                if not data:
                    return None
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    async def ask(self, method: str, params: Any = None, request_id: Any = 1) -> Any:
        await self.say(method, params, request_id)
        return await self.hear()


class Serving:
    """A canned daemon in the test's own nursery."""

    def __init__(self, path: Path, nursery: trio.Nursery) -> None:
        self.daemon = CannedDaemon()
        self.path = path
        self.nursery = nursery
        self.talks: list[Talk] = []

    async def start(self, **options: Any) -> None:
        await self.nursery.start(lambda **kw: server.serve(self.daemon.handlers(), self.path, **options, **kw))

    async def talk(self) -> Talk:
        talk = Talk(await trio.open_unix_socket(str(self.path)))
        self.talks.append(talk)
        return talk


@trio_fixture
async def serving(tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Serving]:
    serving = Serving(tmp_path / "run" / "rpc.sock", nursery)
    yield serving
    for talk in serving.talks:
        talk.stream.socket.close()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("name", [name for name, method in api.METHODS.items() if isinstance(method, api.Call)])
async def test_rpc_call_is_answered_in_its_shape(serving: Serving, name: str) -> None:
    await serving.start()
    talk = await serving.talk()
    params = params_of(name)
    reply = await talk.ask(name, params, request_id="q-1")
    assert reply.keys() == {"jsonrpc", "id", "result"}
    assert (reply["jsonrpc"], reply["id"]) == ("2.0", "q-1")
    method = api.METHODS[name]
    assert isinstance(method, api.Call)
    # Decoding and encoding again gives the same bytes: nothing in the reply is outside the declared shape.
    decoded = msgspec.convert(reply["result"], method.result)
    assert json.loads(msgspec.json.encode(decoded)) == reply["result"]
    if name != "rpc.discover":
        assert decoded == RESULTS[name]
        asked, got, caller = serving.daemon.asked[-1]
        assert (asked, got) == (name, params)
        assert caller == api.Caller(os.getuid(), os.getgid(), os.getpid(), is_admin=True)


@pytest.mark.parametrize("name", [name for name, method in api.METHODS.items() if isinstance(method, api.Stream)])
async def test_rpc_subscription_names_itself_then_streams_then_is_done(serving: Serving, name: str) -> None:
    await serving.start()
    talk = await serving.talk()
    assert (await talk.ask(name, params_of(name)))["result"] == {"subscription": 1}
    method = api.METHODS[name]
    assert isinstance(method, api.Stream)
    for item in RESULTS[name]:
        heard = await talk.hear()
        assert heard.keys() == {"jsonrpc", "method", "params"}
        assert heard["method"] == name
        assert heard["params"].keys() == {"subscription", "item"}
        assert msgspec.convert(heard["params"]["item"], method.item) == item
    assert (await talk.hear())["params"] == {"subscription": 1, "done": True}


async def test_rpc_subscription_that_fails_says_so_at_its_end(serving: Serving) -> None:
    serving.daemon.replies["jobs.logs"] = [RESULTS["jobs.logs"][0], NotFound("the log is gone", "look elsewhere")]
    await serving.start()
    talk = await serving.talk()
    await talk.ask("jobs.logs", {"job": "x"})
    await talk.hear()
    params = (await talk.hear())["params"]
    assert params["error"] == {
        "code": 2303,
        "message": "the log is gone",
        "data": {"hint": "look elsewhere", "log_id": ""},
    }
    assert "result" in await talk.ask("jobs.list"), "the connection goes on"


async def test_rpc_bad_lines_get_numbers_and_the_connection_goes_on(serving: Serving) -> None:
    await serving.start()
    talk = await serving.talk()
    for line, code in (
        (b"not json\n", wire.PARSE_ERROR),
        (b"[]\n", wire.INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":7,"method":"no.such"}\n', wire.METHOD_NOT_FOUND),
        (b'{"jsonrpc":"2.0","id":7,"method":"jobs.show","params":{"jbo":1}}\n', wire.INVALID_PARAMS),
    ):
        await talk.stream.send_all(line)
        error = (await talk.hear())["error"]
        assert error["code"] == code
        assert error["message"]
        assert error["data"].keys() == {"hint", "log_id"}
    await talk.stream.send_all(b'\n\n{"jsonrpc":"2.0","method":"jobs.cancel","params":{"job":"-"}}\n')
    assert "result" in await talk.ask("jobs.list")
    assert [name for name, _, _ in serving.daemon.asked] == ["jobs.list"], "a notification was carried out"


async def test_rpc_line_that_is_too_long_ends_the_connection(serving: Serving) -> None:
    await serving.start()
    talk = await serving.talk()
    await talk.stream.send_all(b"x" * (wire.LINE_SIZE_MAX + 1))
    assert (await talk.hear())["error"]["code"] == wire.INVALID_REQUEST
    with contextlib.suppress(trio.BrokenResourceError):  # the kernel reports the unread rest as a reset
        assert await talk.hear() is None
    assert "result" in await (await serving.talk()).ask("jobs.list")


async def test_rpc_errors_of_the_house_cross_and_tracebacks_do_not(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    serving.daemon.replies["jobs.show"] = NotFound("no job 'x'", "see: gpunode jobs")
    serving.daemon.replies["jobs.cancel"] = ExceptionGroup("nursery", [NotFound("no job 'y'")])
    serving.daemon.replies["jobs.list"] = KeyError("a secret inside")
    serving.daemon.replies["quote"] = trio.BrokenResourceError("some other stream")
    await serving.start()
    talk = await serving.talk()
    assert (await talk.ask("jobs.show", {"job": "x"}))["error"]["message"] == "no job 'x'"
    assert (await talk.ask("jobs.cancel", {"job": "y"}))["error"]["code"] == 2303
    error = (await talk.ask("jobs.list"))["error"]
    assert error["code"] == wire.INTERNAL_ERROR
    assert error["data"]["log_id"] in error["message"]
    assert "secret" not in json.dumps(error)
    assert (await talk.ask("quote", params_of("quote")))["error"]["code"] == wire.INTERNAL_ERROR
    assert "result" in await talk.ask("money.ledger")


async def test_rpc_assertion_ends_the_daemon(tmp_path: Path) -> None:
    daemon = CannedDaemon()
    daemon.replies["jobs.list"] = AssertionError("our bug")
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="our bug"), flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, daemon.handlers(), tmp_path / "s")
            async with await trio.open_unix_socket(str(tmp_path / "s")) as stream:
                await Talk(stream).say("jobs.list")
                with trio.fail_after(10):
                    await trio.sleep_forever()


async def test_rpc_calls_in_flight_are_bounded(serving: Serving) -> None:
    serving.daemon.replies["jobs.events"] = [None]
    await serving.start()
    talk = await serving.talk()
    for number in range(server.CALLS_IN_FLIGHT_MAX):
        assert "result" in await talk.ask("jobs.events", {"job": "x"}, number)
    reply = await talk.ask("jobs.list", request_id="more")
    assert (reply["id"], reply["error"]["code"]) == ("more", wire.OVERLOADED)
    assert "result" in await (await serving.talk()).ask("jobs.list"), "another connection is free"


async def test_rpc_connections_are_bounded(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 2)
    await serving.start()
    first, second = await serving.talk(), await serving.talk()
    assert "result" in await first.ask("jobs.list")
    assert "result" in await second.ask("jobs.list")
    third = await serving.talk()
    assert (await third.hear())["error"]["code"] == wire.OVERLOADED
    assert await third.hear() is None
    await first.stream.aclose()
    while True:  # until the server has seen the close
        again = await serving.talk()
        try:
            if "result" in await again.ask("jobs.list"):
                break
        except trio.BrokenResourceError:
            pass
        await again.stream.aclose()


async def test_rpc_subscription_is_closed_when_the_caller_goes(serving: Serving) -> None:
    closed = trio.Event()

    async def events(params: Any, caller: Any) -> Any:
        try:
            yield RESULTS["jobs.events"][0]
            await trio.sleep_forever()
        finally:
            closed.set()

    serving.daemon.handlers = lambda: {**CannedDaemon().handlers(), "jobs.events": events}  # type: ignore[method-assign]
    await serving.start()
    talk = await serving.talk()
    await talk.ask("jobs.events", {"job": "x"})
    await talk.hear()
    await talk.stream.aclose()
    with trio.fail_after(10):
        await closed.wait()


async def test_rpc_slow_reader_suspends_its_own_subscription_only(serving: Serving) -> None:
    sent = 0

    async def logs(params: Any, caller: Any) -> Any:
        nonlocal sent
        while True:
            yield api.jobs.LogChunk(stream=api.jobs.LogStream.STDOUT, offset=0, data=bytes(65_536))
            sent += 1

    serving.daemon.handlers = lambda: {**CannedDaemon().handlers(), "jobs.logs": logs}  # type: ignore[method-assign]
    await serving.start()
    slow, other = await serving.talk(), await serving.talk()
    await slow.say("jobs.logs", {"job": "x"})
    before = -1
    while before != sent or sent == 0:
        before = sent
        for _ in range(20):
            assert "result" in await other.ask("jobs.list")
    assert sent < 64, "the server buffers for a reader that does not read"


async def test_rpc_half_closed_caller_still_gets_its_answer(serving: Serving) -> None:
    await serving.start()
    talk = await serving.talk()
    await talk.say("jobs.list")
    await talk.stream.send_eof()
    assert "result" in await talk.hear()
    assert await talk.hear() is None


async def test_rpc_answer_leaves_before_a_stop_that_its_handler_asks_for(tmp_path: Path) -> None:
    daemon = CannedDaemon()
    path = tmp_path / "s"
    serving = trio.CancelScope()

    def stop(params: Any, caller: Any) -> Any:
        serving.cancel()
        return RESULTS["daemon.stop"]

    async def serve(task_status: trio.TaskStatus[None]) -> None:
        with serving:
            await server.serve(daemon.handlers(), path, task_status=task_status)

    daemon.replies["daemon.stop"] = stop
    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        async with await trio.open_unix_socket(str(path)) as stream:
            talk = Talk(stream)
            assert (await talk.ask("daemon.stop"))["result"]["leases"] == 1
            assert await talk.hear() is None
    assert not path.exists(), "the socket outlives the daemon"


async def test_rpc_socket_has_its_mode_and_its_directory_is_private(serving: Serving) -> None:
    await serving.start()
    assert stat.S_IMODE(serving.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(serving.path.parent.stat().st_mode) == 0o700
    assert {entry.name for entry in serving.path.parent.iterdir()} == {"rpc.sock", "rpc.sock.lock"}


async def test_rpc_socket_of_the_system_service_belongs_to_its_group(serving: Serving) -> None:
    group = os.getgroups()[-1] if os.getuid() else 4242
    await serving.start(group=group)
    assert stat.S_IMODE(serving.path.stat().st_mode) == 0o660
    assert serving.path.stat().st_gid == group


def test_rpc_socket_of_a_dead_daemon_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    with bound_socket(path), socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
    assert not path.exists()


def test_rpc_socket_of_a_live_daemon_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bound_socket(path):
        with pytest.raises(RpcError, match=f"another daemon answers at {path}"), bound_socket(path):
            pass
        assert path.exists()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(path))
        stranger.listen()
        with pytest.raises(RpcError, match="another daemon answers"), bound_socket(path):
            pass
    assert path.exists()


def test_rpc_socket_never_replaces_a_file_and_has_a_path_that_fits(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("mine")
    with pytest.raises(ConfigError, match="no socket"), bound_socket(tmp_path / "s"):
        pass
    assert (tmp_path / "s").read_text() == "mine"
    with pytest.raises(ConfigError, match="too long"), bound_socket(tmp_path / ("d" * 100) / "s"):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
async def test_rpc_other_users_are_no_administrators_unless_their_group_is(serving: Serving) -> None:
    serving.path.parent.mkdir()
    for directory in (serving.path.parent, *serving.path.parents[1:4]):
        if directory.stat().st_uid == 0 and str(directory).startswith("/tmp/"):
            directory.chmod(0o755)
    await serving.start(group=4242, admin_gids=frozenset({4300}))

    async def ask_as(groups: list[int]) -> list[Any]:
        program = (
            "import os,socket,sys\n"
            f"os.setgroups({groups}); os.setgid(4242); os.setuid(4242)\n"
            f"s=socket.socket(socket.AF_UNIX); s.connect({str(serving.path)!r})\n"
            's.sendall(b\'{"jsonrpc":"2.0","id":1,"method":"money.ledger"}\\n'
            '{"jsonrpc":"2.0","id":2,"method":"jobs.list"}\\n\')\n'
            "s.shutdown(socket.SHUT_WR)\n"
            "while d:=s.recv(65536): sys.stdout.buffer.write(d)\n"
        )
        done = await trio.run_process([sys.executable, "-S", "-c", program], capture_stdout=True)
        return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda reply: reply["id"])

    refused, listed = await ask_as([])
    assert refused["error"]["code"] == 2902
    assert "uid 4242" in refused["error"]["message"]
    assert refused["error"]["data"]["hint"]
    assert "result" in listed
    assert serving.daemon.asked[-1][2].uid == 4242
    allowed, _ = await ask_as([4300])
    assert "result" in allowed


async def test_rpc_server_wants_every_handler(tmp_path: Path) -> None:
    handlers = dict(CannedDaemon().handlers())
    del handlers["jobs.run"]
    with pytest.raises(ValueError, match=r"jobs\.run"):
        await server.serve(handlers, tmp_path / "s")


async def test_rpc_server_outlives_junk(serving: Serving) -> None:
    await serving.start()
    dice = random.Random(7)
    valid = b'{"jsonrpc":"2.0","id":1,"method":"jobs.show","params":{"job":"-"}}'
    for _ in range(20):
        talk = await serving.talk()
        for _ in range(20):
            line = bytearray(valid)
            for _ in range(dice.randrange(1, 6)):
                line[dice.randrange(len(line))] = dice.randrange(256)
            await talk.stream.send_all(bytes(line[: dice.randrange(len(line))]) + b"\n")
        # About every other caller goes away in the middle of its answers.
        if dice.random() < 0.5:
            talk.stream.socket.close()
        else:
            await talk.say("jobs.list", request_id="last")
            while (await talk.hear())["id"] != "last":
                pass
    assert "result" in await (await serving.talk()).ask("jobs.list")
