"""The machine's two clocks, as `node.ports.Clock` wants them.

Refuses to correct anything: a wall clock that is off is told to people and checked by peers.
"""

import os
import time

from protocol.units import Millis

TEST_OFFSET_VARIABLE = "GPUNODE_TEST_CLOCK_OFFSET_MS"
"""For tests of daemons whose clock is off: milliseconds that this process adds to the wall clock."""


class SystemClock:
    """The kernel's clocks."""

    def __init__(self) -> None:
        self._offset_ms = int(os.environ.get(TEST_OFFSET_VARIABLE, "0"))

    def now(self) -> Millis:
        """Return Unix time in ms."""
        return Millis(time.time_ns() // 1_000_000 + self._offset_ms)

    def boot_ms(self) -> int:
        """Return ms since boot, suspend included (CLOCK_BOOTTIME)."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
