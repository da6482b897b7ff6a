"""Machines whose clock is off: nothing breaks, bids are refused with the reason, and their people are told."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from support.daemons import SIMULATED_A100, Daemons, TestDaemon
from support.daemons import daemons as run_daemons
from support.hostile import now_ms, open_hostile

from node.clock import TEST_OFFSET_VARIABLE
from node.rpc.methods import daemon as daemon_api
from node.rpc.methods import jobs, market
from protocol.records import BidAck, BidRejected, RejectReason
from protocol.units import MINUTE_MS

STEADY = 'start_price = 1.00\nreserve_price = 1.00\n[lend.auction]\nopening = "100ms"\ntick = "100ms"\n'
OFF_MS = 10 * MINUTE_MS


class House(NamedTuple):
    """A provider and a renter with right clocks, and whoever else is started."""

    daemons: Daemons
    provider: TestDaemon
    renter: TestDaemon

    def start(self, name: str, offset_ms: int, **lending: str) -> TestDaemon:
        """Start a daemon whose clock is off, connected with the others."""
        environment = {TEST_OFFSET_VARIABLE: str(offset_ms)}
        other = self.daemons.make(name, environment=environment, **lending).start()
        for one in (self.provider, self.renter):
            other.connect(one)
        return other


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with run_daemons() as running:
        provider = running.make("provider", lend=STEADY, devices=SIMULATED_A100).start(wait=False)
        renter = running.make("renter").start(wait=False)
        for one in (provider, renter):
            one.wait_for(one.answers)
        renter.connect(provider)
        renter.wait_offers()
        yield House(running, provider, renter)


def told_by(daemon: TestDaemon) -> tuple[str, daemon_api.Check]:
    """Return what status notes of the clock, and what doctor finds."""
    doctor: daemon_api.DoctorResult = daemon.call(daemon_api.DOCTOR)
    notes = [note for note in daemon.status().notes if "clock" in note]
    return notes[0] if notes else "", next(check for check in doctor.checks if check.name == "clock.peers")


@pytest.mark.parametrize(("offset_ms", "where"), [(OFF_MS, "ahead of"), (-OFF_MS, "behind")])
def test_a_node_whose_clock_is_far_off_trades_with_nobody_and_its_owner_knows_why(
    house: House, offset_ms: int, where: str
) -> None:
    other = house.start(f"off{offset_ms}", offset_ms, lend=STEADY, devices=SIMULATED_A100)
    note, check = other.wait_for(lambda: told if "of 2" in (told := told_by(other))[0] else None, "the note")
    said = rf"this machine's clock is (9m 59|10m 0\d)s {where} those of its peers \(the median of 2\)"
    assert re.fullmatch(said, note)
    assert check.status is daemon_api.CheckStatus.FAIL
    assert where in check.detail
    assert "set-ntp" in check.hint
    # As a renter: it sees the offer, and why it may not bid on it.
    wanted = market.Requirement(model="A100", allow_simulated=True, provider=house.provider.node)
    quote = other.wait_for(
        lambda: found if (found := other.call(market.QUOTE, _quote(wanted))).rejections else None, "the offer"
    )
    assert not quote.candidates
    assert [one.reason for one in quote.rejections] == ["clock"]
    job = other.run("/bin/true", provider=house.provider.node, max_price=10**6)
    detail = other.wait_for(lambda: other.job(job).detail, "the job's detail")
    assert where in detail
    why: jobs.WhyResult = other.call(jobs.WHY, jobs.WhyParams(job=job))
    assert why.advice.startswith("set the clock: ")
    other.call(jobs.CANCEL, jobs.JobParams(job=job))
    # As a provider: its offer is known to the others, marked, and nobody bids on it.
    house.renter.wait_for(lambda: _is_marked(house.renter, other.node), "its offer")
    assert other.node not in {one.provider for one in house.renter.offers()}
    # Those whose clock is right have nothing to mend, and go on.
    for one in (house.provider, house.renter):
        note, check = told_by(one)
        assert (note, check.status) == ("", daemon_api.CheckStatus.OK)
    entry = house.renter.wait_final(house.renter.run("/bin/true", provider=house.provider.node))
    assert entry.outcome == "completed"
    other.stop()


def _quote(wanted: market.Requirement) -> market.QuoteParams:
    return market.QuoteParams(requirement=wanted, duration_ms=MINUTE_MS)


def _is_marked(daemon: TestDaemon, provider: str) -> bool:
    """Return whether a provider's offer is known, and not bid on for its dates alone."""
    wanted = market.Requirement(model="A100", allow_simulated=True, provider=provider)
    quote: market.QuoteResult = daemon.call(market.QUOTE, _quote(wanted))
    assert not quote.candidates
    return "clock" in {one.reason for one in quote.rejections}


async def test_bids_of_a_clock_that_is_off_are_refused_with_the_reason(house: House) -> None:
    async with open_hostile(house.provider) as peer:
        offer = (await peer.offers_of(house.provider))[0]
        for ahead_ms, reason, detail in (
            (20_000, RejectReason.CLOCK_SKEW, "the renter's clock is "),
            (
                -20_000,
                RejectReason.EXPIRED,
                "one of the clocks is wrong",
            ),
        ):
            signed_at = now_ms() + ahead_ms
            answer = await peer.tell(
                house.provider, peer.bid(offer, signed_at=signed_at, expires_at=signed_at + 10_000)
            )
            assert isinstance(answer, BidRejected)
            assert answer.reason is reason
            assert detail in answer.detail
        # What clocks differ by in honest networks is nobody's fault.
        signed_at = now_ms() + 3_000
        bid = peer.bid(offer, signed_at=signed_at, expires_at=signed_at + 10_000)
        assert isinstance(await peer.tell(house.provider, bid), BidAck)
