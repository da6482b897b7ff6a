"""The daemon: a composition root, one of the two places that know everyone (the other is `node.keeper`).

Importing this package is cheap; `run_daemon` loads trio, libp2p and the rest.
"""

from node.config import Loaded


def run_daemon(loaded: Loaded) -> None:
    """Run a daemon in the foreground until it is told to stop. Raises NodeError when it cannot start."""
    from node.daemon.process import run  # noqa: PLC0415 - `gpunode --help` must not pay for it

    run(loaded)
