"""Where the RPC socket is. Refuses to look anywhere else: no scanning, no guessing of other users' daemons."""

from collections.abc import Mapping
from pathlib import Path

SOCKET_VARIABLE = "GPUNODE_SOCKET"
SYSTEM_SOCKET = Path("/run/gpunode/rpc.sock")
SOCKET_PATH_MAX = 107
"""Linux: sun_path has 108 bytes with its final zero (unix(7))."""


def socket_candidates(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return where a daemon may answer, best first: GPUNODE_SOCKET alone if set, else the user's, the system's."""
    named = environ.get(SOCKET_VARIABLE)
    if named:
        return (Path(named),)
    runtime = environ.get("XDG_RUNTIME_DIR")
    user = (Path(runtime) / "gpunode" / "rpc.sock",) if runtime else ()
    return (*user, SYSTEM_SOCKET)
