"""Which processes are ours: those in the control groups of our leases. Refuses to trust pids without looking."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path

CGROUP_SIZE_MAX = 64 * 1024


def own_pids(pids: Iterable[int], groups: AbstractSet[str], proc: Path = Path("/proc")) -> frozenset[int]:
    """Return those of `pids` that are in a control group named in `groups` (a `SandboxSpec.name`), or below one.

    From /proc/<pid>/cgroup, see cgroups(7): any hierarchy counts. A process that is gone is not ours.
    """
    return frozenset(pid for pid in pids if not groups.isdisjoint(_group_names(proc / str(pid) / "cgroup")))


def _group_names(path: Path) -> set[str]:
    """Return every component of every control group path in a /proc/<pid>/cgroup file."""
    try:
        with path.open("rb") as file:
            lines = file.read(CGROUP_SIZE_MAX).decode(errors="replace").splitlines()
    except OSError:
        return set()
    return {name for line in lines for name in line.split(":", 2)[-1].split("/") if name}
