"""Finding and signalling processes: over tables and a laid-out /proc, and over one real child."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.ports import SandboxLimits
from node.sandbox.process_tree import ProcessTree
from node.sandbox.processes import Process, descendants, send, snapshot

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def lay_out(proc: Path, pid: int, text: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(text)


def test_a_command_name_cannot_pretend(tmp_path: Path) -> None:
    tail = "1 7 9 0 -1 0 0 0 0 0 1 2 0 0 20 0 1 0 5 4096 33 184467"
    lay_out(tmp_path, 12, f"12 (evil) R 99 9 9) S {tail}\n")
    lay_out(tmp_path, 13, f"13 (sh) Z {tail}\n")
    (tmp_path / "14").mkdir()  # ended between listing and reading
    (tmp_path / "self").mkdir()
    assert snapshot(tmp_path) == {12: Process(12, "S", 1, 9, 33), 13: Process(13, "Z", 1, 9, 33)}


def test_we_are_in_the_real_table() -> None:
    own = snapshot()[os.getpid()]
    assert (own.parent, own.session) == (os.getppid(), os.getsid(0))
    assert own.resident_pages > 100


def table(*rows: tuple[int, int, str]) -> dict[int, Process]:
    return {pid: Process(pid, state, parent, 1, 10) for pid, parent, state in rows}


def test_descendants_are_followed_and_zombies_left_out() -> None:
    found = table((1, 0, "S"), (10, 1, "S"), (11, 10, "R"), (12, 11, "Z"), (13, 12, "S"), (20, 1, "S"))
    assert descendants([10], found) == {10, 11, 13}
    assert descendants([99], found) == frozenset()


def test_a_parent_loop_does_not_hang() -> None:
    assert descendants([10], table((10, 11, "S"), (11, 10, "S"))) == {10, 11}


def test_members_get_the_signal_and_spared_ones_do_not(child: subprocess.Popen[bytes]) -> None:
    assert send(lambda: [child.pid], signal.SIGTERM, spare={child.pid}) == 0
    assert send(lambda: [child.pid, 2**22 + 1], signal.SIGTERM) == 1
    assert child.wait() == -signal.SIGTERM


def test_one_that_left_the_group_meanwhile_is_not_hit(child: subprocess.Popen[bytes]) -> None:
    answers = iter([[child.pid], []])
    assert send(lambda: next(answers), signal.SIGKILL) == 0
    assert child.poll() is None


def tree(pages: int, count: int, limits: SandboxLimits) -> tuple[ProcessTree, list[int]]:
    """Return a tree of processes that do not exist, and the list that its kills are counted in."""
    found = {pid: Process(pid, "S", 1, 1, pages) for pid in range(2**22 + 1, 2**22 + 1 + count)}
    kills: list[int] = []
    watched = ProcessTree(limits, frozenset, lambda: found)
    plain = watched.kill

    def kill() -> None:
        kills.append(1)
        plain()

    watched.kill = kill  # type: ignore[method-assign]
    return watched, kills


LIMITS = SandboxLimits(cpus_milli=1_000, memory_mib=64, pids=4, shm_mib=1, tmp_mib=1)


def test_polling_lets_be_what_is_within_its_limits() -> None:
    watched, kills = tree((16 << 20) // PAGE, 4, LIMITS)
    watched.enforce()
    assert (kills, watched.memory_kills(), watched.usage()) == ([], 0, {"memory_peak_mib": 64})


def test_polling_kills_for_memory_and_says_so() -> None:
    watched, kills = tree((16 << 20) // PAGE + 64, 4, LIMITS)
    watched.enforce()
    assert (kills, watched.memory_kills()) == ([1], 1)


def test_polling_kills_for_too_many_processes() -> None:
    watched, kills = tree(1, 5, LIMITS)
    watched.enforce()
    assert (kills, watched.memory_kills()) == ([1], 0)


def test_a_polled_tree_stops_and_goes_on(child: subprocess.Popen[bytes]) -> None:
    watched = ProcessTree(LIMITS, lambda table: descendants([child.pid], table))
    assert not watched.frozen()
    watched.freeze()
    while not watched.frozen():
        pass
    assert snapshot()[child.pid].state == "T"
    watched.thaw()
    while watched.frozen():
        pass
    watched.thaw()
    assert watched.pids() == {child.pid}
    assert not watched.remove()
    watched.kill()
    assert child.wait() == -signal.SIGKILL
    assert watched.remove()
