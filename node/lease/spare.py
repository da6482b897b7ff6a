"""A spare keeper: a process that has imported everything and waits for a lease, so that none pays for that.

The daemon starts `python -P -m node.keeper --spare SOCKET`, connects, and holds the connection. It sends an
`Assignment` when a lease needs a keeper: the spare then becomes that keeper, as the lease's user. When the
connection ends without one, the spare ends too: no daemon, no spares.

    spare = await connect_spare(socket_path)
    pid = await spare.assign(directory, keeper_socket, uid, gid)

Refuses to be used twice.
"""

from pathlib import Path
from typing import ClassVar

import msgspec
import trio

from node.errors import NodeError
from node.lease.link import FrameStream
from protocol.errors import MalformedRecord

CONNECT_TIMEOUT_S = 20
ASSIGN_TIMEOUT_S = 10
POLL_S = 0.02


class SpareError(NodeError):
    """The spare keeper can't be used."""

    code: ClassVar[int] = 2313


class Assignment(msgspec.Struct, frozen=True):
    """The lease that a spare becomes the keeper of."""

    directory: str
    socket: str
    uid: int
    gid: int


class Assigned(msgspec.Struct, frozen=True):
    """The spare's answer: it is the lease's keeper from now on."""

    pid: int


class Spare:
    """A connected spare keeper."""

    def __init__(self, frames: FrameStream) -> None:
        self._frames = frames

    async def assign(self, directory: Path, socket: Path, uid: int, gid: int) -> int:
        """Make it the keeper of the lease in `directory`, as `uid` and `gid`; return its pid.

        Raises SpareError.
        """
        try:
            with trio.fail_after(ASSIGN_TIMEOUT_S):
                await self._frames.send(Assignment(str(directory), str(socket), uid, gid))
                assigned = await self._frames.receive(Assigned)
        except (trio.TooSlowError, EOFError, MalformedRecord, trio.BrokenResourceError) as error:
            raise SpareError(f"the spare keeper did not take the lease: {error or type(error).__name__}") from None
        finally:
            await self.aclose()
        return assigned.pid

    async def aclose(self) -> None:
        """Let go of it: a spare without a lease ends."""
        with trio.CancelScope(shield=True):
            await self._frames.aclose()


async def connect_spare(socket_path: Path) -> Spare:
    """Connect to the spare that listens, or is about to, at `socket_path`. Raises SpareError."""
    with trio.move_on_after(CONNECT_TIMEOUT_S):
        while True:
            try:
                return Spare(FrameStream(await trio.open_unix_socket(str(socket_path))))
            except OSError:
                await trio.sleep(POLL_S)
    raise SpareError(f"no spare keeper answers at {socket_path}")
