"""A job that runs: waiting, signalling, freezing, killing, for any tier.

The job's group (control group, or the polled tree where there is none) decides what belongs to the job.
Refuses to end a job for any reason but being told to, a limit, or the end of its first process.
"""

import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import trio

from node.errors import SandboxError
from node.log import get_logger
from node.ports import EndReason, JobEnd
from node.sandbox import launch, processes

log = get_logger(__name__)

POLL_MS = 250
"""How often a group that the kernel does not limit is looked at."""
KILL_WAIT_MS_MIN = 1
KILL_WAIT_MS_MAX = 100
STUCK_MS = 10_000
"""After this long a group that does not empty is reported: a process hangs in the kernel, perhaps in a driver."""
SIGKILL_STATUS = 137
SIGNAL_MAX = 64


class Group(Protocol):
    """The processes of one job; `control_group` and `process_tree` have it."""

    @property
    def polled(self) -> bool:
        """Whether `enforce` must be called again and again."""

    @property
    def entries(self) -> tuple[Path, ...]:
        """The files into which a starting process writes "0" to join."""

    def pids(self) -> frozenset[int]:
        """Return the live processes."""

    def enforce(self) -> None:
        """Look at the limits once."""

    def freeze(self) -> None:
        """Stop all."""

    def thaw(self) -> None:
        """Let them go on."""

    def frozen(self) -> bool:
        """Whether all have stopped."""

    def kill(self) -> None:
        """Send SIGKILL to all, once."""

    def memory_kills(self) -> int:
        """Return how often memory ran out."""

    def usage(self) -> dict[str, int]:
        """Return measured use."""

    def remove(self) -> bool:
        """Remove the group, if it is empty; say whether it is gone."""


Enter = Callable[[tuple[str, ...], int, int, int], Awaitable[subprocess.Popen[bytes]]]
"""(argv, stdin, stdout, stderr) -> a process that runs the command inside the job and ends with its status."""


async def empty(group: Group, name: str) -> None:
    """Kill until nothing of the group is left, then remove it. Idempotent; has no time limit of its own."""
    pause_ms, waited_ms = KILL_WAIT_MS_MIN, 0
    while True:
        if group.pids():
            group.kill()
        elif group.remove():
            return
        await trio.sleep(pause_ms / 1_000)
        waited_ms += pause_ms
        if waited_ms - pause_ms < STUCK_MS <= waited_ms:
            log.warning("sandbox.group_stuck", job=name, pids=sorted(group.pids())[:8])
        pause_ms = min(KILL_WAIT_MS_MAX, pause_ms * 2)


class Job:
    """One job and its first process. Implements `node.ports.RunningJob`."""

    def __init__(
        self,
        name: str,
        first: subprocess.Popen[bytes],
        group: Group,
        *,
        monitors: frozenset[int],
        enter: Enter,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over a started job.

        `monitors` are the sandbox's own processes in the group; `release` frees what the start had opened.
        """
        self._name = name
        self._first = first
        self._group = group
        self._monitors = set(monitors)
        self._enter = enter
        self._release = release
        self._killed = False
        self._judged: JobEnd | None = None
        self._end: JobEnd | None = None
        self._usage: dict[str, int] = {}
        self._waiting = trio.Lock()

    async def wait(self) -> JobEnd:
        """Wait for the job's first process to end, then for its group to be empty (killing what is left).

        May be cancelled and called again, and called by several tasks.
        """
        async with self._waiting:
            if self._end is None:
                status = await self._first_exit()
                if self._judged is None:  # the group that tells is taken down from here on
                    self._judged = self._judge(status)
                    self._usage = self._group.usage()
                await empty(self._group, self._name)
                self._release()
                self._end = self._judged
            return self._end

    def signal(self, number: int) -> None:
        """Send a signal to the job's processes, not to the sandbox's own; no-op once ended."""
        if self._end is None:
            processes.send(self._group.pids, number, spare=self._monitors)

    async def kill(self) -> None:
        """Kill everything in the job's group and wait until it is empty and its end is known. Idempotent."""
        self._killed = True
        if self._end is None and self._first.returncode is None:
            self._group.kill()
            pause_ms = KILL_WAIT_MS_MIN
            while self._group.pids():
                await trio.sleep(pause_ms / 1_000)
                self._group.kill()
                pause_ms = min(KILL_WAIT_MS_MAX, pause_ms * 2)
        await self.wait()

    def freeze(self) -> None:
        """Stop the job's processes where they are; `frozen` says when the kernel has done it."""
        if self._end is None:
            self._group.freeze()

    def thaw(self) -> None:
        """Let them go on."""
        if self._end is None:
            self._group.thaw()

    def frozen(self) -> bool:
        """Whether every process of the job has stopped."""
        return self._end is None and self._group.frozen()

    def usage(self) -> dict[str, int]:
        """Return measured use: cpu_ms, memory_peak_mib (absent when the kernel doesn't tell)."""
        return self._group.usage() if self._judged is None else dict(self._usage)

    async def execute(self, argv: tuple[str, ...], stdin: int, stdout: int, stderr: int) -> int:
        """Run another command inside the job's namespaces and limits; return its exit status.

        The descriptors stay the caller's. When cancelled, the command is killed. Raises SandboxError when the
        job has ended or the command cannot be brought inside.
        """
        if self._end is not None or self._first.returncode is not None:
            raise SandboxError("the job has ended")
        if not argv or any("\0" in word for word in argv):
            raise SandboxError("a command is one or more words without NUL")
        process = await self._enter(argv, stdin, stdout, stderr)
        self._monitors.add(process.pid)
        try:
            status = await launch.wait_for_exit(process)
        finally:
            if process.returncode is None:
                process.kill()
                with trio.CancelScope(shield=True):
                    await launch.wait_for_exit(process)
            self._monitors.discard(process.pid)
        return status if status >= 0 else 128 - status

    async def _first_exit(self) -> int:
        if not self._group.polled:
            return await launch.wait_for_exit(self._first)
        while True:
            with trio.move_on_after(POLL_MS / 1_000) as turn:
                status = await launch.wait_for_exit(self._first)
            if not turn.cancelled_caught:
                return status
            # A look at a few hundred processes takes some ms: not on the event loop's time.
            await trio.to_thread.run_sync(self._group.enforce)

    def _judge(self, status: int) -> JobEnd:
        """Turn the first process's status into the job's end.

        bubblewrap hands on a signal as 128 + n, so there a job that exits with 128 + n by itself reads as
        signalled.
        """
        code = status if status >= 0 else 128 - status
        if code != 0 and self._group.memory_kills() > 0:
            return JobEnd(EndReason.OUT_OF_MEMORY, code)
        if self._killed and code == SIGKILL_STATUS:
            return JobEnd(EndReason.KILLED, code)
        if status < 0 or 128 < code <= 128 + SIGNAL_MAX:
            return JobEnd(EndReason.SIGNALLED, code)
        return JobEnd(EndReason.EXITED, code)
