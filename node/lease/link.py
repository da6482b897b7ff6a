"""The link between a daemon and a keeper: the daemon's side.

A unix stream socket carries frames: a 32-bit big-endian length and canonical CBOR. The keeper speaks first with
its hello (`LinkHello`); then every message of the daemon is a `Request` with a number, answered by one `Reply`
with that number, and `subscribe` makes the keeper push `Reply`s with a status whenever that has changed. Pushes
are conflated: a slow reader gets the newest status, never a backlog. The daemon speaks version N and N-1 of
this, so that keepers survive its upgrade.

    async with connect(socket_path) as link:
        status = await link.status()
        async for status in link.subscribe():   # the present status first, then each change
            ...
        await link.cancel(FailReason.CANCELLED)
        await link.settle()

Refuses to start keepers and to decide what their statuses mean.
"""

import contextlib
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import trio

from node.errors import NodeError
from node.lease.files import LeaseStatus
from protocol import codec
from protocol.errors import MalformedRecord
from protocol.machines.lease import FailReason

VERSION = 1
VERSION_MIN = 1
FRAME_SIZE_MAX = 512 * 1024
REQUESTS_MAX = 64
"""Most unanswered requests of one link."""
LINK_TIMEOUT_S = 10
"""How long a keeper may take to say hello."""
POLL_S = 0.02
"""A socket's appearance can't be waited for portably; inotify would be another dependency."""
_LENGTH = struct.Struct(">I")

T = TypeVar("T")


class LinkError(NodeError):
    """The keeper does not answer."""

    code: ClassVar[int] = 2312


class _Gone(LinkError):
    """The keeper has gone."""


class LinkHello(msgspec.Struct, frozen=True):
    """The keeper's first frame."""

    version: int
    """Highest version that it speaks."""
    version_min: int
    lease: bytes
    generation: int
    pid: int


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """The daemon's frame: a method of the closed set, and its arguments."""

    id: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    method: str
    """"status", "subscribe", "cancel", "collect", "conclude", "settle" or "execute"."""
    reason: str = ""
    detail: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    notice_ms: int | None = None
    argv: tuple[str, ...] = ()


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The keeper's frame: an answer, or (for a subscription's id) the next status."""

    id: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    status: LeaseStatus | None = None
    error: str = ""
    last: bool = False
    """A subscription ends with this one."""


class FrameStream:
    """Whole frames over a byte stream; a frame is sent by one task at a time."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._send_lock = trio.Lock()

    async def send(self, frame: Any) -> None:  # noqa: ANN401 - any struct of this module
        """Send one frame. Raises trio.BrokenResourceError, trio.ClosedResourceError."""
        data = codec.encode(frame)
        async with self._send_lock:
            await self._stream.send_all(_LENGTH.pack(len(data)) + data)

    async def receive(self, frame_type: type[T]) -> T:
        """Return the next frame. Raises EOFError at the end, MalformedRecord, trio's resource errors."""
        (size,) = _LENGTH.unpack(await self._receive_exactly(_LENGTH.size))
        if size > FRAME_SIZE_MAX:
            raise MalformedRecord(f"a frame of {size} bytes")
        return codec.decode_untrusted(await self._receive_exactly(size), frame_type, FRAME_SIZE_MAX)

    async def receive_one_of(self, frame_types: Any) -> Any:  # noqa: ANN401 - a union of structs, and one of them
        """As `receive`, for a union of tagged structs."""
        return await self.receive(frame_types)

    async def _receive_exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = await self._stream.receive_some(64 * 1024)
            if not data:
                raise EOFError
            self._buffer += data
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()


class _Mailbox:
    """Holds the newest reply to one request: a slow reader misses the ones between, never the last."""

    def __init__(self) -> None:
        self._reply: Reply | None = None
        self._is_closed = False
        self._news = trio.Event()

    def put(self, reply: Reply) -> None:
        self._reply = reply
        self._news.set()

    def close(self) -> None:
        self._is_closed = True
        self._news.set()

    async def take(self) -> Reply:
        """Wait for a reply not taken yet. Raises _Gone when none can come any more."""
        while self._reply is None:
            if self._is_closed:
                raise _Gone
            self._news = trio.Event()
            await self._news.wait()
        reply, self._reply = self._reply, None
        return reply


class KeeperLink:
    """An open link. Its methods may be called from several tasks; all raise LinkError once the keeper is gone."""

    def __init__(self, frames: FrameStream, hello: LinkHello) -> None:
        self._frames = frames
        self.hello = hello
        self._next_id = 0
        self._waiting: dict[int, _Mailbox] = {}
        self._is_over = False

    async def status(self) -> LeaseStatus:
        """Return the lease's status now."""
        reply = await self._ask(Request(self._take_id(), "status"))
        if reply.status is None:
            raise LinkError("the keeper answered without a status")
        return reply.status

    async def subscribe(self) -> AsyncGenerator[LeaseStatus, None]:
        """Yield the present status, then the newest whenever it has changed.

        Ends when the lease is settled or the keeper has gone (the lock, or the status file, says which). Close
        the generator (`contextlib.aclosing`) to stop earlier.
        """
        request = Request(self._take_id(), "subscribe")
        with self._expecting(request.id) as mailbox, contextlib.suppress(_Gone):
            await self._send(request)
            while True:
                reply = await mailbox.take()
                if reply.error:
                    raise LinkError(reply.error)
                if reply.status is not None:
                    yield reply.status
                if reply.last:
                    return

    async def cancel(self, reason: FailReason, *, detail: str = "", notice_ms: int | None = None) -> None:
        """End the job: SIGTERM now, kill after `notice_ms` (None: what the lease's terms give that reason).

        Returns once the keeper has taken note, durably; outputs are still collected. Idempotent.
        """
        await self._ask(Request(self._take_id(), "cancel", reason=str(reason), detail=detail, notice_ms=notice_ms))

    async def collect(self) -> None:
        """Have a renter's keeper try at once what waits to be tried again: outputs, and the tunnel."""
        await self._ask(Request(self._take_id(), "collect"))

    async def conclude(self, reason: FailReason, *, detail: str = "") -> None:
        """Tell a renter's keeper that the provider is done with the lease, and will not answer any more.

        Unless everything is here, the lease then fails for `reason`. Returns once that is durable. Idempotent.
        """
        await self._ask(Request(self._take_id(), "conclude", reason=str(reason), detail=detail))

    async def settle(self) -> None:
        """Say that the accounts are closed: the keeper deletes keys, erases scratch and exits.

        Allowed in the phases of `OVER_PHASES` only; otherwise LinkError.
        """
        await self._ask(Request(self._take_id(), "settle"))

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id

    @contextlib.contextmanager
    def _expecting(self, request_id: int) -> Iterator[_Mailbox]:
        if self._is_over:
            raise _Gone
        if len(self._waiting) >= REQUESTS_MAX:
            raise LinkError(f"{REQUESTS_MAX} requests are waiting already")
        mailbox = self._waiting[request_id] = _Mailbox()
        try:
            yield mailbox
        finally:
            del self._waiting[request_id]

    async def _send(self, request: Request) -> None:
        try:
            await self._frames.send(request)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise _Gone from None

    async def _ask(self, request: Request) -> Reply:
        with self._expecting(request.id) as mailbox:
            await self._send(request)
            reply = await mailbox.take()
        if reply.error:
            raise LinkError(reply.error)
        return reply

    async def _read(self) -> None:
        try:
            while True:
                reply = await self._frames.receive(Reply)
                mailbox = self._waiting.get(reply.id)
                if mailbox is not None:
                    mailbox.put(reply)
        except (EOFError, MalformedRecord, trio.BrokenResourceError, trio.ClosedResourceError):
            return
        finally:
            self._is_over = True
            for mailbox in self._waiting.values():
                mailbox.close()


async def open_frames(
    socket_path: str | Path, *, starting_s: float = 0.0, has_ended: Callable[[], bool] = lambda: False
) -> tuple[FrameStream, LinkHello]:
    """Connect to the keeper that listens at `socket_path`, and hear its hello. Raises LinkError.

    A keeper that is just being started is waited for: `starting_s` seconds at most, and while it has not ended.
    """
    limit = trio.current_time() + starting_s
    try:
        with trio.fail_after(starting_s + LINK_TIMEOUT_S):
            frames = FrameStream(await _open_socket(socket_path, limit, has_ended))
            hello = await frames.receive(LinkHello)
    except trio.TooSlowError:
        raise LinkError(f"the keeper at {socket_path} does not answer") from None
    except (OSError, EOFError, MalformedRecord, trio.BrokenResourceError) as error:
        raise LinkError(f"no keeper answers at {socket_path}: {error or type(error).__name__}") from None
    if not hello.version_min <= VERSION or hello.version < VERSION_MIN:
        await frames.aclose()
        raise LinkError(
            f"the keeper at {socket_path} speaks versions {hello.version_min} to {hello.version} of the link, "
            f"this daemon {VERSION_MIN} to {VERSION}"
        )
    return frames, hello


async def _open_socket(socket_path: str | Path, limit: float, has_ended: Callable[[], bool]) -> trio.SocketStream:
    while True:
        try:
            return await trio.open_unix_socket(str(socket_path))
        except (FileNotFoundError, ConnectionRefusedError):
            # Refused: the socket of a keeper that was killed, until its successor puts its own there.
            if trio.current_time() >= limit or has_ended():
                raise
            await trio.sleep(POLL_S)


@asynccontextmanager
async def connect(
    socket_path: str | Path, *, starting_s: float = 0.0, has_ended: Callable[[], bool] = lambda: False
) -> AsyncIterator[KeeperLink]:
    """Open a link to the keeper that listens at `socket_path`, or will within `starting_s`. Raises LinkError."""
    frames, hello = await open_frames(socket_path, starting_s=starting_s, has_ended=has_ended)
    link = KeeperLink(frames, hello)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link._read)
        try:
            yield link
        finally:
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await frames.aclose()
