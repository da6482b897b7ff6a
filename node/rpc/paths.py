"""Where the RPC socket is. Refuses to look anywhere else: no scanning, no guessing of other users' daemons."""

import os
from collections.abc import Mapping
from pathlib import Path

SOCKET_VARIABLE = "GPUNODE_SOCKET"
RUNTIME_VARIABLE = "GPUNODE_RUNTIME_DIR"
SOCKET_NAME = "rpc.sock"
SYSTEM_SOCKET = Path("/run/gpunode") / SOCKET_NAME
SOCKET_PATH_MAX = 107
"""Linux: sun_path has 108 bytes with its final zero (unix(7))."""


def socket_candidates(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return where a daemon may answer, best first.

    GPUNODE_SOCKET alone if it is set; else in GPUNODE_RUNTIME_DIR alone, as the daemon reads it; else the user's
    own, then the system's.
    """
    if environ.get(SOCKET_VARIABLE):
        return (Path(environ[SOCKET_VARIABLE]),)
    if environ.get(RUNTIME_VARIABLE):
        return (Path(environ[RUNTIME_VARIABLE]) / SOCKET_NAME,)
    runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    return (Path(runtime) / "gpunode" / SOCKET_NAME, SYSTEM_SOCKET)
