"""Where control groups can be made, on laid-out trees: none of these are the kernel's own."""

import errno
import os
from pathlib import Path

import pytest

from node.errors import TierUnavailable
from node.sandbox import hierarchy
from node.sandbox.hierarchy import Hierarchy, Mount, enable_controllers, locate, parse_mounts

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "".join(
    f"{40 + n} 25 0:{30 + n} / /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"
    for n, name in enumerate(("cpu,cpuacct", "memory", "pids", "freezer"))
)


def make(root: Path, path: str, **files: str) -> Path:
    directory = root / path.lstrip("/")
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory


def test_mount_lines_are_parsed_and_odd_ones_skipped() -> None:
    text = (
        V2
        + "nonsense\n1 2 3 - x\n50 1 8:1 /a\\040b /mnt/é\\040d rw shared:1 master:2 - nfs4 host:/x rw,vers=4.2\n"
    )
    assert parse_mounts(text) == (
        Mount("/", "/sys/fs/cgroup", "cgroup2", ("rw", "nsdelegate")),
        Mount("/a b", "/mnt/é d", "nfs4", ("rw", "vers=4.2")),
    )


def test_v2_is_used_below_our_own_group(tmp_path: Path) -> None:
    own = make(
        tmp_path, "/sys/fs/cgroup/system.slice/gpunode.service", cgroup__controllers="cpuset cpu io memory pids"
    )
    found = locate(V2, "0::/system.slice/gpunode.service\n", tmp_path)
    assert found == Hierarchy(2, {"": own}, (tmp_path / "sys/fs/cgroup",))


def test_v2_in_a_container_starts_at_the_mounts_root(tmp_path: Path) -> None:
    own = make(tmp_path, "/sys/fs/cgroup/inner", cgroup__controllers="cpu memory pids")
    mounts = V2.replace(" / /sys", " /docker/abc /sys")
    assert locate(mounts, "0::/docker/abc/inner\n", tmp_path).parents == {"": own}
    # A path outside of what is mounted cannot be reached: the mount point itself is the nearest.
    make(tmp_path, "/sys/fs/cgroup", cgroup__controllers="cpu memory pids")
    assert locate(mounts, "0::/../other\n", tmp_path).parents == {"": tmp_path / "sys/fs/cgroup"}


def test_v1_takes_each_controller_where_we_are_in_it(tmp_path: Path) -> None:
    base = "/sys/fs/cgroup"
    for name in ("cpu,cpuacct", "pids", "freezer", "memory/box"):
        make(tmp_path, f"{base}/{name}")
    found = locate(V1, "4:memory:/box\n3:cpu,cpuacct:/\n2:pids:/gone\n1:freezer:/\n0::/\n", tmp_path)
    at = tmp_path / base.lstrip("/")
    assert found.version == 1
    assert found.parents == {
        "cpu": at / "cpu,cpuacct",
        "cpuacct": at / "cpu,cpuacct",
        "freezer": at / "freezer",
        "memory": at / "memory/box",
        "pids": at / "pids",
    }
    assert found.roots == (at / "cpu,cpuacct", at / "memory", at / "pids", at / "freezer")


def test_v1_is_used_where_v2_has_no_controllers(tmp_path: Path) -> None:
    make(tmp_path, "/sys/fs/cgroup/unified", cgroup__controllers="")
    for name in ("cpu,cpuacct", "pids", "freezer", "memory"):
        make(tmp_path, f"/sys/fs/cgroup/{name}")
    mounts = V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified") + V1
    assert locate(mounts, "0::/\n", tmp_path).version == 1


def test_nothing_usable_says_why_and_what_to_do(tmp_path: Path) -> None:
    make(tmp_path, "/sys/fs/cgroup", cgroup__controllers="cpu pids")
    with pytest.raises(TierUnavailable, match=r"lacks memory.*v1 lacks cpu, freezer, memory, pids") as caught:
        locate(V2, "0::/\n", tmp_path)
    assert "Delegate=yes" in caught.value.hint


def test_what_we_may_not_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make(tmp_path, "/sys/fs/cgroup/user.slice", cgroup__controllers="cpu memory pids")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != own)
    with pytest.raises(TierUnavailable, match="not writable"):
        locate(V2, "0::/user.slice\n", tmp_path)


def v2_group(tmp_path: Path, path: str, *, enabled: str, procs: str = "") -> Hierarchy:
    own = make(tmp_path, path, cgroup__subtree_control=enabled, cgroup__procs=procs)
    return Hierarchy(2, {"": own}, (tmp_path,))


def test_controllers_that_are_on_stay_untouched(tmp_path: Path) -> None:
    found = v2_group(tmp_path, "/own", enabled="cpu memory pids io")
    assert enable_controllers(found) == found
    assert (tmp_path / "own/cgroup.subtree_control").read_text() == "cpu memory pids io"


def test_controllers_are_switched_on_for_the_children(tmp_path: Path) -> None:
    enable_controllers(v2_group(tmp_path, "/own", enabled=""))
    assert (tmp_path / "own/cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_a_group_with_processes_is_emptied_into_a_leaf_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = v2_group(tmp_path, "/own", enabled="", procs="11\n12\n13\n")
    make(tmp_path, f"/own/{hierarchy.LEAF}", cgroup__procs="")
    moved: list[str] = []

    def write(path: Path, text: str) -> None:
        """Behave as the kernel: no controllers for children while processes are in the group itself."""
        if path.name == "cgroup.subtree_control" and len(moved) < 2:
            raise OSError(errno.EBUSY, "busy")
        if text == "12":
            raise ProcessLookupError  # it ended meanwhile
        if path.parent.name == hierarchy.LEAF:
            moved.append(text)

    monkeypatch.setattr(hierarchy, "write", write)
    assert enable_controllers(found) == found
    assert moved == ["11", "13"]


def test_from_inside_the_leaf_jobs_are_siblings(tmp_path: Path) -> None:
    v2_group(tmp_path, "/own", enabled="cpu memory pids")
    found = v2_group(tmp_path, f"/own/{hierarchy.LEAF}", enabled="")
    assert enable_controllers(found).parents == {"": tmp_path / "own"}


def test_a_refusal_of_the_kernel_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path, _text: str) -> None:
        raise PermissionError(errno.EACCES, "not delegated")

    monkeypatch.setattr(hierarchy, "write", refuse)
    with pytest.raises(TierUnavailable, match="not delegated"):
        enable_controllers(v2_group(tmp_path, "/own", enabled=""))
