"""Freezing, killing and removing with the kernel's own cgroup v2, which needs no controllers for it.

The limits' files are tested on a laid-out tree only: the machines of our CI have v1 controllers.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_jobs import until

from node.sandbox.control_group import ControlGroupV2
from node.sandbox.hierarchy import parse_mounts, write
from node.sandbox.running import empty

MOUNTS = [mount for mount in parse_mounts(Path("/proc/self/mountinfo").read_text()) if mount.kind == "cgroup2"]
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not MOUNTS or not os.access(MOUNTS[0].point, os.W_OK),
    reason="needs root and a writable cgroup v2 mount",
)


@pytest.fixture
def group() -> Iterator[ControlGroupV2]:
    directory = Path(MOUNTS[0].point, f"gpunode-test-{os.getpid()}")
    directory.mkdir()
    yield ControlGroupV2([directory])
    assert not directory.exists()


@pytest.fixture
def shell(group: ControlGroupV2) -> Iterator[subprocess.Popen[bytes]]:
    """A shell that has joined the group and begun a process of its own."""
    script = f"echo 0 > {group.entries[0]}; sleep 1000 & wait"
    assert shutil.which("sleep")
    with subprocess.Popen(["sh", "-c", script]) as process:
        yield process


async def test_a_group_is_frozen_thawed_killed_and_removed(
    group: ControlGroupV2, shell: subprocess.Popen[bytes]
) -> None:
    await until(lambda: len(group.pids()) == 2)
    assert not group.frozen()
    group.freeze()
    await until(group.frozen)
    group.thaw()
    await until(lambda: not group.frozen())
    assert not group.remove()
    group.freeze()  # on v2 killing reaches what is frozen
    await empty(group, "test")
    assert shell.wait() == -9
    assert group.remove()


async def test_without_the_kill_file_each_process_is_killed(
    group: ControlGroupV2, shell: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.name != "cgroup.kill" and exists(path))
    await until(lambda: len(group.pids()) == 2)
    await empty(group, "test")
    assert shell.wait() == -9


def test_a_process_joins_by_writing_zero(group: ControlGroupV2) -> None:
    child = os.fork()
    if child == 0:
        try:
            write(group.entries[0], "0")
            os._exit(0 if os.getpid() in group.pids() else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert group.remove()
