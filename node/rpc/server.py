"""The daemon's side of the RPC: accepts, checks who calls, decodes, calls the handler, answers.

Bounded everywhere: connections in all and for each uid, bytes of a line, calls in flight on a connection. A
slow reader slows down its own subscription and nobody else; memory does not grow with it. Refuses to let a
traceback cross the socket: an unexpected exception is logged under an id, and the id is what the caller gets.
"""

import contextlib
import functools
import math
import os
import secrets
import select
import socket
import struct
from collections import Counter
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import trio

from node.errors import Forbidden, NodeError
from node.log import get_logger
from node.rpc import discover, wire
from node.rpc.api import METHODS, unhandled
from node.rpc.binding import bound_socket
from node.rpc.method import (
    Access,
    Caller,
    CallHandler,
    ErrorBody,
    ErrorData,
    Handlers,
    Method,
    Params,
    Stream,
    StreamHandler,
    Subscribed,
)
from node.rpc.methods import daemon
from protocol.errors import ProtocolError

CONNECTIONS_MAX = 256
CONNECTIONS_PER_UID_MAX = 64
"""For everyone but administrators, so that one user cannot lock out the others."""
CALLS_IN_FLIGHT_MAX = 32
"""On one connection, subscriptions included."""
RECEIVE_SIZE = 64 * 1024
HANG_UP_CHECK_S = 1.0
"""How often a half-closed connection is looked at; the kernel tells nobody when its other half closes."""
LAST_WORDS_S = 1.0
"""How long a caller may take to read why it is turned away, or the answer to its stopping the daemon."""

_SO_PEERGROUPS = 59
"""Linux: the supplementary groups of the peer (socket(7)); the socket module has no name for it."""
_GROUPS_MAX = 256
"""What Python's getsockopt can take. A caller in more groups is no administrator by group."""
_CREDENTIALS = struct.Struct("=iii")

log = get_logger(__name__)


class _TaskStatus(Protocol):
    def started(self) -> None:
        """Tell `nursery.start` that the task is ready."""


async def serve(
    handlers: Handlers,
    path: Path,
    *,
    group: int | None = None,
    admin_gids: frozenset[int] = frozenset(),
    task_status: _TaskStatus = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer at the unix socket `path` until cancelled; `task_status` starts when it can be called.

    The socket has mode 0600, or 0660 and `group`. Members of `admin_gids` are administrators, as are root and
    the daemon's own uid. Raises ValueError when a method lacks its handler or a handler its method, and the
    errors of `bound_socket`.
    """
    missing = unhandled(handlers)
    if missing:
        raise ValueError(f"RPC methods without a handler: {', '.join(missing)}")
    with bound_socket(path, group) as listening:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
        server = _Server({**handlers, daemon.DISCOVER.name: _discover}, admin_gids)
        log.info("rpc.listening", path=str(path))
        task_status.started()
        await trio.serve_listeners(server.converse, [listener])


async def _discover(params: Params, caller: Caller) -> daemon.DiscoverResult:
    return msgspec.convert(discover.document(), daemon.DiscoverResult)


class _Server:
    """What the connections share."""

    def __init__(self, handlers: Handlers, admin_gids: frozenset[int]) -> None:
        self.handlers = handlers
        self._admin_gids = admin_gids
        self._connections: Counter[int] = Counter()

    async def converse(self, stream: trio.SocketStream) -> None:
        """Serve one connection. Never raises for what a caller does."""
        async with stream:
            try:
                caller = _caller(stream.socket, self._admin_gids)
                with self._admitted(caller):
                    await _Connection(self, stream, caller).run()
            except _Turned as turned:
                with contextlib.suppress(trio.BrokenResourceError), trio.move_on_after(LAST_WORDS_S):
                    body = ErrorBody(
                        wire.OVERLOADED, str(turned), ErrorData("close some connections, then try again")
                    )
                    await stream.send_all(wire.error_line(None, body))
            except OSError as error:
                log.debug("rpc.connection_lost", reason=str(error))

    @contextlib.contextmanager
    def _admitted(self, caller: Caller) -> Any:  # noqa: ANN401 - contextmanager's own type
        if self._connections.total() >= CONNECTIONS_MAX:
            raise _Turned("too many connections to the daemon")
        if self._connections[caller.uid] >= CONNECTIONS_PER_UID_MAX and not caller.is_admin:
            raise _Turned(f"too many connections of uid {caller.uid}")
        self._connections[caller.uid] += 1
        try:
            yield
        finally:
            self._connections[caller.uid] -= 1
            if not self._connections[caller.uid]:
                del self._connections[caller.uid]


class _Turned(Exception):
    """The connection is one too many."""


class _Gone(Exception):
    """The caller has closed its side: nobody reads what is written."""


class _Connection:
    """One caller: reads lines, runs each call in a task of its own, writes whole lines."""

    def __init__(self, server: _Server, stream: trio.SocketStream, caller: Caller) -> None:
        self._server = server
        self._stream = stream
        self._caller = caller
        self._write_lock = trio.Lock()
        self._calls = 0
        self._idle = trio.Event()
        self._last_subscription = 0

    async def run(self) -> None:
        """Serve until the caller has gone away, or has said all it wants and got its answers."""
        async with trio.open_nursery() as nursery:
            try:
                await self._read_lines(nursery)
            except (trio.BrokenResourceError, _Gone):
                nursery.cancel_scope.cancel()
            await self._finish_calls()
            nursery.cancel_scope.cancel()

    async def _read_lines(self, nursery: trio.Nursery) -> None:
        lines = wire.LineBuffer()
        while data := await self._stream.receive_some(RECEIVE_SIZE):
            try:
                complete = lines.feed(data)
            except wire.BadRequest as bad:
                await self._send(wire.error_line(bad.request_id, bad.body))
                return
            for line in complete:
                await self._accept(line, nursery)

    async def _accept(self, line: bytes, nursery: trio.Nursery) -> None:
        try:
            request = wire.parse_untrusted(line)
            if request is None:
                return
            method, params = self._admit(request)
        except wire.BadRequest as bad:
            await self._send(wire.error_line(bad.request_id, bad.body))
            return
        self._calls += 1
        nursery.start_soon(self._carry_out, request.id, method, params, nursery.cancel_scope)

    def _admit(self, request: wire.Request) -> tuple[Method, Params]:
        """Return what is called, with which params; raise BadRequest when it is not to be carried out."""
        method = METHODS.get(request.method)
        if method is None:
            hint = "see what there is with: gpunode rpc rpc.discover"
            raise wire.BadRequest(request.id, wire.METHOD_NOT_FOUND, f"no method {request.method[:80]!r}", hint)
        params = wire.convert_params(request, method.params)
        if method.access is Access.ADMIN and not self._caller.is_admin:
            message = f"{method.name} is for administrators, and you are uid {self._caller.uid}"
            hint = "call as root, as the daemon's own user, or as a member of its administrators' group"
            raise wire.BadRequest(request.id, Forbidden.code, message, hint)
        if self._calls >= CALLS_IN_FLIGHT_MAX:
            message = f"more than {CALLS_IN_FLIGHT_MAX} calls in flight on one connection"
            raise wire.BadRequest(request.id, wire.OVERLOADED, message, "wait for answers, or open another")
        return method, params

    async def _carry_out(
        self, request_id: wire.RequestId, method: Method, params: Params, connection: trio.CancelScope
    ) -> None:
        handler = self._server.handlers[method.name]
        try:
            if isinstance(method, Stream):
                await self._stream_items(request_id, method, cast(StreamHandler, handler), params)
            else:
                await self._answer(request_id, method, cast(CallHandler, handler), params)
        except _Gone:
            connection.cancel()
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()
                self._idle = trio.Event()

    async def _answer(
        self, request_id: wire.RequestId, method: Method, handler: CallHandler, params: Params
    ) -> None:
        try:
            line = wire.result_line(request_id, await handler(params, self._caller))
        except Exception as error:
            line = wire.error_line(request_id, _body_of_any(error, method.name))
        # The answer to daemon.stop must still leave when its handler has cancelled us.
        cancelled = trio.current_effective_deadline() == -math.inf
        with trio.CancelScope(shield=cancelled) as last_words:
            if cancelled:
                last_words.deadline = trio.current_time() + LAST_WORDS_S
            await self._send(line)

    async def _stream_items(
        self,
        request_id: wire.RequestId,
        method: Stream[Any, Any],
        handler: StreamHandler,
        params: Params,
    ) -> None:
        self._last_subscription += 1
        number = self._last_subscription
        notify = functools.partial(wire.notification_line, method.name, number)
        await self._send(wire.result_line(request_id, Subscribed(number)))
        try:
            async with contextlib.aclosing(handler(params, self._caller)) as items:
                async for item in items:
                    await self._send(notify(item=item))
        except _Gone:
            raise
        except Exception as error:
            line = notify(error=_body_of_any(error, method.name))
        else:
            line = notify(done=True)
        await self._send(line)

    async def _send(self, line: bytes) -> None:
        # Without a checkpoint when the lock is free: what was to be said is said before a cancellation arrives.
        try:
            self._write_lock.acquire_nowait()
        except trio.WouldBlock:
            await self._write_lock.acquire()
        try:
            await self._stream.send_all(line)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise _Gone from None
        finally:
            self._write_lock.release()

    async def _finish_calls(self) -> None:
        """After the caller's last line: wait for its calls, unless it has closed altogether."""
        while self._calls and not _hung_up(self._stream.socket):
            idle = self._idle
            with trio.move_on_after(HANG_UP_CHECK_S):
                await idle.wait()


def _body_of_any(error: Exception, method: str) -> ErrorBody:
    """Return how `error` crosses the socket; AssertionError (our bug) is raised on."""
    cause: BaseException = error
    if isinstance(error, BaseExceptionGroup):
        if error.subgroup(AssertionError):
            raise error
        while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
            cause = cause.exceptions[0]
    if isinstance(cause, AssertionError):
        raise cause
    if isinstance(cause, NodeError | ProtocolError):
        return wire.body_of(cause)
    log_id = secrets.token_hex(4)
    log.error("rpc.internal_error", log_id=log_id, method=method, exc_info=error)
    return ErrorBody(
        wire.INTERNAL_ERROR,
        f"internal error in {method}: the daemon's log has it under {log_id}",
        ErrorData(f"please report it with the log's lines: journalctl -u gpunode | grep -A40 {log_id}", log_id),
    )


def _caller(sock: trio.socket.SocketType, admin_gids: frozenset[int]) -> Caller:
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    is_admin = uid in {0, os.geteuid()} or gid in admin_gids
    if admin_gids and not is_admin:
        with contextlib.suppress(OSError):
            packed = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _GROUPS_MAX)
            is_admin = not admin_gids.isdisjoint(struct.unpack(f"={len(packed) // 4}I", packed))
    return Caller(uid, gid, pid, is_admin)


def _hung_up(sock: trio.socket.SocketType) -> bool:
    """Return whether the other side has closed both directions (poll(2): POLLHUP)."""
    poll = select.poll()
    poll.register(sock.fileno(), 0)
    return bool(poll.poll(0))
