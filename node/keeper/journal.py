"""The lease's state in this keeper: stepped by events, made durable, then acted upon.

Every event goes through `feed`, one at a time: step the machine, write the new state and fsync it if anything
that matters has changed, carry the effects out, wake whoever waits for changes. So a keeper that is killed
anywhere leaves a state that its successor can go on from. What changes all the time (progress, meters) is told
to links, at a bounded rate, and not written.

Refuses to know what the effects mean: its owner carries them out.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import trio

from node.keeper.lease_clock import Anchor, LeaseClock
from node.lease.files import LeaseStatus, write_status
from node.log import get_logger
from protocol import codec

WRITE_RETRY_S = 1.0
PROGRESS_INTERVAL_S = 0.2
"""Progress is told to links at most this often."""
TICK_MAX_S = 10.0
"""Deadlines are looked at this often at least: a suspended machine's timers come late."""
SEQUENCES_EACH = 2**32
"""Sequence numbers of one keeper: a later generation's are higher, also than those that were never written."""

StateT = TypeVar("StateT", bound=msgspec.Struct)

log = get_logger(__name__)


class Stepped(Protocol[StateT]):  # type: ignore[misc] # the machines' steps are invariant in their lease
    """What a machine's `step` returns."""

    @property
    def lease(self) -> StateT:
        """The state after the event."""

    @property
    def effects(self) -> tuple[Any, ...]:
        """What to do, in order."""


class Owner(Protocol[StateT]):
    """The keeper around a journal."""

    def step(self, state: StateT, event: Any, now: int) -> Stepped[StateT]:  # noqa: ANN401 - its machine's events
        """Step its machine."""

    def next_deadline(self, state: StateT) -> int | None:
        """Return when the machine wants to be told the time."""

    def tick(self) -> Any:  # noqa: ANN401 - its machine's event
        """Return the event that tells the time."""

    def describe(self, state: StateT, now: int) -> LeaseStatus:
        """Return the status of `state`; sequence, generation and machine are the journal's."""

    def essence(self, state: StateT) -> StateT:
        """Return `state` with all that need not be durable made equal."""

    async def carry_out(self, effect: Any) -> Any | None:  # noqa: ANN401 - its machine's effects and events
        """Carry an effect out, or start to; return the event that follows from it at once, if any."""


class Journal(Generic[StateT]):
    """The state of one lease, and how it is changed."""

    def __init__(
        self, directory: Path, owner: Owner[StateT], state: StateT, clock: LeaseClock, generation: int
    ) -> None:
        self.state = state
        self.clock = clock
        self.generation = generation
        self._directory = directory
        self._owner = owner
        self._lock = trio.Lock()
        self._written: StateT | None = None
        self._sequence = generation * SEQUENCES_EACH
        self._status = self._describe()
        self._news = trio.Event()
        self._progress = trio.Event()

    def status(self) -> LeaseStatus:
        """Return the status now, meters included."""
        return msgspec.structs.replace(self._describe(), sequence=self._status.sequence)

    async def changed(self, sequence: int) -> LeaseStatus:
        """Wait until a status after number `sequence` is there, and return the newest."""
        await self.wait_beyond(sequence)
        return self.status()

    @property
    def sequence(self) -> int:
        """Number of the last change that was announced; take it before looking, then `wait_beyond` it."""
        return self._status.sequence

    async def wait_beyond(self, sequence: int) -> None:
        """Wait until a change (or progress) after number `sequence` was announced."""
        while self._status.sequence <= sequence:
            await self._news.wait()

    async def wait_for(self, condition: Callable[[StateT], bool]) -> StateT:
        """Wait until the state satisfies `condition`, and return it."""
        while not condition(self.state):
            await self._news.wait()
        return self.state

    def note_progress(self) -> None:
        """Tell links soon that something in the status, but not in the state, has changed."""
        self._progress.set()

    async def feed(self, event: Any) -> None:  # noqa: ANN401 - its machine's events
        """Step the machine. Returns once the new state is durable and its effects are on their way.

        Raises what the machine raises for it (`ProtocolError`); then nothing has changed.
        """
        async with self._lock:
            events = deque([event])
            # A task that is cancelled in the middle must not leave effects behind that nobody carries out.
            with trio.CancelScope(shield=True):
                while events:
                    await self._take(events)
        self._announce()

    async def follow_time(self, on_suspend: Callable[[int], Awaitable[None]]) -> None:
        """Tell the machine the time when it wants to know, for ever; and of suspends of this machine."""
        while True:
            deadline = self._owner.next_deadline(self.state)
            wait_s = TICK_MAX_S if deadline is None else (deadline - self.clock.now()) / 1000
            with trio.move_on_after(min(max(wait_s, 0), TICK_MAX_S)):
                await self._news.wait()
            slept_ms = self.clock.slept_ms()
            if slept_ms:
                log.warning("keeper.suspended", length_ms=slept_ms)
                await on_suspend(slept_ms)
            deadline = self._owner.next_deadline(self.state)
            if deadline is not None and deadline <= self.clock.now():
                await self.feed(self._owner.tick())

    async def tell_progress(self) -> None:
        """Announce progress at a bounded rate, for ever."""
        while True:
            await self._progress.wait()
            self._progress = trio.Event()
            self._announce()
            await trio.sleep(PROGRESS_INTERVAL_S)

    async def write(self) -> None:
        """Make the present state durable, whatever has changed."""
        async with self._lock:
            await self._write()
        self._announce()

    async def _take(self, events: deque[Any]) -> None:
        result = self._owner.step(self.state, events.popleft(), self.clock.now())
        self.state = result.lease
        essence = self._owner.essence(self.state)
        if essence != self._written:
            await self._write()
        for effect in result.effects:
            following = await self._owner.carry_out(effect)
            if following is not None:
                events.append(following)

    async def _write(self) -> None:
        self._sequence += 1
        machine = codec.encode(Saved(self.clock.anchor(), codec.encode(self.state)))
        status = msgspec.structs.replace(self._describe(), machine=machine)
        with trio.CancelScope(shield=True):
            while True:
                try:
                    await trio.to_thread.run_sync(write_status, self._directory, status)
                    break
                except OSError as error:
                    # Nothing may become visible that is not durable: wait for room.
                    log.error("keeper.status_not_written", reason=str(error))
                    await trio.sleep(WRITE_RETRY_S)
        self._written = self._owner.essence(self.state)

    def _describe(self) -> LeaseStatus:
        status = self._owner.describe(self.state, self.clock.now())
        return msgspec.structs.replace(status, sequence=self._sequence, generation=self.generation)

    def _announce(self) -> None:
        self._sequence += 1
        self._status = self._describe()
        self._news.set()
        self._news = trio.Event()


class Saved(msgspec.Struct, frozen=True):
    """What one keeper leaves to the next."""

    clock: Anchor
    lease: bytes
    """The machine's state."""


def read_saved(status: LeaseStatus | None, state_type: type[StateT]) -> tuple[Anchor | None, StateT | None]:
    """Return clock and state that the keeper before left in its status; (None, None) without one."""
    if status is None or not status.machine:
        return None, None
    saved = codec.decode_untrusted(status.machine, Saved, 256 * 1024)
    return saved.clock, codec.decode_untrusted(saved.lease, state_type, 256 * 1024)
