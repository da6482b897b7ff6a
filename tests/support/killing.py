"""Killing daemons at random moments of a job, and what must hold all the same."""

import os
import random
import time
from contextlib import suppress

from support.daemons import TestDaemon

from node.rpc.methods import jobs

LINES = 60
LINE_INTERVAL_S = 0.03
COUNT = f"i=0; while [ $i -lt {LINES} ]; do echo line $i; i=$((i+1)); sleep {LINE_INTERVAL_S}; done"
SCRIPT = f"{COUNT}; echo end > out.txt"
EXPECTED = b"".join(b"line %d\n" % number for number in range(LINES))
JOB_S = 4.0
"""About how long a job takes from submission to its end: kills are spread over it."""


def run_and_kill(
    renter: TestDaemon, victims: list[TestDaemon], choose: random.Random, local: str
) -> jobs.JobEntry:
    """Run one job, kill -9 and restart each of `victims` at a random moment of it; return the ended job.

    Asserts that the job completed, that its log has no gap, that its output is here, and that both sides hold the
    same receipt.
    """
    job = renter.run("/bin/sh", "-c", SCRIPT, outputs=(jobs.JobOutput(remote="out.txt", local=local),))
    begun = time.monotonic()
    for victim in victims:
        moment = choose.uniform(0, JOB_S)
        time.sleep(max(0.0, begun + moment - time.monotonic()))  # the moment is the test's input, not a wait
        victim.kill()
        victim.start(wait=False)
    for victim in victims:
        victim.wait_for(victim.answers, "the daemon to answer after its restart")
    entry = renter.wait_final(job)
    assert (entry.outcome, entry.exit_status) == ("completed", 0), entry
    assert renter.output(job) == EXPECTED
    with open(local, "rb") as file:  # noqa: PTH123
        assert file.read() == b"end\n"
    os.unlink(local)  # noqa: PTH108
    return entry


def same_receipts(renter: TestDaemon, provider: TestDaemon, count: int) -> None:
    """Wait until both sides hold the same `count` accepted receipts."""

    def ask() -> bool:
        mine = {receipt.receipt: receipt for receipt in renter.receipts()}
        theirs = {receipt.receipt: receipt for receipt in provider.receipts() if receipt.accepted}
        with suppress(KeyError):
            return len(mine) == count == len(theirs) and all(
                mine[name].amount == theirs[name].amount for name in theirs
            )
        return False

    renter.wait_for(ask, f"{count} equal receipts on both sides")
