"""What a node makes of the times that its peers tell it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from support.market_nodes import MarketNode, Town, open_town, until
from trio.abc import Clock

from node.market.skew import PEERS_MAX, ClockSkew, Skew
from protocol.units import MINUTE_MS, Millis

NOW = Millis(1_790_000_000_000)


class SetClock:
    """A clock that stands where it was set."""

    def __init__(self) -> None:
        self.wall = NOW
        self.boot = 1_000_000

    def now(self) -> Millis:
        return Millis(self.wall)

    def boot_ms(self) -> int:
        return self.boot

    def pass_time(self, ms: int) -> None:
        self.wall, self.boot = Millis(self.wall + ms), self.boot + ms


def skew_of(clock: SetClock, *ahead_ms: int) -> ClockSkew:
    """Return what is made of peers that each tell a time so far ahead of ours, at once."""
    skew = ClockSkew(clock)
    for number, ahead in enumerate(ahead_ms):
        skew.heard(bytes([number]), clock.now() + ahead, clock.boot_ms())
    return skew


def test_without_peers_nothing_is_known() -> None:
    skew = skew_of(SetClock())
    assert skew.estimate() is None
    assert skew.problem() == ""


@pytest.mark.parametrize(
    ("ahead_ms", "said"),
    [
        ((10 * MINUTE_MS,), "this machine's clock is 10m 00s behind that of its only peer"),
        ((-10 * MINUTE_MS,) * 3, "this machine's clock is 10m 00s ahead of those of its peers (the median of 3)"),
        ((4_999, -4_999, 0), ""),
        ((0, 600_000), ""),
        # A minority that lies, or is off itself, changes nothing.
        ((0, 0, 0, 10**9, -(10**9)), ""),
    ],
)
def test_the_median_of_the_peers_is_told_when_it_matters(ahead_ms: tuple[int, ...], said: str) -> None:
    assert skew_of(SetClock(), *ahead_ms).problem() == said


def test_a_clock_that_was_set_right_is_right_at_once_and_time_changes_nothing() -> None:
    clock = SetClock()
    skew = skew_of(clock, 60_000, 60_000)
    clock.pass_time(3_600_000)
    assert skew.estimate() == Skew(-60_000, 2)
    clock.wall = Millis(clock.wall + 60_000)
    assert skew.estimate() == Skew(0, 2)


def test_a_slow_answer_is_dated_in_its_middle_and_a_very_slow_one_is_not_taken() -> None:
    clock = SetClock()
    skew = ClockSkew(clock)
    asked, told_at = clock.boot_ms(), clock.now() + 2_000
    clock.pass_time(4_000)
    skew.heard(b"slow", told_at, asked)
    assert skew.estimate() == Skew(0, 1)
    clock.pass_time(2_000)
    skew.heard(b"very slow", told_at, asked)
    skew.heard(b"silent", 0, clock.boot_ms())
    assert skew.estimate() == Skew(0, 1)


def test_the_table_is_bounded_and_the_newest_word_of_a_peer_counts() -> None:
    clock = SetClock()
    skew = skew_of(clock, *([60_000] * 200))
    assert skew.estimate() == Skew(-60_000, PEERS_MAX)
    for _ in range(3):
        skew.heard(bytes([199]), clock.now(), clock.boot_ms())
    assert skew.estimate() == Skew(-60_000, PEERS_MAX)


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with open_town(tmp_path) as town:
        yield town


def live(node: MarketNode) -> list[bytes]:
    return [offer.id for offer in node.market.book.live_offers(node.clock.now())]


async def test_a_job_looks_again_when_an_offer_of_a_fast_clock_comes_of_age(
    town: Town, autojump_clock: Clock
) -> None:
    renter, provider = await town.renter(), town.seller_by_hand()
    provider.clock.offset_ms = 20_000
    await trio.sleep(0.1)
    await provider.publish()
    job = await renter.submit()
    await until(lambda: "none of 1 offers matches" in job.purchase.note, "the job to have looked")
    assert not live(renter)
    assert list(renter.market.book.known_offers())
    await until(lambda: job.purchase.attempts, "a bid")
    assert live(renter)
