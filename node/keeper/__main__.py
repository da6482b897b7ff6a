"""`python -P -m node.keeper LEASE_DIR SOCKET`: look after one lease until it is settled.

With `--spare SOCKET` in their place it waits there for a lease (`node.lease.spare`).

Everything is imported here, at the start: an upgrade must not change the code under a running keeper. Ends with
status 0 when the lease is settled or SIGTERM came to a renter's, 1 when it could not go on (its daemon starts
another), 3 when another keeper holds the lease.
"""

import argparse
import signal
import sys
from pathlib import Path

import trio

from node import log as logging
from node.clock import SystemClock
from node.errors import NodeError
from node.keeper.provider import ProviderKeeper
from node.keeper.renter import RenterKeeper
from node.keeper.spare import wait_for_assignment
from node.keeper.start import IDLE_MS, bound_own_log, prepare_process, tunnel_limits
from node.lease.files import Role, delete_keys, read_keys, read_lease_file, read_status
from node.lease.lock import LeaseHeld, LeaseLock
from node.lease.service import bound_socket
from node.sandbox import sweep_scratch
from protocol.machines.lease import LeasePhase

EXIT_FAILED = 1
EXIT_HELD = 3
LOG_CHECK_S = 60

log = logging.get_logger(__name__)


def main() -> int:
    """Run a keeper; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -P -m node.keeper", description="Look after one lease.")
    parser.add_argument("directory", type=Path, nargs="?", help="the lease's directory")
    parser.add_argument("socket", type=Path, nargs="?", help="where the daemon finds this keeper")
    parser.add_argument("--spare", type=Path, metavar="SOCKET", help="wait there for a lease to look after")
    parser.add_argument("--log-level", choices=logging.LEVELS, default="info")
    parser.add_argument("--idle-ms", type=int, default=IDLE_MS, help="after this silence a peer counts as gone")
    arguments = parser.parse_args()
    prepare_process()
    logging.configure(arguments.log_level, json_lines=True)
    if arguments.spare is not None:
        assignment = wait_for_assignment(arguments.spare)
        if assignment is None:
            return 0
        arguments.directory, arguments.socket = Path(assignment.directory), Path(assignment.socket)
    if arguments.directory is None or arguments.socket is None:
        parser.error("the lease's directory and a socket are needed")
    bound_own_log()
    try:
        lock = LeaseLock.acquire(arguments.directory)
    except NodeError as error:
        log.warning("keeper.not_begun", reason=str(error))
        return EXIT_HELD if isinstance(error, LeaseHeld) else EXIT_FAILED
    problem = _run(arguments, lock.generation)
    lock.release()
    if problem is None:
        return 0
    log.error("keeper.failed", reason=str(problem), hint=problem.hint)
    return EXIT_FAILED


def _run(arguments: argparse.Namespace, generation: int) -> NodeError | None:
    """Look after the lease; return why that could not go on, None when it is settled."""
    try:
        trio.run(_keep, arguments.directory, arguments.socket, generation, arguments.idle_ms)
    except NodeError as error:
        return error
    except BaseExceptionGroup as group:
        ours, rest = group.split(NodeError)
        if ours is None or rest is not None:
            raise
        leaf: BaseException = ours
        while isinstance(leaf, BaseExceptionGroup):
            leaf = leaf.exceptions[0]
        return leaf if isinstance(leaf, NodeError) else NodeError(str(leaf))
    return None


async def _keep(directory: Path, socket_path: Path, generation: int, idle_ms: int) -> None:
    before = await trio.to_thread.run_sync(read_status, directory)
    if before is not None and before.phase is LeasePhase.SETTLED:
        await sweep_scratch(directory)
        await trio.to_thread.run_sync(delete_keys, directory)
        return
    lease_file = await trio.to_thread.run_sync(read_lease_file, directory)
    keys = await trio.to_thread.run_sync(read_keys, directory)
    keeper: ProviderKeeper | RenterKeeper
    if lease_file.provider_side is not None and lease_file.role is Role.PROVIDER:
        keeper = ProviderKeeper(directory, lease_file, lease_file.provider_side, keys, generation)
    elif lease_file.renter_side is not None:
        keeper = RenterKeeper(directory, lease_file, lease_file.renter_side, keys, generation)
    with bound_socket(socket_path) as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_heed_signals, keeper, nursery.cancel_scope)
            nursery.start_soon(_bound_log)
            await keeper.run(listener, SystemClock(), tunnel_limits(idle_ms))
            nursery.cancel_scope.cancel()


async def _heed_signals(keeper: ProviderKeeper | RenterKeeper, scope: trio.CancelScope) -> None:
    """At the first signal end the provider's job; at the second, or as the renter's, leave: the next goes on."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        is_first = True
        async for number in signals:
            log.info("keeper.signalled", signal=number)
            if isinstance(keeper, RenterKeeper) or not is_first:
                scope.cancel()
                return
            is_first = False
            await keeper.shut_down()


async def _bound_log() -> None:
    while True:
        await trio.sleep(LOG_CHECK_S)
        bound_own_log()


if __name__ == "__main__":
    sys.exit(main())
