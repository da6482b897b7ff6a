"""A job's processes where there is no control group to hold them: found by looking, limited by polling.

This is the weaker of two ways, for machines where gpunode has no control group of its own, and is used only
by explicit configuration. What it cannot do: between two looks a job may take more memory than it was lent;
no CPU limit; a process that leaves its session escapes an `unsafe-process` job (in bubblewrap nothing can
escape, for the kernel kills a pid namespace with its first process). It refuses to claim otherwise.
"""

import abc
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from node.ports import SandboxLimits
from node.sandbox import processes

MIB = 1 << 20
STOP_ROUNDS_MAX = 16
"""Rounds of SIGSTOP: processes born between two looks are caught in the next."""


class ProcessTree(abc.ABC):
    """A job's processes, as a subclass finds them in a snapshot of /proc."""

    polled = True
    """Limits hold only as far as `enforce` is called."""
    entries: tuple[Path, ...] = ()

    def __init__(
        self,
        limits: SandboxLimits,
        take_snapshot: Callable[[], dict[int, processes.Process]] = processes.snapshot,
    ) -> None:
        self._limits = limits
        self._snapshot = take_snapshot
        self._began: dict[int, int] = {}
        self._memory_kills = 0
        self._peak_mib = 0
        self._stopped = False

    def add(self, pid: int) -> None:
        """Count a process and what comes from it as the job's; no-op when it has ended."""
        with contextlib.suppress(OSError):
            self._began[pid] = processes.snapshot_of(pid).began

    @abc.abstractmethod
    def _members(self, table: dict[int, processes.Process]) -> frozenset[int]:
        """Pick the job's live processes."""

    def pids(self) -> frozenset[int]:
        """Return the live processes."""
        return self._members(self._snapshot())

    def enforce(self) -> None:
        """Look once, and kill the job when its resident memory or number of processes is over the limit."""
        table = self._snapshot()
        members = self._members(table)
        pages = sum(table[pid].resident_pages for pid in members)
        used_mib = pages * os.sysconf("SC_PAGE_SIZE") // MIB
        self._peak_mib = max(self._peak_mib, used_mib)
        if used_mib > self._limits.memory_mib:
            self._memory_kills += 1
            self.kill()
        elif len(members) > self._limits.pids:
            self.kill()

    def freeze(self) -> None:
        """Send SIGSTOP until all have stopped."""
        self._stopped = True
        for _ in range(STOP_ROUNDS_MAX):
            processes.send(self.pids, signal.SIGSTOP)
            if self.frozen():
                return

    def thaw(self) -> None:
        """Send SIGCONT, if they were stopped by `freeze`."""
        if self._stopped:
            self._stopped = False
            processes.send(self.pids, signal.SIGCONT)

    def frozen(self) -> bool:
        """Whether every process has stopped."""
        table = self._snapshot()
        return all(table[pid].state in "Tt" for pid in self._members(table))

    def kill(self) -> None:
        """Send SIGKILL to all, once."""
        processes.send(self.pids, signal.SIGKILL)

    def memory_kills(self) -> int:
        """Return how often `enforce` killed the job for its memory."""
        return self._memory_kills

    def usage(self) -> dict[str, int]:
        """Return memory_peak_mib as the polls saw it."""
        return {"memory_peak_mib": self._peak_mib}

    def remove(self) -> bool:
        """Whether all have ended."""
        return not self.pids()


class Descendants(ProcessTree):
    """The processes that were added, and what descends from them.

    Complete for a pid namespace, where the first process inherits every orphan.
    """

    def _members(self, table: dict[int, processes.Process]) -> frozenset[int]:
        # A number whose process began at another time belongs to a stranger by now.
        alive = [pid for pid, began in self._began.items() if pid in table and table[pid].began == began]
        return processes.descendants(alive, table)


class Sessions(ProcessTree):
    """The sessions whose leaders were added, and what descends from their members.

    The kernel gives a session's number to nobody else while the session has a process. One that is seen
    empty, or whose leader is seen to have begun at another time, is over for good.
    """

    def _members(self, table: dict[int, processes.Process]) -> frozenset[int]:
        members: set[int] = set()
        for session, began in list(self._began.items()):
            found = {pid for pid, process in table.items() if process.session == session}
            if found and (session not in table or table[session].began == began):
                members |= found
            else:
                del self._began[session]
        return processes.descendants(members, table)
