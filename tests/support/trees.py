"""A daemon's whole process tree: its keepers, its jobs, its spares, found and ended.

Processes are found by their leases' locks and by the daemon's folder on their command line: none is ended that
does not belong to the test.
"""

import contextlib
import os
import signal
from collections.abc import Collection
from pathlib import Path

from support.daemons import TestDaemon, until
from support.leftovers import control_groups_of, left_behind, udp_ports_of, zombies_of

from node.lease.files import LeaseStatus, read_status
from node.lease.lock import holder_of


def lease_directories(daemon: TestDaemon) -> dict[str, Path]:
    """Return the lease directories below the daemon's state, by the lease's id in hex."""
    return {path.name: path for path in daemon.folder.glob("state/*/leases/[0-9a-f]*") if path.is_dir()}


def status_of(daemon: TestDaemon, lease: str) -> LeaseStatus:
    """Return what the lease's keeper has written last."""
    status = read_status(lease_directories(daemon)[lease])
    assert status is not None
    return status


def keeper_of(daemon: TestDaemon, lease: str) -> int:
    """Return the pid of the keeper that holds the lease."""
    holder = holder_of(lease_directories(daemon)[lease])
    assert holder is not None, f"nobody holds {lease}"
    return holder.pid


def signal_keeper(daemon: TestDaemon, lease: str, number: int) -> None:
    """Send a signal to the lease's keeper."""
    os.kill(keeper_of(daemon, lease), number)


def tree_of(daemon: TestDaemon) -> set[int]:
    """Return the pids of the daemon's keepers, and of all else that names its folder, without the daemon's."""
    directories = lease_directories(daemon).values()
    found = {holder.pid for path in directories if (holder := holder_of(path)) is not None}
    own = daemon.process.pid if daemon.process is not None else 0
    for pid, words in _commands():
        if pid not in (own, os.getpid()) and any(word.startswith(f"{daemon.folder}/".encode()) for word in words):
            found.add(pid)
    return found


def kill_tree(daemon: TestDaemon) -> None:
    """End the daemon, its keepers and their jobs as a power cut would."""
    daemon.kill()

    def is_gone() -> bool:
        for pid in tree_of(daemon):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not tree_of(daemon)

    until(is_gone, f"the processes of {daemon.name} to be gone")


def wait_nothing_left(daemon: TestDaemon, leases: Collection[str], *, as_provider: bool) -> None:
    """Wait until nothing of `leases` is left on the daemon's machine but a renter's logs."""
    seen: list[str] = []

    def is_clean() -> bool:
        seen[:] = _left(daemon, leases, as_provider=as_provider)
        return not seen

    try:
        until(is_clean, "nothing to be left")
    finally:
        print(f"{daemon.name} is left with: {seen}")


def _left(daemon: TestDaemon, leases: Collection[str], *, as_provider: bool) -> list[str]:
    directories = [path for lease, path in lease_directories(daemon).items() if lease in leases]
    processes = {holder.pid for path in directories if (holder := holder_of(path)) is not None}
    for pid, words in _commands():
        if any(os.fsencode(f"{daemon.folder}/") in word for word in words):
            processes |= {pid} if any(lease.encode() in word for lease in leases for word in words) else set()
    parents = processes | ({daemon.process.pid} if daemon.process is not None else set())
    found = [f"process {pid}" for pid in processes]
    found += [f"zombie {pid}" for pid in zombies_of(parents)]
    found += [f"UDP port {port}" for port in udp_ports_of(processes)]
    found += left_behind(daemon.folder, leases)
    found += control_groups_of(leases) if as_provider else []
    found += [str(path) for lease in directories for path in (*lease.glob("scratch*"), *lease.glob("keys"))]
    return found + ([str(path) for path in directories] if as_provider else [])


def _commands() -> list[tuple[int, list[bytes]]]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((int(process.name), (process / "cmdline").read_bytes().split(b"\0")))
    return found
