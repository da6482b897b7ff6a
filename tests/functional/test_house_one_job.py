"""One job through the whole house, on real daemons, keepers, tunnels and sandboxes."""

import pytest
from support.daemons import Daemons

from node.errors import NoMatch
from node.rpc.methods import jobs, market


def test_a_job_is_bought_run_paid_and_settled(daemons: Daemons) -> None:
    provider = daemons.provider()
    renter = daemons.renter()
    renter.connect(provider)
    renter.wait_offers()
    job = renter.run("/bin/sh", "-c", "echo hello; echo trouble >&2; exit 3")
    entry = renter.wait_final(job)
    assert (entry.state, entry.outcome, entry.exit_status) == (jobs.JobState.SETTLED, "completed", 3)
    assert entry.simulated
    assert renter.output(job) == b"hello\n"
    assert renter.output(job, "stderr") == b"trouble\n"
    mine = renter.wait_for(renter.receipts)[0]
    theirs = provider.wait_for(lambda: [receipt for receipt in provider.receipts() if receipt.accepted])[0]
    assert (mine.receipt, mine.amount, mine.metered_ms) == (theirs.receipt, theirs.amount, theirs.metered_ms)
    assert mine.accepted
    assert mine.simulated
    assert theirs.earned
    assert not mine.earned
    provider.wait_for(lambda: provider.devices()[0].use.value == "offered", "the device to be offered again")
    renter.wait_for(lambda: not daemons.keepers(), "the keepers to end")


def test_nothing_simulated_is_sold_to_who_did_not_ask_for_it(daemons: Daemons) -> None:
    provider = daemons.provider()
    renter = daemons.renter()
    renter.connect(provider)
    renter.wait_offers()
    assert renter.offers()[0].simulated
    quote = renter.call(
        market.QUOTE, market.QuoteParams(requirement=market.Requirement(model="A100"), duration_ms=60_000)
    )
    assert not quote.candidates
    assert [rejection.reason for rejection in quote.rejections] == ["simulated"]
    with pytest.raises(NoMatch):
        renter.run("/bin/true", allow_simulated=False)
