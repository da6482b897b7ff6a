"""Naming and signalling other processes without hitting a stranger that got the same number.

Refuses to know what the processes are for. Sources: pidfd_open(2), pidfd_send_signal(2), proc(5).
"""

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

PIDS_LISTED_MAX = 65_536
"""How many processes of one job are looked at in a round; a round is repeated until none is left."""


class Process(msgspec.Struct, frozen=True):
    """One process as /proc/<pid>/stat shows it."""

    pid: int
    state: str
    parent: int
    session: int
    began: int
    """Clock ticks since boot: with the pid it names one process for ever."""
    resident_pages: int


def send(members: Callable[[], Iterable[int]], number: int, spare: frozenset[int] | set[int] = frozenset()) -> int:
    """Send signal `number` to every member but `spare`; return how many got it.

    A pid is pinned by a pidfd and then looked up once more: one that died and was reused in between is
    either no member or not what the pidfd names.
    """
    pinned: dict[int, int] = {}
    sent = 0
    try:
        for pid in members():
            if pid not in spare and len(pinned) < PIDS_LISTED_MAX:
                try:
                    pinned[pid] = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
                except OSError:
                    break  # out of file descriptors: signal those that we have
        for pid in pinned.keys() & set(members()):
            try:
                signal.pidfd_send_signal(pinned[pid], number)
                sent += 1
            except (ProcessLookupError, PermissionError):
                continue
    finally:
        for fd in pinned.values():
            os.close(fd)
    return sent


def snapshot(proc: Path = Path("/proc")) -> dict[int, Process]:
    """Return all visible processes by pid. Costs about 20 us each."""
    found = {}
    with os.scandir(proc) as entries:
        pids = [entry.name for entry in entries if entry.name.isdigit()]
    for pid in pids:
        try:
            found[int(pid)] = snapshot_of(int(pid), proc)
        except OSError:
            continue
    return found


def snapshot_of(pid: int, proc: Path = Path("/proc")) -> Process:
    """Return one process. Raises OSError when there is none."""
    stat = proc.joinpath(str(pid), "stat").read_text(errors="replace")
    # The command name is in parentheses and may hold anything, also ") R 1": count from the last one.
    fields = stat[stat.rfind(")") + 2 :].split()
    return Process(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[19]), int(fields[21]))


def descendants(roots: Iterable[int], table: dict[int, Process]) -> frozenset[int]:
    """Return `roots` and everything below them in `table`; zombies are left out."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    todo = [root for root in roots if root in table]
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return frozenset(pid for pid in found if table[pid].state not in "ZX")
