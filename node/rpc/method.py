"""What a method of the RPC is: its name, shapes, who may call it; and what handles it.

Refuses behaviour: `node.rpc.server` carries calls out, the daemon's handlers answer them.
"""

import enum
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from node.errors import Forbidden

P = TypeVar("P", bound="Params")
R = TypeVar("R", bound=msgspec.Struct)


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Named parameters of a method. Unknown names are refused: a typo must not pass silently."""


class Nothing(Params, frozen=True):
    """No parameters."""


class Access(enum.StrEnum):
    """Who may call a method."""

    ANYONE = "anyone"
    """Whoever may open the socket."""
    OWNER = "owner"
    """The uid that the job belongs to, or an administrator. The handler checks, with `Caller.require_owner`."""
    ADMIN = "admin"
    """Root, the daemon's own uid, or a member of the administrators' group. The server checks."""


class Caller(msgspec.Struct, frozen=True):
    """Who is at the other end of the socket, as the kernel tells (SO_PEERCRED)."""

    uid: int
    gid: int
    pid: int
    is_admin: bool

    def owns(self, uid: int) -> bool:
        """Return whether the caller may see and change what belongs to `uid`."""
        return self.is_admin or self.uid == uid

    def require_owner(self, uid: int, what: str = "that") -> None:
        """Raise Forbidden unless the caller owns what belongs to `uid`; `what` names it for the message."""
        if not self.owns(uid):
            raise Forbidden(
                f"{what} belongs to uid {uid}, and you are uid {self.uid}",
                "ask its owner, or call as root or as a member of the administrators' group",
            )


class Call(msgspec.Struct, Generic[P, R], frozen=True, kw_only=True):
    """A method that returns one result."""

    name: str
    params: type[P]
    result: type[R]
    doc: str
    access: Access = Access.ANYONE


class Stream(msgspec.Struct, Generic[P, R], frozen=True, kw_only=True):
    """A subscription: the call's result is `Subscribed`, then come notifications that carry an `item` each."""

    name: str
    params: type[P]
    item: type[R]
    doc: str
    access: Access = Access.ANYONE


class Subscribed(msgspec.Struct, frozen=True):
    """The result of calling a subscription; `subscription` is unique on its connection."""

    subscription: int


class ErrorData(msgspec.Struct, frozen=True):
    """`data` of every error: what to do next, and for an internal error the id to look for in the log."""

    hint: str = ""
    log_id: str = ""


class ErrorBody(msgspec.Struct, frozen=True):
    """The `error` member of a JSON-RPC response."""

    code: int
    message: str
    data: ErrorData = ErrorData()


Method = Call[Any, Any] | Stream[Any, Any]
CallHandler = Callable[[Any, Caller], Awaitable[Any]]
StreamHandler = Callable[[Any, Caller], AsyncGenerator[Any, None]]
Handlers = Mapping[str, CallHandler | StreamHandler]
