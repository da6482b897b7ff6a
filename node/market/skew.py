"""How far this machine's wall clock is from its peers', by what each said when it was asked.

Offers and bids are dated, so a clock that is off sees no live offer and has its bids refused; nothing else tells
its owner why. The median of what the peers say: a few that lie or are off themselves change nothing. Refuses to
correct a clock, and to judge records by this.
"""

import statistics
from collections import OrderedDict
from typing import NamedTuple

from node.ports import Clock
from protocol.machines.admission import SKEW_MAX_MS
from protocol.units import format_duration

PEERS_MAX = 64
"""Most peers whose word is kept; the newest."""
ROUND_TRIP_MAX_MS = 5_000
"""An answer that took longer says too little: it may have been dated at any time of it."""


class Skew(NamedTuple):
    """The estimate."""

    ahead_ms: int
    """By how much our clock is ahead of the peers'; negative: behind."""
    peers: int


class ClockSkew:
    """What peers say of the time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: OrderedDict[bytes, int] = OrderedDict()
        """Peer -> when this machine was booted, by the peer's clock: our own may be set right meanwhile."""

    def heard(self, peer: bytes, told_at: int, asked_boot_ms: int) -> None:
        """Take a peer's time (Unix ms) from an answer that has just come; we asked at `asked_boot_ms`."""
        now_boot_ms = self._clock.boot_ms()
        if not told_at or now_boot_ms - asked_boot_ms > ROUND_TRIP_MAX_MS:
            return
        self._began[peer] = told_at - (asked_boot_ms + now_boot_ms) // 2
        self._began.move_to_end(peer)
        if len(self._began) > PEERS_MAX:
            self._began.popitem(last=False)

    def estimate(self) -> Skew | None:
        """Return by how much our clock is off now, or None while no peer has told its own."""
        if not self._began:
            return None
        began = self._clock.now() - self._clock.boot_ms()
        ahead = [began - theirs for theirs in self._began.values()]
        # Of two medians the one that suits us better: half of the peers must not accuse a clock that is right.
        medians = (statistics.median_low(ahead), statistics.median_high(ahead))
        return Skew(min(medians, key=abs), len(ahead))

    def problem(self) -> str:
        """Return what a person should know, or "" when the clocks agree as well as trading needs."""
        skew = self.estimate()
        if skew is None or abs(skew.ahead_ms) <= SKEW_MAX_MS:
            return ""
        where = "ahead of" if skew.ahead_ms > 0 else "behind"
        whose = f"those of its peers (the median of {skew.peers})" if skew.peers > 1 else "that of its only peer"
        seconds = round(abs(skew.ahead_ms) / 1000)
        return f"this machine's clock is {format_duration(seconds * 1000)} {where} {whose}"
