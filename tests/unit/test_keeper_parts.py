"""The keeper's clock and journal, without processes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from node.keeper import journal as journal_module
from node.keeper.journal import SEQUENCES_EACH, Journal, read_saved
from node.keeper.lease_clock import Anchor, LeaseClock
from node.lease.files import LeaseStatus, Role, read_status, write_status
from node.lease.lock import boot_id
from protocol.errors import IllegalTransition
from protocol.machines.lease import LeasePhase
from protocol.units import Millis


class Clock:
    def __init__(self, wall_ms: int = 1_000_000, boot_ms: int = 5_000) -> None:
        self.wall_ms, self._boot_ms = wall_ms, boot_ms

    def now(self) -> Millis:
        return Millis(self.wall_ms)

    def boot_ms(self) -> int:
        return self._boot_ms

    def advance(self, ms: int) -> None:
        self._boot_ms += ms


def test_clock_begins_at_wall_time_and_ignores_that_it_is_set() -> None:
    clock = Clock()
    lease = LeaseClock(clock)
    assert lease.now() == 1_000_000
    clock.wall_ms = 9_000_000
    clock.advance(250)
    assert lease.now() == 1_000_250


def test_clock_goes_on_across_keepers_and_reboots_never_backwards() -> None:
    clock = Clock()
    anchor = LeaseClock(clock).anchor()
    clock.advance(3_000)
    assert LeaseClock(clock, anchor).now() == 1_003_000
    rebooted = Anchor("another boot", 99_999, 1_003_000)
    assert LeaseClock(Clock(wall_ms=1_090_000, boot_ms=10), rebooted).now() == 1_090_000
    assert LeaseClock(Clock(wall_ms=500, boot_ms=10), rebooted).now() == 1_003_000
    assert anchor.boot_id == boot_id()


def test_clock_sees_a_suspend_once() -> None:
    clock = Clock()
    lease = LeaseClock(clock)
    assert lease.slept_ms() == 0
    clock.advance(60_000)
    assert 59_000 <= lease.slept_ms() <= 60_000
    assert lease.slept_ms() == 0


class Count(msgspec.Struct, frozen=True):
    """A machine that counts."""

    number: int = 0
    noise: int = 0


class Stepped(msgspec.Struct, frozen=True):
    lease: Count
    effects: tuple[str, ...] = ()


class Counter:
    """Owns a journal of counts, and sees what is durable when an effect is carried out."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.durable: list[int] = []
        self.deadline: int | None = None

    def step(self, state: Count, event: Any, now: int) -> Stepped:
        match event:
            case "add":
                return Stepped(Count(state.number + 1, state.noise), ("look",))
            case "add twice":
                return Stepped(Count(state.number + 1, state.noise), ("again", "look"))
            case "noise":
                return Stepped(Count(state.number, state.noise + 1))
            case "tick":
                self.deadline = None
                return Stepped(Count(state.number + 100, state.noise))
            case _:
                raise IllegalTransition

    def next_deadline(self, state: Count) -> int | None:
        return self.deadline

    def tick(self) -> str:
        return "tick"

    def describe(self, state: Count, now: int) -> LeaseStatus:
        return LeaseStatus(
            lease=bytes(16),
            role=Role.RENTER,
            generation=0,
            sequence=0,
            phase=LeasePhase.SIGNED,
            metered_ms=state.number,
        )

    def essence(self, state: Count) -> Count:
        return Count(state.number)

    async def carry_out(self, effect: str) -> str | None:
        if effect == "again":
            return "add"
        status = read_status(self._directory)
        assert status is not None
        self.durable.append(status.metered_ms)
        return None


def journal_of(directory: Path, generation: int = 1) -> tuple[Counter, Journal[Count]]:
    owner = Counter(directory)
    return owner, Journal(directory, owner, Count(), LeaseClock(Clock()), generation)


async def test_state_is_durable_before_its_effects(tmp_path: Path) -> None:
    owner, journal = journal_of(tmp_path)
    await journal.feed("add")
    await journal.feed("add twice")
    assert owner.durable == [1, 2, 3]
    _anchor, saved = read_saved(read_status(tmp_path), Count)
    assert saved == Count(3)
    assert not journal.status().machine


async def test_what_does_not_matter_is_told_but_not_written(tmp_path: Path) -> None:
    _owner, journal = journal_of(tmp_path)
    await journal.feed("add")
    before = read_status(tmp_path)
    sequence = journal.sequence
    await journal.feed("noise")
    assert read_status(tmp_path) == before
    assert (await journal.changed(sequence)).sequence > sequence


async def test_refused_event_changes_nothing(tmp_path: Path) -> None:
    _owner, journal = journal_of(tmp_path)
    with pytest.raises(IllegalTransition):
        await journal.feed("nonsense")
    assert journal.state == Count()
    assert read_status(tmp_path) is None


async def test_later_keepers_sequences_are_above_all_before(tmp_path: Path) -> None:
    _owner, first = journal_of(tmp_path, 1)
    await first.feed("add")
    _owner, second = journal_of(tmp_path, 2)
    assert second.sequence >= 2 * SEQUENCES_EACH > first.sequence


async def test_full_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    owner, journal = journal_of(tmp_path)
    fails = iter(range(3))

    def write(directory: Path, status: LeaseStatus) -> None:
        for _number in fails:
            raise OSError(28, "No space left on device")
        write_status(directory, status)

    monkeypatch.setattr(journal_module, "write_status", write)
    await journal.feed("add")
    assert owner.durable == [1]


async def test_time_is_told_at_the_deadline(tmp_path: Path) -> None:
    owner, journal = journal_of(tmp_path)
    owner.deadline = journal.clock.now() - 1

    async def on_suspend(_length_ms: int) -> None:
        raise AssertionError("nothing slept")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.follow_time, on_suspend)
        await journal.wait_for(lambda state: state.number == 100)
        nursery.cancel_scope.cancel()
