"""The link between a daemon and a keeper: the keeper's side, which listens on the unix socket.

Only the keeper's own uid and root are let in (SO_PEERCRED). The socket is bound under another name inside a
fresh 0700 directory and renamed into place once its mode is set, so that nobody finds it open to more. Refuses
to carry out requests: a `LeaseService` does.
"""

import contextlib
import os
import secrets
import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import trio

from node.errors import NodeError
from node.lease.files import LeaseStatus
from node.lease.link import FrameStream, LinkHello, Reply, Request
from node.log import get_logger
from protocol.errors import MalformedRecord
from protocol.machines.lease import FailReason, LeasePhase

SOCKET_PATH_MAX = 100
"""Longest path of a keeper's socket, in bytes: unix socket addresses end at 108."""
LINKS_MAX = 16
"""Most links at a time; further ones are closed at once."""
SUBSCRIPTIONS_MAX = 16
ACCEPT_RETRY_S = 0.1
NOTICE_MAX_MS = 24 * 3600 * 1000
_CREDENTIALS = struct.Struct("3i")

log = get_logger(__name__)


class LeaseService(Protocol):
    """What a keeper does for its daemon. A NodeError goes back as its message."""

    def status(self) -> LeaseStatus:
        """Return the status now."""

    async def changed(self, sequence: int) -> LeaseStatus:
        """Wait until the status's sequence is above `sequence`, and return the newest."""

    async def cancel(self, reason: FailReason, detail: str, notice_ms: int | None) -> None:
        """End the job; returns once that is durable."""

    async def collect(self) -> None:
        """Try at once what waits to be tried again; raises NodeError where that means nothing."""

    async def conclude(self, reason: FailReason, detail: str) -> None:
        """Take note that the other side is done with the lease; raises NodeError where that means nothing."""

    async def settle(self) -> None:
        """Close the lease; raises NodeError when it is not over."""

    async def execute(self, argv: tuple[str, ...], daemon: FrameStream) -> None:
        """Run another command in the job's sandbox, and speak of it over `daemon` until it is over.

        From then on the link is the command's: frames of `node.lease.execution`.
        """


@contextlib.contextmanager
def bound_socket(path: Path) -> Iterator[socket.socket]:
    """Bind a listening unix socket at `path` (0600, replacing what was there), and remove it in the end."""
    if len(os.fsencode(path)) > SOCKET_PATH_MAX:
        raise NodeError(f"the socket's path {path} is longer than {SOCKET_PATH_MAX} bytes")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind_privately(listener, path)
        inode = path.lstat().st_ino
        yield listener
        with contextlib.suppress(FileNotFoundError):
            # A successor may have put its own socket there.
            if path.lstat().st_ino == inode:
                path.unlink()
    finally:
        listener.close()


def _bind_privately(listener: socket.socket, path: Path) -> None:
    room = path.with_name(f".{secrets.token_hex(6)}")
    room.mkdir(mode=0o700)
    directory = os.open(room, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Through the descriptor: the draft's own path may be too long for a socket address.
        listener.bind(f"/proc/self/fd/{directory}/s")
        (room / "s").chmod(0o600)
        listener.listen(LINKS_MAX)
        (room / "s").rename(path)
    finally:
        os.close(directory)
        shutil.rmtree(room, ignore_errors=True)


async def serve(listener: socket.socket, hello: LinkHello, service: LeaseService) -> None:
    """Answer daemons at `listener` until cancelled."""
    links = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
    async with trio.open_nursery() as nursery:
        while True:
            try:
                stream = await links.accept()
            except OSError as error:  # out of descriptors or memory: not worth a lease
                log.warning("lease.accept_failed", reason=str(error))
                await trio.sleep(ACCEPT_RETRY_S)
                continue
            if len(nursery.child_tasks) < LINKS_MAX and _is_admitted(stream.socket):
                nursery.start_soon(_answer, stream, hello, service)
            else:
                await stream.aclose()


def _is_admitted(peer: trio.socket.SocketType) -> bool:
    _pid, uid, _gid = _CREDENTIALS.unpack(
        peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return uid in (0, os.geteuid())


async def _answer(stream: trio.SocketStream, hello: LinkHello, service: LeaseService) -> None:
    frames = FrameStream(stream)
    try:
        async with trio.open_nursery() as nursery:
            await frames.send(hello)
            while True:
                request = await frames.receive(Request)
                if request.method == "execute":
                    await service.execute(request.argv, frames)
                    return
                if request.method == "subscribe" and len(nursery.child_tasks) < SUBSCRIPTIONS_MAX:
                    nursery.start_soon(_push, frames, request.id, service)
                else:
                    await frames.send(await _reply(request, service))
    except* (EOFError, MalformedRecord, trio.BrokenResourceError, trio.ClosedResourceError) as gone:
        log.debug("lease.link_over", reason=repr(gone.exceptions[0]))
    finally:
        with trio.CancelScope(shield=True):
            await frames.aclose()


async def _push(frames: FrameStream, request_id: int, service: LeaseService) -> None:
    status = service.status()
    while True:
        is_last = status.phase is LeasePhase.SETTLED
        await frames.send(Reply(request_id, status=status, last=is_last))
        if is_last:
            return
        status = await service.changed(status.sequence)


async def _reply(request: Request, service: LeaseService) -> Reply:
    try:
        match request.method:
            case "status":
                return Reply(request.id, status=service.status())
            case "cancel":
                notice_ms = request.notice_ms
                if notice_ms is not None and not 0 <= notice_ms <= NOTICE_MAX_MS:
                    return Reply(request.id, error=f"a notice is between 0 and {NOTICE_MAX_MS} ms")
                await service.cancel(FailReason(request.reason), request.detail, notice_ms)
                return Reply(request.id)
            case "collect":
                await service.collect()
                return Reply(request.id)
            case "conclude":
                await service.conclude(FailReason(request.reason), request.detail)
                return Reply(request.id)
            case "settle":
                await service.settle()
                return Reply(request.id)
            case _:
                return Reply(request.id, error=f"this keeper knows no method {request.method!r}")
    except NodeError as error:
        return Reply(request.id, error=str(error))
    except ValueError:
        return Reply(request.id, error=f"{request.reason!r} is no reason")
