"""How long a lost peer is waited for between two dials."""

import trio
from trio.abc import Clock

from node.swarm.dialling import RECONNECT_GROWTH_PERMILLE, Backoff
from node.swarm.limits import DEFAULT_LIMITS

LIMITS = DEFAULT_LIMITS


async def waits_of(backoff: Backoff, count: int) -> list[float]:
    waits = []
    for _ in range(count):
        before = trio.current_time()
        await backoff.wait()
        waits.append(trio.current_time() - before)
    return waits


def patience() -> Backoff:
    return Backoff(LIMITS.backoff_initial_ms, LIMITS.backoff_max_ms, growth_permille=RECONNECT_GROWTH_PERMILLE)


async def test_a_peer_that_comes_back_is_dialled_within_a_fraction_of_its_absence(autojump_clock: Clock) -> None:
    """So that a daemon that was restarted for two seconds is found in less than another two."""
    waits = await waits_of(patience(), LIMITS.remembered_attempts)
    away_s = 0.0
    for wait_s in waits:
        # The last wait before it, of an absence that began with the first.
        assert wait_s <= 0.3 + 0.65 * away_s
        away_s += wait_s
    assert away_s > 120


async def test_a_peer_that_stays_away_is_dialled_seldom(autojump_clock: Clock) -> None:
    waits = await waits_of(patience(), 60)
    assert all(150 <= wait_s <= 300 for wait_s in waits[-20:])


async def test_a_crash_loop_slows_down_quickly(autojump_clock: Clock) -> None:
    waits = await waits_of(Backoff(200, 30_000), 10)
    assert waits[-1] >= 15


async def test_patience_begins_anew_after_a_success(autojump_clock: Clock) -> None:
    backoff = patience()
    await waits_of(backoff, 20)
    backoff.reset()
    (wait_s,) = await waits_of(backoff, 1)
    assert wait_s <= LIMITS.backoff_initial_ms / 1000
