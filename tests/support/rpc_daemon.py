"""A daemon that answers from samples, on a real socket: in a trio task, or in a thread of its own."""

import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import trio
from support.rpc_samples import RESULTS

from node.rpc import api, server


class CannedDaemon:
    """Handlers that answer with `replies` and remember what they were asked.

    A reply that is an exception is raised; a sequence is what a subscription yields (an exception in it is raised
    in its place); a callable is called with (params, caller).
    """

    def __init__(self) -> None:
        self.replies: dict[str, Any] = dict(RESULTS)
        self.asked: list[tuple[str, Any, api.Caller]] = []

    def params_of(self, name: str) -> Any:
        """Return the params of the last call of `name`."""
        return next(params for asked, params, _ in reversed(self.asked) if asked == name)

    def handlers(self) -> api.Handlers:
        """Return a handler for every method."""
        return {
            name: self._stream(name) if isinstance(method, api.Stream) else self._call(name)
            for name, method in api.METHODS.items()
            if name != "rpc.discover"
        }

    def _call(self, name: str) -> Any:
        async def handle(params: Any, caller: api.Caller) -> Any:
            self.asked.append((name, params, caller))
            reply = self.replies[name]
            if callable(reply):
                reply = reply(params, caller)
            if isinstance(reply, Exception):
                raise reply
            return reply

        return handle

    def _stream(self, name: str) -> Any:
        async def handle(params: Any, caller: api.Caller) -> AsyncGenerator[Any, None]:
            self.asked.append((name, params, caller))
            reply = self.replies[name]
            for item in reply(params, caller) if callable(reply) else reply:
                if item is None:
                    await trio.sleep_forever()
                if isinstance(item, Exception):
                    raise item
                yield item

        return handle

    @contextlib.contextmanager
    def in_thread(self, path: Path) -> Iterator[Path]:
        """Serve at `path` from a thread until the end of the context."""
        ready = threading.Event()
        stop: list[trio.CancelScope] = []
        tokens: list[trio.lowlevel.TrioToken] = []

        async def main() -> None:
            tokens.append(trio.lowlevel.current_trio_token())
            async with trio.open_nursery() as nursery:
                stop.append(nursery.cancel_scope)
                await nursery.start(server.serve, self.handlers(), path)
                ready.set()

        thread = threading.Thread(target=trio.run, args=(main,))
        thread.start()
        try:
            assert ready.wait(10), "the canned daemon did not start"
            yield path
        finally:
            tokens[0].run_sync_soon(stop[0].cancel)
            thread.join(10)
            assert not thread.is_alive()
