"""Where on this machine control groups can be made: cgroup v2, else the v1 controllers, else nowhere.

Groups are made below this process's own group wherever that is writable, because in a container or a systemd
unit the tree above it belongs to someone else. Refuses to make or change a job's group: `control_group` does.

Sources: Linux Documentation/admin-guide/cgroup-v2.rst ("No Internal Process Constraint", "Delegation") and
cgroup-v1/cgroups.rst; proc(5) for /proc/self/mountinfo.
"""

import errno
import os
import re
from pathlib import Path
from typing import Literal

import msgspec

from node.errors import TierUnavailable

CONTROLLERS = ("cpu", "memory", "pids")
"""What a job's limits need on v2."""
CONTROLLERS_V1 = ("cpu", "freezer", "memory", "pids")
"""The same on v1, where freezing is a controller of its own."""
OPTIONAL_V1 = ("cpuacct",)
_OCTAL = re.compile(r"\\([0-7]{3})")
LEAF = "gpunode-keeper"
"""The child group that our own processes move to on v2, since a group with processes has no limited children."""
HINT_DELEGATE = (
    "start gpunode as root, or by systemd with Delegate=yes: "
    "systemd-run --user --scope -p Delegate=yes gpunode start (needs: loginctl enable-linger)"
)


class Mount(msgspec.Struct, frozen=True):
    """One line of /proc/self/mountinfo."""

    root: str
    point: str
    kind: str
    """File system type."""
    options: tuple[str, ...]
    """The superblock's options: on cgroup v1 they name the controllers."""


class Hierarchy(msgspec.Struct, frozen=True):
    """The directories below which a job's group can be made, by controller; v2 has one, under ""."""

    version: Literal[1, 2]
    parents: dict[str, Path]
    roots: tuple[Path, ...]
    """The mount points, where `sweep` looks for groups that an earlier process made elsewhere."""


def parse_mounts(mountinfo: str) -> tuple[Mount, ...]:
    """Parse /proc/self/mountinfo; a line that does not parse is skipped."""
    mounts = []
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if separator and len(fields) >= 5 and len(tail) >= 3:
            root, point = (_OCTAL.sub(lambda found: chr(int(found[1], 8)), field) for field in fields[3:5])
            mounts.append(Mount(root, point, tail[0], tuple(tail[2].split(","))))
    return tuple(mounts)


def locate(mountinfo: str, own: str, root: Path = Path("/")) -> Hierarchy:
    """Find where groups can be made, from the texts of /proc/self/mountinfo and /proc/self/cgroup.

    `root` is put before every path, so that tests can lay out a tree of their own. Raises TierUnavailable
    when neither version has all controllers in a place that we may write to.
    """
    mounts = parse_mounts(mountinfo)
    groups = dict(_own_groups(own))
    missing: list[str] = []
    for mount in mounts:
        if mount.kind != "cgroup2":
            continue
        base = _below(root, mount, groups.get("", "/"))
        offered = _words(base / "cgroup.controllers")
        if lacking := [c for c in CONTROLLERS if c not in offered]:
            missing.append(f"cgroup v2 at {base} lacks {', '.join(lacking)}")
        elif not os.access(base, os.W_OK):
            missing.append(f"cgroup v2 at {base} is not writable")
        else:
            return Hierarchy(2, {"": base}, (_under(root, mount.point),))
    parents: dict[str, Path] = {}
    roots: list[Path] = []
    for mount in mounts:
        if mount.kind == "cgroup":
            for controller in (*CONTROLLERS_V1, *OPTIONAL_V1):
                if controller in mount.options and controller not in parents:
                    parents[controller] = _below(root, mount, groups.get(controller, "/"))
                    roots.append(_under(root, mount.point))
    if lacking := [c for c in CONTROLLERS_V1 if c not in parents]:
        missing.append(f"cgroup v1 lacks {', '.join(lacking)}")
    elif closed := [str(p) for c, p in parents.items() if c in CONTROLLERS_V1 and not os.access(p, os.W_OK)]:
        missing.append(f"not writable: {', '.join(closed)}")
    else:
        writable = {c: p for c, p in parents.items() if os.access(p, os.W_OK)}
        return Hierarchy(1, writable, tuple(dict.fromkeys(roots)))
    raise TierUnavailable(f"no control groups to limit jobs with: {'; '.join(missing)}", HINT_DELEGATE)


def find_hierarchy() -> Hierarchy:
    """Find where this process can make groups, and on v2 switch the controllers on there.

    Raises TierUnavailable. May move this process and its siblings into the child group `LEAF`.
    """
    proc = Path("/proc/self")
    found = locate(proc.joinpath("mountinfo").read_text(), proc.joinpath("cgroup").read_text())
    return found if found.version == 1 else enable_controllers(found)


def enable_controllers(found: Hierarchy) -> Hierarchy:
    """Switch the controllers on for the children of a v2 group, emptying it into `LEAF` if the kernel insists.

    Raises TierUnavailable when the kernel refuses.
    """
    base = found.parents[""]
    if base.name == LEAF:
        # Our own processes were moved here by an earlier call: jobs' groups are our siblings.
        base = base.parent
    try:
        if not set(CONTROLLERS) <= _words(base / "cgroup.subtree_control"):
            _switch_on(base)
    except OSError as error:
        raise TierUnavailable(f"control groups at {base} cannot be used: {error}", HINT_DELEGATE) from error
    return Hierarchy(2, {"": base}, found.roots)


def _switch_on(base: Path) -> None:
    wanted = " ".join(f"+{controller}" for controller in CONTROLLERS)
    try:
        write(base / "cgroup.subtree_control", wanted)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        leaf = base / LEAF
        leaf.mkdir(exist_ok=True)
        for pid in base.joinpath("cgroup.procs").read_text().split():
            try:
                write(leaf / "cgroup.procs", pid)
            except ProcessLookupError:
                continue
        write(base / "cgroup.subtree_control", wanted)


def write(path: Path, text: str) -> None:
    """Write to a kernel file in one call, as cgroupfs wants it; never creates the file."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _own_groups(own: str) -> list[tuple[str, str]]:
    """Parse /proc/self/cgroup into (controller, path); the v2 line has the controller ""."""
    pairs = []
    for line in own.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            pairs += [(controller, parts[2]) for controller in parts[1].split(",")]
    return pairs


def _below(root: Path, mount: Mount, own: str) -> Path:
    """Return our own group's directory below `mount`, or the mount point when ours is not visible there."""
    point = _under(root, mount.point)
    prefix = mount.root.rstrip("/")
    if own.startswith(prefix + "/") and ".." not in own.split("/"):
        inside = point / own[len(prefix) :].lstrip("/")
        if inside.is_dir():
            return inside
    return point


def _under(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _words(path: Path) -> set[str]:
    try:
        return set(path.read_text().split())
    except OSError:
        return set()
