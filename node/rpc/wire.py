"""JSON-RPC 2.0 as lines of text: reading a request, writing responses and notifications. Pure, no IO.

Source: https://www.jsonrpc.org/specification. Stricter where it may be: batches, positional params and
fractional ids are refused; requests without an id (notifications) are not carried out.
"""

from typing import Any

import msgspec

from node.errors import NodeError
from node.rpc.method import ErrorBody, ErrorData, Params
from protocol.errors import ProtocolError

LINE_SIZE_MAX = 1024 * 1024
"""Longest request, in bytes."""

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
OVERLOADED = -32000
"""Too many connections, or too many calls in flight on this one."""

RequestId = int | str | None


class BadRequest(Exception):
    """What to answer to a line that is no request that can be carried out."""

    def __init__(self, request_id: RequestId, code: int, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id
        self.body = ErrorBody(code, message, ErrorData(hint))


class LineBuffer:
    """Bytes as they arrive, cut into lines of at most LINE_SIZE_MAX bytes."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without their ends and without blank ones.

        Raises BadRequest when a line is too long; there is no way on after that but to close.
        """
        first, *rest = data.split(b"\n")
        self._bytes += first
        lines = []
        for following in rest:
            self._check_length()
            lines.append(bytes(self._bytes))
            self._bytes = bytearray(following)
        self._check_length()
        return [line for line in lines if line.strip()]

    def _check_length(self) -> None:
        if len(self._bytes) > LINE_SIZE_MAX:
            raise BadRequest(None, INVALID_REQUEST, f"a request is at most {LINE_SIZE_MAX} bytes long")


class Request(msgspec.Struct, frozen=True):
    """A call to carry out."""

    id: RequestId
    method: str
    params: Any
    """The tree of the params object, not yet checked."""


def parse_untrusted(line: bytes) -> Request | None:
    """Return the request on `line`, None for a notification; raise BadRequest for anything else."""
    try:
        tree = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadRequest(None, PARSE_ERROR, f"not JSON: {error}") from None
    if isinstance(tree, list):
        raise BadRequest(None, INVALID_REQUEST, "batches are not supported", "send one request a line")
    if not isinstance(tree, dict):
        raise BadRequest(None, INVALID_REQUEST, "a request is an object")
    request_id = tree.get("id")
    if isinstance(request_id, bool) or not isinstance(request_id, int | str | None):
        raise BadRequest(None, INVALID_REQUEST, "the id must be an integer, a string or null")
    method, params = tree.get("method"), tree.get("params", {})
    if tree.get("jsonrpc") != "2.0" or not isinstance(method, str):
        raise BadRequest(
            request_id,
            INVALID_REQUEST,
            'a request has "jsonrpc": "2.0", a method, and an id if it wants an answer',
        )
    if "id" not in tree:
        return None
    if not isinstance(params, dict):
        raise BadRequest(request_id, INVALID_PARAMS, "params must be an object of named parameters")
    return Request(request_id, method, params)


def convert_params(request: Request, params_type: type[Params]) -> Params:
    """Return the params as their struct; raise BadRequest when a name, a type or a range does not fit."""
    try:
        return msgspec.convert(request.params, params_type, strict=True)
    except (msgspec.ValidationError, ValueError) as error:
        raise BadRequest(
            request.id,
            INVALID_PARAMS,
            f"bad params for {request.method}: {error}",
            "see the shapes with: gpunode rpc rpc.discover",
        ) from None


def result_line(request_id: RequestId, result: msgspec.Struct | dict[str, Any]) -> bytes:
    """Return the line of a successful response."""
    return _line({"jsonrpc": "2.0", "id": request_id, "result": result})


def error_line(request_id: RequestId, body: ErrorBody) -> bytes:
    """Return the line of a failed response."""
    return _line({"jsonrpc": "2.0", "id": request_id, "error": body})


def notification_line(method: str, subscription: int, **what: object) -> bytes:
    """Return the line of a notification: `what` is item=struct, done=True, or error=ErrorBody."""
    return _line({"jsonrpc": "2.0", "method": method, "params": {"subscription": subscription, **what}})


def body_of(error: NodeError | ProtocolError) -> ErrorBody:
    """Return how an error with a number crosses the socket."""
    hint = error.hint if isinstance(error, NodeError) else ""
    return ErrorBody(error.code, str(error) or (error.__doc__ or "").strip(), ErrorData(hint))


def _line(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode(message) + b"\n"
