"""The caller's side of the RPC: synchronous, on the standard library's sockets alone.

Several subscriptions may be open on one connection and are read by one loop, without threads. Refuses trio:
the command line must start quickly.
"""

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import msgspec

from node.errors import BadArgument, DaemonUnreachable, NodeError, RpcError
from node.rpc.method import Call, ErrorBody, Params, Stream, Subscribed
from node.rpc.paths import SOCKET_VARIABLE, socket_candidates

REPLY_SIZE_MAX = 64 * 1024 * 1024
"""Longest line accepted from the daemon, in bytes."""
TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
RECEIVE_SIZE = 256 * 1024

P = TypeVar("P", bound=Params)
R = TypeVar("R", bound=msgspec.Struct)


class RemoteError(RpcError):
    """The daemon answered with an error that has no class of its own here; `number` is its JSON-RPC code."""

    def __init__(self, message: str, hint: str, number: int) -> None:
        super().__init__(message, hint)
        self.number = number


class ConnectionLost(DaemonUnreachable):
    """The daemon closed the connection before it had answered."""


class Subscription(msgspec.Struct, frozen=True):
    """An open subscription of this connection."""

    number: int
    method: Stream[Any, Any]


class _Incoming(msgspec.Struct, frozen=True):
    """A line of the daemon: a response, or a notification."""

    id: int | None = None
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: ErrorBody | None = None
    method: str | None = None
    params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Notice(msgspec.Struct, frozen=True):
    """The params of a notification."""

    subscription: int
    item: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    done: bool = False
    error: ErrorBody | None = None


class Client:
    """One connection to the daemon. Use as a context manager; not for several threads at once."""

    def __init__(self, path: Path | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        """Connect to `path`, or to the first socket that answers. Raises DaemonUnreachable."""
        self._timeout_s = timeout_s
        self._socket, self.path = _connect((path,) if path else socket_candidates(os.environ))
        self._lines: deque[bytes] = deque()
        self._partial = bytearray()
        self._notices: deque[_Notice] = deque()
        self._open: dict[int, Subscription] = {}
        self._last_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; its subscriptions end. Idempotent."""
        self._socket.close()

    @property
    def daemon_pid(self) -> int:
        """The pid of the process that listens, as the kernel tells."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return cast(int, struct.unpack("3i", credentials)[0])

    def call(self, method: Call[P, R], params: P) -> R:
        """Call `method` and return its result. Raises the NodeError that the daemon answered with, or RpcError."""
        return _decode(self._request(method.name, params), method.result, method.name)

    def call_raw(self, method: str, params: dict[str, Any]) -> Any:  # noqa: ANN401 - any JSON
        """Call a method by name with a tree, and return the result's tree."""
        return msgspec.json.decode(self._request(method, params))

    def subscribe(self, method: Stream[P, R], params: P) -> Subscription:
        """Open a subscription; its items come out of `items`."""
        number = _decode(self._request(method.name, params), Subscribed, method.name).subscription
        subscription = Subscription(number, method)
        self._open[number] = subscription
        return subscription

    def items(self) -> Iterator[tuple[Subscription, Any]]:
        """Yield (subscription, item) as they come, until every subscription is done.

        Raises the error with which the daemon ended one.
        """
        while self._open:
            notice = self._notices.popleft() if self._notices else self._next_notice()
            subscription = self._open.get(notice.subscription)
            if subscription is None:
                continue
            if notice.error is not None:
                del self._open[notice.subscription]
                raise error_from(notice.error)
            if notice.done:
                del self._open[notice.subscription]
            elif notice.item is not msgspec.UNSET:
                name = subscription.method.name
                yield subscription, _decode(notice.item, subscription.method.item, name)

    def stream(self, method: Stream[P, R], params: P) -> Iterator[R]:
        """Yield the items of one subscription; for a connection that has no other."""
        self.subscribe(method, params)
        for _, item in self.items():
            yield item

    def wait_closed(self) -> None:
        """Wait until the daemon has closed this connection; whatever it still says is dropped."""
        self._socket.settimeout(None)
        with contextlib.suppress(OSError):
            while self._socket.recv(RECEIVE_SIZE):
                pass

    def _request(self, method: str, params: Params | dict[str, Any]) -> msgspec.Raw:
        self._last_id += 1
        request = _encoded({"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params})
        self._socket.settimeout(self._timeout_s)
        try:
            self._socket.sendall(request + b"\n")
        except TimeoutError:
            raise self._silent() from None
        except OSError:
            # It may have said why before it closed (too many connections): read that first.
            pass
        while True:
            incoming = self._next_incoming()
            if incoming.method is not None:
                self._notices.append(_decode(incoming.params, _Notice, incoming.method))
            elif incoming.error is not None and incoming.id in {self._last_id, None}:
                raise error_from(incoming.error)
            elif incoming.id == self._last_id and incoming.result is not msgspec.UNSET:
                return incoming.result

    def _next_notice(self) -> _Notice:
        self._socket.settimeout(None)
        while True:
            incoming = self._next_incoming()
            if incoming.method is not None:
                return _decode(incoming.params, _Notice, incoming.method)

    def _next_incoming(self) -> _Incoming:
        while not self._lines:
            try:
                data = self._socket.recv(RECEIVE_SIZE)
            except TimeoutError:
                raise self._silent() from None
            except OSError:
                data = b""
            if not data:
                raise ConnectionLost(
                    f"the daemon at {self.path} closed the connection before it had answered",
                    "it was stopped or it crashed; look at: gpunode status, and at its log",
                )
            first, *rest = data.split(b"\n")
            self._partial += first
            for following in rest:
                self._lines.append(bytes(self._partial))
                self._partial = bytearray(following)
            if len(self._partial) > REPLY_SIZE_MAX:
                raise RpcError(
                    f"the daemon's answer is longer than {REPLY_SIZE_MAX} bytes", "ask for less at a time"
                )
        return _decode(self._lines.popleft(), _Incoming, "the daemon")

    def _silent(self) -> RpcError:
        return RpcError(
            f"the daemon at {self.path} (pid {self.daemon_pid}) did not answer within {self._timeout_s:.0f} s",
            "it may be overloaded or suspended: look at its log, or restart it (running jobs go on)",
        )


def error_from(body: ErrorBody) -> NodeError:
    """Return the exception for an error of the daemon: its own class where this side knows the number."""
    known = {error.code: error for error in _subclasses(NodeError)}
    kind = known.get(body.code)
    if kind is None:
        return RemoteError(body.message, body.data.hint, body.code)
    return kind(body.message, body.data.hint)


def _subclasses(kind: type[NodeError]) -> Iterator[type[NodeError]]:
    """Yield the classes that own a number; those that only inherit one come with other parameters."""
    for subclass in kind.__subclasses__():
        if "code" in vars(subclass):
            yield subclass
        yield from _subclasses(subclass)


def _encoded(request: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(request)
    except UnicodeEncodeError as error:  # a path or a variable's value as the system has it
        shown = os.fsencode(str(error.object)).decode(errors="backslashreplace")
        raise BadArgument(f"{shown} is not UTF-8", "rename the file, or set the variable to text") from None


def _decode(data: Any, shape: type[R], source: str) -> R:  # noqa: ANN401 - bytes, Raw, or UNSET from a stranger
    try:
        return msgspec.json.decode(data, type=shape)
    except (msgspec.DecodeError, TypeError) as error:
        raise RpcError(
            f"{source} answered in a shape that this version does not know: {error}",
            "the daemon and this command differ in version: restart the daemon, or upgrade",
        ) from None


def _connect(paths: tuple[Path, ...]) -> tuple[socket.socket, Path]:
    forbidden: Path | None = None
    for path in paths:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect(str(path))
        except PermissionError:
            forbidden = path
        except (OSError, ValueError):
            pass
        else:
            return connection, path
        connection.close()
    if forbidden is not None:
        raise DaemonUnreachable(
            f"a daemon has its socket at {forbidden}, but you may not open it",
            'join its group, then log in again: sudo usermod -aG gpunode "$USER"',
        )
    where = " or ".join(str(path) for path in paths)
    hint = "start it with: gpunode start"
    if os.environ.get(SOCKET_VARIABLE):
        hint += f" ({SOCKET_VARIABLE} names that socket)"
    raise DaemonUnreachable(f"no daemon answers at {where}", hint)
