"""A job's processes where there is no control group to hold them: found by looking, limited by polling.

This is the weaker of two ways, for machines where gpunode has no control group of its own, and is used only
by explicit configuration. What it cannot do: between two looks a job may take more memory than it was lent;
no CPU limit; a process that leaves its session escapes an `unsafe-process` job (in bubblewrap nothing can
escape, for the kernel kills a pid namespace with its first process). It refuses to claim otherwise.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from node.ports import SandboxLimits
from node.sandbox import processes

MIB = 1 << 20
STOP_ROUNDS_MAX = 16
"""Rounds of SIGSTOP: processes born between two looks are caught in the next."""


class ProcessTree:
    """A job's processes, as `members` finds them in a snapshot of /proc."""

    polled = True
    """Limits hold only as far as `enforce` is called."""
    entries: tuple[Path, ...] = ()

    def __init__(
        self,
        limits: SandboxLimits,
        members: Callable[[dict[int, processes.Process]], frozenset[int]],
        take_snapshot: Callable[[], dict[int, processes.Process]] = processes.snapshot,
    ) -> None:
        self._limits = limits
        self._members = members
        self._snapshot = take_snapshot
        self._memory_kills = 0
        self._peak_mib = 0
        self._stopped = False

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
