"""Requests: one question and one answer on a stream of their own, between admitted peers.

The asker sends a frame (a 32-bit length, then the request), and the answerer sends a frame back. A reset is a
refusal. Both are bounded in size and time, and an asker in how often and how many at once. Refuses to
know what the bytes mean.
"""

from collections import Counter
from collections.abc import Callable

import trio

from node.errors import NodeError
from node.log import get_logger
from node.ports import RequestHandler
from node.swarm.guards import Gatekeeper, Untyped, is_our_bug, reset_quietly
from node.swarm.limits import MESSAGE_SIZE_MAX, NAME_SIZE_MAX, SwarmLimits
from node.swarm.peers import FAULT_FLOOD, FAULT_HANDLER, FAULT_MALFORMED, FAULT_SLOW, PeerState
from node.swarm.streams import read_frame_untrusted, write_frame
from protocol.errors import MalformedRecord
from protocol.identity import NodeId

log = get_logger(__name__)

Fault = Callable[[NodeId, float, str], None]


def protocol_name(name: str) -> str:
    """Return the libp2p protocol under which requests `name` travel. Raises ValueError for a bad name."""
    if not 0 < len(name) <= NAME_SIZE_MAX or name.startswith("/"):
        raise ValueError(f"a request's name has 1 to {NAME_SIZE_MAX} characters and no leading slash")
    return f"/gpunode/{name}"


async def ask(stream: Untyped, data: bytes) -> bytes:
    """Send a request on a fresh stream and return the reply. The caller bounds the time.

    Raises MalformedRecord for a reply that is too long, EOFError for none, and libp2p's errors.
    """
    try:
        await write_frame(stream, data)
        reply = await read_frame_untrusted(stream, MESSAGE_SIZE_MAX)
        await stream.close()
    except BaseException:
        with trio.CancelScope(shield=True):
            await reset_quietly(stream)
        raise
    return reply


class Answerer:
    """Answers one protocol's requests; an instance is a libp2p stream handler."""

    def __init__(
        self,
        name: str,
        handler: RequestHandler,
        keeper: Gatekeeper,
        limits: SwarmLimits,
        fault: Fault,
        counters: Counter[str],
    ) -> None:
        self._name = name
        self._handler = handler
        self._keeper = keeper
        self._limits = limits
        self._fault = fault
        self._counters = counters

    async def __call__(self, stream: Untyped) -> None:
        """Answer the one request of `stream`."""
        state = await self._keeper.wait_admitted(stream.muxed_conn.peer_id)
        if state is None or not self._may_ask(state):
            await reset_quietly(stream)
            return
        state.requests += 1
        answered = False
        try:
            answered = await self._answer(stream, state.node)
        finally:
            state.requests -= 1
            if not answered:
                self._counters["requests_failed"] += 1
                with trio.CancelScope(shield=True):
                    await reset_quietly(stream)

    def _may_ask(self, state: PeerState) -> bool:
        if state.requests < self._limits.requests_at_once and state.request_bucket.take(trio.current_time()):
            return True
        self._counters["requests_flooded"] += 1
        self._fault(state.node, FAULT_FLOOD, "too many requests")
        return False

    async def _answer(self, stream: Untyped, node: NodeId) -> bool:
        """Return whether a reply was sent."""
        timeout_s = self._limits.request_timeout_ms / 1000
        try:
            with trio.fail_after(timeout_s):
                data = await read_frame_untrusted(stream, MESSAGE_SIZE_MAX)
        except trio.TooSlowError:
            self._fault(node, FAULT_SLOW, "a request that was never finished")
            return False
        except MalformedRecord as error:
            self._fault(node, FAULT_MALFORMED, f"malformed request: {error}")
            return False
        reply = await self._compute(node, data)
        if reply is None:
            return False
        with trio.move_on_after(timeout_s) as scope:
            await write_frame(stream, reply)
            await stream.close()
        if scope.cancelled_caught:
            self._fault(node, FAULT_SLOW, "a reply that was never read")
            return False
        self._counters["requests_answered"] += 1
        return True

    async def _compute(self, node: NodeId, data: bytes) -> bytes | None:
        reply: bytes | None = None
        with trio.move_on_after(self._limits.handler_timeout_ms / 1000) as scope:
            try:
                reply = await self._handler(node, data)
            except NodeError as error:
                # A fault of this machine, such as a full disk: nothing to hold against whoever asks.
                log.error("swarm.request_not_answered", name=self._name, problem=str(error))
                return None
            except Exception as error:
                if is_our_bug(error):
                    raise
                log.warning("swarm.request_failed", name=self._name, error=repr(error))
                self._fault(node, FAULT_HANDLER, f"a request {self._name} that could not be answered")
                return None
        if scope.cancelled_caught:
            log.error("swarm.request_handler_slow", name=self._name)
            return None
        if reply is not None and len(reply) > MESSAGE_SIZE_MAX:
            log.error("swarm.reply_too_long", name=self._name, size=len(reply))
            return None
        return reply
