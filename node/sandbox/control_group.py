"""One job's control group: its limits, its freezer, its killing; on cgroup v1 and v2.

The group is the truth about what still runs for a lease: a device is free only when the group is empty.
Refuses to wait: everything here returns at once, and `running` repeats what needs time.

Sources: Linux Documentation/admin-guide/cgroup-v2.rst; cgroup-v1/{memory,freezer-subsystem,pids,cpuacct}.rst;
scheduler/sched-bwc.rst for the CPU quota.
"""

import abc
import errno
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from node.errors import SandboxError
from node.ports import SandboxLimits
from node.sandbox import processes
from node.sandbox.hierarchy import Hierarchy, write

PREFIX = "gpunode-job-"
MONITORS_MAX = 8
"""Processes of the sandbox itself (two of bubblewrap, one for each command being run by `execute`) that are in
the group and must not count against the job's own limit."""
PERIOD_US = 100_000
QUOTA_US_MIN = 1_000
"""The kernel's smallest CPU quota."""
MIB = 1 << 20


class ControlGroup(abc.ABC):
    """A control group of one job: a directory on v2, one in each controller's tree on v1."""

    polled = False
    """The kernel holds the limits; nobody needs to call `enforce`."""

    def __init__(self, directories: Iterable[Path]) -> None:
        self._directories = tuple(dict.fromkeys(directories))
        self._kills = 0

    @property
    def entries(self) -> tuple[Path, ...]:
        """The files into which a starting process writes "0" to join."""
        return tuple(directory / "cgroup.procs" for directory in self._directories)

    def pids(self) -> frozenset[int]:
        """Return the group's live processes (zombies are no longer in a group)."""
        found: set[int] = set()
        for entry in self.entries:
            found.update(int(pid) for pid in _text(entry).split())
        # 0 stands for a process of a pid namespace that cannot be named from here.
        return frozenset(found - {0})

    def make(self, limits: SandboxLimits) -> None:
        """Create the directories and write the limits. Raises SandboxError, having removed what it made."""
        made: list[Path] = []
        try:
            for directory in self._directories:
                directory.mkdir(mode=0o755)
                made.append(directory)
            self._limit(limits)
        except OSError as error:
            for directory in made:
                directory.rmdir()
            if isinstance(error, FileExistsError):
                message = f"the control group {error.filename} exists already"
                raise SandboxError(message, "sweep that name first") from error
            raise SandboxError(f"the control group could not be made: {error}") from error

    def kill(self) -> None:
        """Send SIGKILL to everything in the group, once.

        The group is frozen meanwhile: nobody runs on to see the others die, and what is killed has no time to
        fork. In a second round nobody may fork at all, so that killing in rounds comes to an end.
        """
        if self._kills:
            self._put("pids.max", "0")
        self._kills += 1
        self.freeze()
        processes.send(self.pids, signal.SIGKILL)
        self.thaw()  # on v1 the signal arrives only now

    def remove(self) -> bool:
        """Remove the group; False while something is still in it. Idempotent. Raises SandboxError."""
        gone = True
        for directory in self._directories:
            try:
                directory.rmdir()
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                    raise SandboxError(f"the control group could not be removed: {error}") from error
                gone = False
        return gone

    def enforce(self) -> None:
        """Return at once: the kernel enforces."""
        return

    @abc.abstractmethod
    def _limit(self, limits: SandboxLimits) -> None:
        """Write the limits' files."""

    @abc.abstractmethod
    def freeze(self) -> None:
        """Stop every process of the group; the kernel may need a moment until `frozen`."""

    @abc.abstractmethod
    def thaw(self) -> None:
        """Let them go on; no-op when they do, or when the group is gone."""

    @abc.abstractmethod
    def frozen(self) -> bool:
        """Whether every process has stopped."""

    @abc.abstractmethod
    def memory_kills(self) -> int:
        """Return how many processes the kernel killed because memory ran out."""

    @abc.abstractmethod
    def usage(self) -> dict[str, int]:
        """Return cpu_ms and memory_peak_mib, as far as the kernel tells."""

    def _must_put(self, name: str, text: str) -> None:
        """Write `text` to the one file called `name`. Raises OSError: a limit is never left out silently."""
        places = [place for directory in self._directories if (place := directory / name).exists()]
        if len(places) != 1:
            raise FileNotFoundError(errno.ENOENT, "no such limit", name)
        write(places[0], text)

    def _put(self, name: str, text: str) -> None:
        """Write `text` to every file called `name` that there is."""
        for directory in self._directories:
            try:
                write(directory / name, text)
            except (FileNotFoundError, ProcessLookupError):
                continue
            except OSError as error:
                if error.errno != errno.ENODEV:  # the group was removed between open and write
                    raise

    def _get(self, name: str) -> str:
        """Return the content of the first file called `name`, "" without one."""
        return next((text for directory in self._directories if (text := _text(directory / name))), "")

    def _counter(self, name: str, key: str) -> int:
        """Return the number after `key` in a flat keyed file, 0 when it is not there."""
        for line in self._get(name).splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == key:
                return int(words[1])
        return 0


class ControlGroupV1(ControlGroup):
    """The group in the memory, pids, cpu, freezer (and, where mounted, cpuacct) trees.

    When memory runs out the kernel kills the biggest process, not the whole group as on v2.
    """

    def _limit(self, limits: SandboxLimits) -> None:
        size = str(limits.memory_mib * MIB)
        self._must_put("memory.limit_in_bytes", size)
        self._put("memory.memsw.limit_in_bytes", size)  # with swap; absent without swap accounting
        self._put("memory.swappiness", "0")
        self._must_put("pids.max", str(limits.pids + MONITORS_MAX))
        self._must_put("cpu.cfs_period_us", str(PERIOD_US))
        self._must_put("cpu.cfs_quota_us", str(quota_us(limits)))

    def freeze(self) -> None:
        """Stop every process of the group; the kernel may need a moment until `frozen`."""
        self._put("freezer.state", "FROZEN")

    def thaw(self) -> None:
        """Let them go on; no-op when they do, or when the group is gone."""
        self._put("freezer.state", "THAWED")

    def frozen(self) -> bool:
        """Whether every process has stopped."""
        return self._get("freezer.state").strip() == "FROZEN"

    def memory_kills(self) -> int:
        """Return how many processes the kernel killed because memory ran out."""
        return self._counter("memory.oom_control", "oom_kill")

    def usage(self) -> dict[str, int]:
        """Return cpu_ms and memory_peak_mib, as far as the kernel tells."""
        found = {}
        if peak := self._get("memory.max_usage_in_bytes"):
            found["memory_peak_mib"] = -(-int(peak) // MIB)
        if used := self._get("cpuacct.usage"):  # nanoseconds
            found["cpu_ms"] = int(used) // 1_000_000
        return found


class ControlGroupV2(ControlGroup):
    """The group in the unified tree. An out-of-memory kill ends the whole group (memory.oom.group)."""

    def _limit(self, limits: SandboxLimits) -> None:
        self._must_put("memory.max", str(limits.memory_mib * MIB))
        self._put("memory.swap.max", "0")  # absent on a kernel without swap
        self._must_put("memory.oom.group", "1")
        self._must_put("pids.max", str(limits.pids + MONITORS_MAX))
        self._must_put("cpu.max", f"{quota_us(limits)} {PERIOD_US}")

    def freeze(self) -> None:
        """Stop every process of the group; the kernel may need a moment until `frozen`."""
        self._put("cgroup.freeze", "1")

    def thaw(self) -> None:
        """Let them go on; no-op when they do, or when the group is gone."""
        self._put("cgroup.freeze", "0")

    def frozen(self) -> bool:
        """Whether every process has stopped."""
        return self._counter("cgroup.events", "frozen") == 1

    def kill(self) -> None:
        """Send SIGKILL to everything in the group, once; it arrives in a frozen group too."""
        if all(directory.joinpath("cgroup.kill").exists() for directory in self._directories):  # Linux 5.14
            self._put("cgroup.kill", "1")
        else:
            super().kill()

    def memory_kills(self) -> int:
        """Return how many processes the kernel killed because memory ran out."""
        return self._counter("memory.events", "oom_kill")

    def usage(self) -> dict[str, int]:
        """Return cpu_ms and memory_peak_mib, as far as the kernel tells."""
        found = {}
        if peak := self._get("memory.peak"):  # Linux 5.19
            found["memory_peak_mib"] = -(-int(peak) // MIB)
        if self._get("cpu.stat"):
            found["cpu_ms"] = self._counter("cpu.stat", "usage_usec") // 1_000
        return found


def create(hierarchy: Hierarchy, name: str, limits: SandboxLimits) -> ControlGroup:
    """Make the group of job `name` with its limits. Raises SandboxError, also when the name is in use."""
    kind = ControlGroupV1 if hierarchy.version == 1 else ControlGroupV2
    group = kind(parent / (PREFIX + name) for parent in hierarchy.parents.values())
    group.make(limits)
    return group


def find(hierarchy: Hierarchy, name: str) -> ControlGroup:
    """Return a group of all directories that any process left under `name`, wherever it made them.

    Walks the control group trees, some ms on a big machine: call it in a thread.
    """
    kind = ControlGroupV1 if hierarchy.version == 1 else ControlGroupV2
    folder = PREFIX + name
    return kind(
        Path(where, folder) for root in hierarchy.roots for where, folders, _ in os.walk(root) if folder in folders
    )


def quota_us(limits: SandboxLimits) -> int:
    """Return the CPU time in us per `PERIOD_US`."""
    return max(QUOTA_US_MIN, limits.cpus_milli * PERIOD_US // 1_000)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
