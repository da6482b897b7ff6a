"""What is written into a control group's files.

The trees here are made of plain files: these tests show which texts are written where, not what a kernel does
with them. The functional tests run jobs in the kernel's own groups (v1 limits, v2 freezing and killing).
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from node.errors import SandboxError
from node.ports import SandboxLimits
from node.sandbox.control_group import ControlGroupV1, ControlGroupV2, create, find
from node.sandbox.hierarchy import Hierarchy

LIMITS = SandboxLimits(cpus_milli=2_500, memory_mib=512, pids=100, shm_mib=1, tmp_mib=1)
FILES_V2 = [
    *("cgroup.procs", "cgroup.freeze", "cgroup.kill", "cgroup.events"),
    *("memory.max", "memory.swap.max", "memory.oom.group", "memory.events", "memory.peak"),
    *("pids.max", "cpu.max", "cpu.stat"),
]
FILES_V1 = {
    "memory": [
        *("cgroup.procs", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.swappiness"),
        *("memory.oom_control", "memory.max_usage_in_bytes"),
    ],
    "pids": ["cgroup.procs", "pids.max"],
    "cpu": ["cgroup.procs", "cpu.cfs_period_us", "cpu.cfs_quota_us"],
    "freezer": ["cgroup.procs", "freezer.state"],
    "cpuacct": ["cgroup.procs", "cpuacct.usage"],
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which making a directory also makes the files that the kernel would."""
    plain = Path.mkdir

    def mkdir(self: Path, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        if self.name.startswith("gpunode-job-"):
            for name in FILES_V1.get(self.parent.name, FILES_V2):
                (self / name).write_text("")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    return tmp_path


def v2(tree: Path) -> Hierarchy:
    return Hierarchy(2, {"": tree}, (tree,))


def v1(tree: Path) -> Hierarchy:
    parents = {}
    for name in FILES_V1:
        (tree / name).mkdir()
        parents[name] = tree / name
    return Hierarchy(1, parents, tuple(parents.values()))


def texts(directory: Path) -> dict[str, str]:
    return {path.name: text for path in directory.iterdir() if (text := path.read_text())}


def test_v2_limits(tree: Path) -> None:
    group = create(v2(tree), "a-job", LIMITS)
    assert texts(tree / "gpunode-job-a-job") == {
        "memory.max": str(512 << 20),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "108",
        "cpu.max": "250000 100000",
    }
    assert group.entries == (tree / "gpunode-job-a-job/cgroup.procs",)


def test_v1_limits(tree: Path) -> None:
    group = create(v1(tree), "a-job", LIMITS)
    written = {name: texts(tree / name / "gpunode-job-a-job") for name in FILES_V1}
    assert written == {
        "memory": {
            "memory.limit_in_bytes": str(512 << 20),
            "memory.memsw.limit_in_bytes": str(512 << 20),
            "memory.swappiness": "0",
        },
        "pids": {"pids.max": "108"},
        "cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "250000"},
        "freezer": {},
        "cpuacct": {},
    }
    assert len(group.entries) == len(FILES_V1)


def test_a_limit_without_a_file_is_an_error_and_nothing_is_left(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel's directories are removed with their files in them; here it takes a little help.
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    monkeypatch.setattr(sys.modules[__name__], "FILES_V2", [name for name in FILES_V2 if name != "pids.max"])
    with pytest.raises(SandboxError, match=r"pids\.max"):
        create(v2(tree), "a-job", LIMITS)
    assert list(tree.iterdir()) == []


def test_a_name_in_use_is_refused(tree: Path) -> None:
    create(v2(tree), "a-job", LIMITS)
    with pytest.raises(SandboxError, match="exists already") as caught:
        create(v2(tree), "a-job", LIMITS)
    assert "sweep" in caught.value.hint


def test_the_smallest_cpu_share_is_what_the_kernel_takes(tree: Path) -> None:
    create(v2(tree), "tiny", SandboxLimits(cpus_milli=1, memory_mib=1, pids=1, shm_mib=1, tmp_mib=1))
    assert (tree / "gpunode-job-tiny/cpu.max").read_text() == "1000 100000"


def test_v2_freezing_killing_and_counting(tree: Path) -> None:
    group = create(v2(tree), "a-job", LIMITS)
    here = tree / "gpunode-job-a-job"
    group.freeze()
    assert (here / "cgroup.freeze").read_text() == "1"
    (here / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    assert not group.frozen()
    (here / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    assert group.frozen()
    (here / "cgroup.freeze").write_text("")
    group.thaw()
    assert (here / "cgroup.freeze").read_text() == "0"
    group.kill()
    assert (here / "cgroup.kill").read_text() == "1"
    (here / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n")
    (here / "memory.peak").write_text(f"{(100 << 20) + 1}\n")
    (here / "cpu.stat").write_text("usage_usec 1234567\nuser_usec 1\n")
    (here / "cgroup.procs").write_text("12\n0\n15\n")
    assert group.memory_kills() == 2
    assert group.usage() == {"memory_peak_mib": 101, "cpu_ms": 1_234}
    assert group.pids() == {12, 15}


def test_v1_freezing_and_counting(tree: Path) -> None:
    group = create(v1(tree), "a-job", LIMITS)
    here = {name: tree / name / "gpunode-job-a-job" for name in FILES_V1}
    group.freeze()
    assert (here["freezer"] / "freezer.state").read_text() == "FROZEN"
    assert group.frozen()
    (here["freezer"] / "freezer.state").write_text("FREEZING\n")
    assert not group.frozen()
    (here["memory"] / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    (here["memory"] / "memory.max_usage_in_bytes").write_text(f"{5 << 20}\n")
    (here["cpuacct"] / "cpuacct.usage").write_text("77000000\n")
    (here["pids"] / "cgroup.procs").write_text("12\n")
    (here["memory"] / "cgroup.procs").write_text("12\n13\n")  # one has joined only some of them so far
    assert group.memory_kills() == 1
    assert group.usage() == {"memory_peak_mib": 5, "cpu_ms": 77}
    assert group.pids() == {12, 13}


def test_a_kernel_that_tells_nothing_gives_no_numbers(tree: Path) -> None:
    for group in (ControlGroupV2([tree / "gone"]), ControlGroupV1([tree / "gone"])):
        assert (group.usage(), group.memory_kills(), group.pids(), group.frozen()) == ({}, 0, frozenset(), False)
        group.freeze()
        group.thaw()
        group.kill()
        assert group.remove()


def test_what_is_not_empty_is_not_removed(tree: Path) -> None:
    group = create(v2(tree), "a-job", LIMITS)
    assert not group.remove()  # plain files stand for the processes here


def test_leftovers_are_found_wherever_they_were_made(tree: Path) -> None:
    here = v1(tree)
    (tree / "memory/old-unit/gpunode-job-a-job").mkdir(parents=True)
    (tree / "pids/gpunode-job-a-job").mkdir(parents=True)
    (tree / "pids/gpunode-job-a-job-2").mkdir(parents=True)
    assert set(find(here, "a-job").entries) == {
        tree / "memory/old-unit/gpunode-job-a-job/cgroup.procs",
        tree / "pids/gpunode-job-a-job/cgroup.procs",
    }
    assert find(here, "another").entries == ()
