"""Several providers and renters: the cheaper suitable one wins, and one GPU is sold once."""

from support.daemons import SIMULATED_A100, Daemons, TestDaemon

from node.rpc.methods import jobs
from protocol.units import price_from_hourly

SLOW_AUCTION = '[lend.auction]\nopening = "6s"\n'


def test_the_cheaper_suitable_provider_wins_then_one_gpu_is_sold_once(daemons: Daemons) -> None:
    cheap = daemons.provider("cheap", lend="start_price = 0.50\nreserve_price = 0.45")
    dear = daemons.provider("dear", lend="start_price = 2.00\nreserve_price = 1.90")
    small = '[[simulated_device]]\nmodel = "Tesla T4"\nmemory = "16G"\n'
    unsuitable = daemons.provider("small", lend="start_price = 0.10\nreserve_price = 0.05", devices=small)
    renter = daemons.renter()
    for provider in (cheap, dear, unsuitable):
        renter.connect(provider)
    renter.wait_offers(3)
    job = renter.run("/bin/echo", "ran", gpu_memory_mib=40_000)
    entry = renter.wait_final(job)
    assert (entry.outcome, entry.provider) == ("completed", cheap.node)
    assert entry.price is not None
    assert entry.price <= price_from_hourly("0.50")

    # Now the dearer provider rents as well, and two renters want the one cheap GPU at the same time.
    dear.connect(cheap)
    cheap.wait_for(lambda: cheap.devices()[0].use.value == "offered", "the cheap GPU to be offered again")
    contenders = (renter, dear)
    for contender in contenders:
        contender.wait_for(
            lambda contender=contender: _is_free(contender, cheap.node), "the cheap offer to be free"
        )
    wanted = {"gpu_memory_mib": 40_000, "provider": cheap.node}
    bought = [(one, one.run("/bin/sleep", "20", **wanted)) for one in contenders]
    winner, loser = _winner(bought)
    assert _live_leases(cheap) == 1
    seen = loser[0].job(loser[1])
    assert seen.state is jobs.JobState.BUYING
    told = loser[0].wait_for(lambda: _told(loser[0], loser[1]), "the loser to be told the price and the time")
    assert "/h now" in told
    assert "tried again" in told
    winner[0].call(jobs.CANCEL, jobs.JobParams(job=winner[1]))
    winner[0].wait_final(winner[1])
    loser[0].wait_running(loser[1])
    assert _live_leases(cheap) == 1
    loser[0].call(jobs.CANCEL, jobs.JobParams(job=loser[1]))
    assert loser[0].wait_final(loser[1]).outcome == "cancelled"


def _is_free(renter: TestDaemon, provider: str) -> bool:
    return any(offer.free and offer.provider == provider for offer in renter.offers())


def _winner(bought: list[tuple[TestDaemon, str]]) -> tuple[tuple[TestDaemon, str], tuple[TestDaemon, str]]:
    def running() -> list[int]:
        states = [daemon.job(job).state for daemon, job in bought]
        return [index for index, state in enumerate(states) if state is jobs.JobState.RUNNING]

    first = bought[0][0].wait_for(running, "one of two jobs to run")
    assert len(first) == 1
    return bought[first[0]], bought[1 - first[0]]


def _live_leases(provider: TestDaemon) -> int:
    return sum(device.lease is not None for device in provider.devices())


def _told(loser: TestDaemon, job: str) -> str:
    why = loser.call(jobs.WHY, jobs.WhyParams(job=job))
    lines = [step.detail for step in why.history if "/h now" in step.detail]
    return lines[-1] if lines else ""


def test_two_bids_in_one_batch_make_one_lease_and_a_checkable_lottery(daemons: Daemons) -> None:
    provider = daemons.provider(lend=SLOW_AUCTION, devices=SIMULATED_A100)
    renters = [daemons.renter("one"), daemons.renter("two")]
    for renter in renters:
        renter.connect(provider)
        renter.wait_offers()
    bought = [(renter, renter.run("/bin/sleep", "30")) for renter in renters]
    winner, loser = _winner(bought)
    assert _live_leases(provider) == 1
    assert _told(loser[0], loser[1]).startswith(("lost_lottery", "sold_out"))
    for daemon, job in (loser, winner):
        daemon.call(jobs.CANCEL, jobs.JobParams(job=job))
        assert daemon.wait_final(job).outcome == "cancelled"
