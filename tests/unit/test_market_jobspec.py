"""How long a lease is, and how large its disk: what a job asks for is its own, whatever its inputs take."""

import msgspec
import pytest
from support.auctions import Table, a_listing, an_auction
from support.market_nodes import a_spec
from support.offers import NOW

from node.errors import BadArgument
from node.market.jobspec import DISK_DEFAULT_MIB, INPUT_RATE, MIB, SpecInput, lease_ms, with_room_for_inputs
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


def test_inputs_that_do_not_fit_on_the_jobs_disk_are_refused_before_anything_is_bought() -> None:
    wanted = a_spec().requirement
    small = msgspec.structs.replace(wanted, disk_mib=16)
    assert with_room_for_inputs(small, 16 * MIB) == small
    with pytest.raises(BadArgument, match="take 17 MiB, and the job's disk is to have 16 MiB") as refused:
        with_room_for_inputs(small, 16 * MIB + 1)
    assert "--disk" in refused.value.hint


def test_large_inputs_want_a_disk_with_room_for_more() -> None:
    wanted = a_spec().requirement
    assert with_room_for_inputs(wanted, DISK_DEFAULT_MIB // 2 * MIB) == wanted
    assert with_room_for_inputs(wanted, 100_000 * MIB).disk_mib == 100_000 + DISK_DEFAULT_MIB
