"""The public interface of the daemon: every method, its shapes, and who may call it.

Rules of the interface: params are named (unknown names are refused), results are objects and may gain fields;
lists are arrays inside an object; money is integer nano-credits, prices nano-credits per device-second, times
Unix ms, lengths end in `_ms`, sizes name their unit; a node is its peer id, hashes and leases are hex, bytes
base64. The shapes live in `node.rpc.methods`, one file a group; msgspec structs are the single source, from
which `node.rpc.discover` generates the OpenRPC document.

How the daemon registers its handlers: build one mapping from method name to a callable and give it to
`node.rpc.server.serve`:

    async def cancel(params: jobs.JobParams, caller: Caller) -> jobs.CancelResult: ...

    async def events(params: jobs.JobParams, caller: Caller) -> AsyncGenerator[jobs.JobEvent, None]:
        yield jobs.JobEvent(...)

    handlers: Handlers = {jobs.CANCEL.name: cancel, jobs.EVENTS.name: events, ...}

- A `Call`'s handler is an async function that returns the method's result struct; a `Stream`'s is an async
  generator function that yields its item struct, and returns when there is nothing more to say. The generator
  is closed (with Cancelled) when the caller goes away; it must not hold a nursery or a cancel scope over a yield,
  nor a lock: a slow reader keeps it suspended there. An item is at most about 1 MiB as JSON.
- Params come decoded and in range. ADMIN methods are refused before the handler is called; for OWNER methods
  the handler calls `caller.require_owner(uid)`, or filters by `caller.owns(uid)`.
- Raise NodeError (its code, message and hint go to the caller) or ProtocolError; anything else becomes an
  "internal error" that names a log entry. AssertionError ends the daemon.
- `rpc.discover` is answered by the server itself; every other method in `METHODS` needs a handler
  (`unhandled` lists those without one; the server refuses to start with any).

Refuses behaviour: nothing here does IO.
"""

from collections.abc import Iterable

from node.rpc.method import (
    Access,
    Call,
    Caller,
    ErrorBody,
    ErrorData,
    Handlers,
    Method,
    Nothing,
    Params,
    Stream,
    Subscribed,
)
from node.rpc.methods import daemon, jobs, lend, market, money, peers

__all__ = [
    "METHODS", "Access", "Call", "Caller", "ErrorBody", "ErrorData", "Handlers", "Method", "Nothing", "Params",
    "Stream", "Subscribed", "daemon", "jobs", "lend", "market", "money", "peers", "unhandled",
]  # fmt: skip

METHODS: dict[str, Method] = {
    method.name: method for group in (daemon, market, jobs, lend, peers, money) for method in group.METHODS
}


def unhandled(names: Iterable[str]) -> tuple[str, ...]:
    """Return the methods for which `names` lacks a handler; raise ValueError for a name that is no method."""
    given = set(names)
    unknown = given - METHODS.keys()
    if unknown:
        raise ValueError(f"no such RPC methods: {', '.join(sorted(unknown))}")
    return tuple(sorted(METHODS.keys() - given - {daemon.DISCOVER.name}))
