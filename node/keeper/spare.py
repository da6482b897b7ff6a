"""Waiting as a spare keeper for a lease to look after. Refuses assignments of anybody but our own user or root."""

import os
import socket
import struct
from pathlib import Path

from node.lease.link import FRAME_SIZE_MAX
from node.lease.service import bound_socket
from node.lease.spare import Assigned, Assignment
from node.log import get_logger
from protocol import codec
from protocol.errors import MalformedRecord

CONNECT_WAIT_S = 20
"""How long the daemon may take to connect: one that died before it did leaves no spare behind."""
PARENT_CHECK_S = 0.5
LOG_FILE = "keeper.log"
_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")

log = get_logger(__name__)


def wait_for_assignment(path: Path) -> Assignment | None:
    """Listen at `path` for the daemon, and return the lease that it gives us, taken on; None when it gives none.

    On return this process is the lease's user, and its output goes to the lease's log.
    """
    with bound_socket(path) as listener:
        connection = _accept(listener, path.parent)
    if connection is None:
        return None
    with connection:
        connection.settimeout(None)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] not in (0, os.geteuid()):
            return None
        try:
            assignment = _receive(connection)
        except (OSError, MalformedRecord) as error:
            log.warning("keeper.spare_refused", reason=str(error))
            return None
        if assignment is None:
            return None
        _become(assignment)
        reply = codec.encode(Assigned(os.getpid()))
        connection.sendall(_LENGTH.pack(len(reply)) + reply)
    return assignment


def _accept(listener: socket.socket, directory: Path) -> socket.socket | None:
    """Return the daemon's connection; None when it has died, has taken the socket's directory away, or is late."""
    parent = os.getppid()
    listener.settimeout(PARENT_CHECK_S)
    for _try in range(int(CONNECT_WAIT_S / PARENT_CHECK_S)):
        try:
            return listener.accept()[0]
        except TimeoutError:
            # Whoever is another's child has lost its daemon; so has one whose daemon ended before we began.
            if os.getppid() != parent or not directory.exists():
                return None
    return None


def _receive(connection: socket.socket) -> Assignment | None:
    header = connection.recv(_LENGTH.size, socket.MSG_WAITALL)
    if len(header) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(header)
    if size > FRAME_SIZE_MAX:
        raise MalformedRecord(f"a frame of {size} bytes")
    return codec.decode_untrusted(connection.recv(size, socket.MSG_WAITALL), Assignment)


def _become(assignment: Assignment) -> None:
    if os.geteuid() == 0 and assignment.uid != 0:
        os.setgroups([])
        os.setgid(assignment.gid)
        os.setuid(assignment.uid)
    # As that user: root would open whatever the user has put there.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(Path(assignment.directory) / LOG_FILE, flags, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
