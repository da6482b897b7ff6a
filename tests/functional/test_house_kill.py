"""kill -9 of daemons while a job is bought and run: it completes, its log has no gap, the receipt is right.

A few moments here; `scripts/campaign kill` tries many.
"""

import os
import random
from pathlib import Path

import pytest
from support.daemons import Daemons
from support.killing import KeeperVictim, run_and_kill, same_receipts

ROUNDS = 3


@pytest.mark.parametrize("sides", ["provider", "renter", "both"])
def test_killed_daemons_do_not_hurt_a_job(daemons: Daemons, tmp_path: Path, sides: str) -> None:
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(2**32))
    print(f"seed {seed}")
    choose = random.Random(seed)
    provider, renter = daemons.provider(), daemons.renter()
    renter.connect(provider)
    renter.wait_offers()
    victims = {"provider": [provider], "renter": [renter], "both": [provider, renter]}[sides]
    for number in range(ROUNDS):
        run_and_kill(renter, victims, choose, str(tmp_path / f"out-{number}.txt"))
    same_receipts(renter, provider, ROUNDS)
    provider.wait_for(lambda: not daemons.keepers(), "the keepers to end")


def test_a_keeper_that_dies_while_it_starts_is_replaced_at_once(daemons: Daemons, tmp_path: Path) -> None:
    provider, renter = daemons.provider(), daemons.renter()
    renter.connect(provider)
    renter.wait_offers()
    first = KeeperVictim(daemons, random.Random(1))
    result = run_and_kill(renter, (first,), random.Random(1), str(tmp_path / "out.txt"), span_s=0)
    assert first.name == "provider's keeper"
    assert result.entry.outcome == "completed"
    # The renter had to bid once only: it was not told that the lease could not be prepared.
    assert not [text for _, text in result.history if "provider_failed" in text]
    same_receipts(renter, provider, 1)
