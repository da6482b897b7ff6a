"""The lease's clock: Unix ms when the lease began, and from then on what boot time adds to it.

A set wall clock moves no deadline and no meter; suspend counts. A keeper that starts after a reboot goes on from
the last time that was noted, or the wall clock if that is later. Refuses to run backwards.
"""

import time

import msgspec

from node.lease.lock import boot_id
from node.ports import Clock

SUSPEND_MS_MIN = 2_000
"""A shorter difference between the clocks is no suspend."""


class Anchor(msgspec.Struct, frozen=True):
    """One moment on the lease's clock and on the machine's; kept with the lease's state."""

    boot_id: str
    boot_ms: int
    lease_ms: int


class LeaseClock:
    """Tells the lease's time, and whether the machine has slept."""

    def __init__(self, clock: Clock, anchor: Anchor | None = None) -> None:
        """Go on from `anchor`, noted by an earlier keeper; None: the lease begins now."""
        here = boot_id()
        if anchor is None:
            anchor = Anchor(here, clock.boot_ms(), clock.now())
        elif anchor.boot_id != here:
            anchor = Anchor(here, clock.boot_ms(), max(anchor.lease_ms, clock.now()))
        self._clock = clock
        self._anchor = anchor
        self._asleep_ms = self._asleep()

    def now(self) -> int:
        """Return the lease's time in ms."""
        return self._anchor.lease_ms + self._clock.boot_ms() - self._anchor.boot_ms

    def anchor(self) -> Anchor:
        """Return what the next keeper goes on from."""
        return Anchor(self._anchor.boot_id, self._clock.boot_ms(), self.now())

    def slept_ms(self) -> int:
        """Return for how long the machine was suspended since the last call; 0 when it was not."""
        asleep = self._asleep()
        slept, self._asleep_ms = asleep - self._asleep_ms, asleep
        return slept if slept >= SUSPEND_MS_MIN else 0

    def _asleep(self) -> int:
        return self._clock.boot_ms() - time.monotonic_ns() // 1_000_000
