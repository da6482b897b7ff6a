"""Binding the RPC socket so that it is never visible with the wrong rights, and never taken from a live daemon.

The socket is bound inside a fresh 0700 directory, gets its mode and group there, and is renamed into place. A
lock file beside it is held for life, so that of two daemons that start at once one is refused. Refuses to
replace anything that is not a dead socket.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from node.errors import ConfigError, RpcError
from node.rpc.paths import SOCKET_PATH_MAX

BACKLOG = 64
MODE_OWNER = 0o600
MODE_GROUP = 0o660


@contextlib.contextmanager
def bound_socket(path: Path, group: int | None = None) -> Iterator[socket.socket]:
    """Listen at `path`: mode 0600, or 0660 with `group` as its group; remove it at the end.

    Raises RpcError when another daemon answers there, ConfigError when the path cannot be a socket's.
    """
    if not path.parent.exists():
        path.parent.mkdir(mode=0o700, parents=True)
    with _lock(path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        _refuse_live(path)
        with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as private:
            hidden = Path(private) / "s"
            if len(os.fsencode(hidden)) > SOCKET_PATH_MAX:
                raise ConfigError(
                    f"the socket's path is too long: {path} (unix sockets end near {SOCKET_PATH_MAX} bytes)",
                    "set runtime_dir to a shorter path",
                )
            listener.bind(str(hidden))
            if group is not None:
                os.chown(hidden, -1, group)
            hidden.chmod(MODE_OWNER if group is None else MODE_GROUP)
            listener.listen(BACKLOG)
            inode = hidden.stat().st_ino
            hidden.rename(path)
        try:
            yield listener
        finally:
            _remove(path, inode)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken(path) from None
        yield
    finally:
        os.close(lock)


def _refuse_live(path: Path) -> None:
    """Return when nothing or a dead socket is at `path`; raise otherwise."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is no socket", "move it away, or choose another socket path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # Non-blocking: a daemon whose backlog is full (EAGAIN) is alive, too.
        probe.setblocking(False)
        problem = probe.connect_ex(str(path))
    if problem not in {errno.ECONNREFUSED, errno.ENOENT}:
        raise _taken(path)


def _taken(path: Path) -> RpcError:
    return RpcError(
        f"another daemon answers at {path}",
        "see it with: gpunode status; stop it with: gpunode stop",
    )


def _remove(path: Path, inode: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_ino == inode:
            path.unlink()
