"""How long a lease is: a job gets all of its own time, whatever comes before and after it."""

import pytest
from support.auctions import Table, a_listing, an_auction
from support.market_nodes import a_spec
from support.offers import NOW

from node.market.jobspec import INPUT_RATE, SpecInput, lease_ms
from protocol.records import Terms
from protocol.units import HOUR_MS, MINUTE_MS


@pytest.mark.parametrize("terms", [Terms(), Terms(notice_ms=0), Terms(notice_ms=0, checkpoint_ms=10 * MINUTE_MS)])
def test_a_job_is_not_told_to_end_by_its_lease_before_its_own_time_is_over(terms: Terms) -> None:
    table = Table(an_auction(listing=a_listing(terms=terms)))
    table.bid(1, duration_ms=HOUR_MS)
    table.close_batch()
    (hold,) = table.auction.holds
    told_at = hold.until - terms.checkpoint_ms
    assert told_at >= NOW + HOUR_MS + terms.notice_ms


def test_the_time_that_inputs_travel_does_not_come_off_the_jobs_own() -> None:
    hour_of_input = SpecInput("/data", "data", bytes(32), INPUT_RATE * 3600)
    spec = a_spec(inputs=(hour_of_input, hour_of_input), time_limit_ms=HOUR_MS)
    assert lease_ms(spec, Terms()) == 3 * HOUR_MS
    assert lease_ms(spec, Terms(lease_max_ms=2 * HOUR_MS)) == 2 * HOUR_MS
    assert lease_ms(spec, Terms(lease_max_ms=MINUTE_MS)) == HOUR_MS, "to be refused, not shortened"
    assert lease_ms(a_spec(time_limit_ms=HOUR_MS), Terms()) == HOUR_MS
