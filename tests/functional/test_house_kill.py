"""kill -9 of daemons while a job is bought and run: it completes, its log has no gap, the receipt is right.

A few moments here; `scripts/campaign kill` tries many.
"""

import os
import random
from pathlib import Path

import pytest
from support.daemons import Daemons
from support.killing import run_and_kill, same_receipts

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
