"""Finding and signalling processes: over tables and a laid-out /proc, and over one real child."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from node.ports import SandboxLimits
from node.sandbox.process_tree import Descendants, ProcessTree, Sessions
from node.sandbox.processes import Process, descendants, send, snapshot, snapshot_of

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
    # state parent group session tty ... began size resident
    lay_out(tmp_path, 12, f"12 (evil) R 99 9 9) S {tail}\n")
    lay_out(tmp_path, 13, f"13 (sh) Z {tail}\n")
    (tmp_path / "14").mkdir()  # ended between listing and reading
    (tmp_path / "self").mkdir()
    assert snapshot(tmp_path) == {12: Process(12, "S", 1, 9, 5, 33), 13: Process(13, "Z", 1, 9, 5, 33)}


def test_we_are_in_the_real_table() -> None:
    own = snapshot()[os.getpid()]
    assert (own.parent, own.session) == (os.getppid(), os.getsid(0))
    assert own.resident_pages > 100


def table(*rows: tuple[int, int, str]) -> dict[int, Process]:
    return {pid: Process(pid, state, parent, 1, 7, 10) for pid, parent, state in rows}


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


class Watched(ProcessTree):
    """A tree of processes that do not exist, and how often it was killed."""

    def __init__(self, pages: int, count: int) -> None:
        first = 2**22 + 1
        table = {pid: Process(pid, "S", 1, 1, 7, pages) for pid in range(first, first + count)}
        super().__init__(LIMITS, lambda: table)
        self.kills = 0

    def _members(self, table: dict[int, Process]) -> frozenset[int]:
        return frozenset(table)

    def kill(self) -> None:
        self.kills += 1
        super().kill()


LIMITS = SandboxLimits(cpus_milli=1_000, memory_mib=64, pids=4, shm_mib=1, tmp_mib=1)


def test_polling_lets_be_what_is_within_its_limits() -> None:
    watched = Watched((16 << 20) // PAGE, 4)
    watched.enforce()
    assert (watched.kills, watched.memory_kills(), watched.usage()) == (0, 0, {"memory_peak_mib": 64})


def test_polling_kills_for_memory_and_says_so() -> None:
    watched = Watched((16 << 20) // PAGE + 64, 4)
    watched.enforce()
    assert (watched.kills, watched.memory_kills()) == (1, 1)


def test_polling_kills_for_too_many_processes() -> None:
    watched = Watched(1, 5)
    watched.enforce()
    assert (watched.kills, watched.memory_kills()) == (1, 0)


def test_a_number_that_became_anothers_is_no_member(child: subprocess.Popen[bytes]) -> None:
    """The same pid, begun at another time: the job's process has ended, and this one is a stranger's."""
    for kind in (Descendants, Sessions):
        own = snapshot_of(child.pid)
        tables = [
            {child.pid: replace(own, session=child.pid)},
            {child.pid: replace(own, session=child.pid, began=1)},
        ]
        watched = kind(LIMITS, lambda tables=tables: tables[0])
        watched.add(child.pid)
        watched.add(2**22 + 1)  # has ended before it was added
        assert watched.pids() == {child.pid}
        del tables[0]
        assert watched.pids() == frozenset()


def test_a_session_outlives_its_leader_and_once_empty_is_over(child: subprocess.Popen[bytes]) -> None:
    orphan = Process(50, "S", 1, child.pid, 9, 1)
    tables = [{50: orphan}, {}, {50: orphan}]
    watched = Sessions(LIMITS, lambda: tables[0])
    watched.add(child.pid)
    assert watched.pids() == {50}
    del tables[0]
    assert watched.pids() == frozenset()
    del tables[0]
    assert watched.pids() == frozenset()


def test_a_polled_tree_stops_and_goes_on(child: subprocess.Popen[bytes]) -> None:
    watched = Descendants(LIMITS)
    watched.add(child.pid)
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
