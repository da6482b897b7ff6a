"""Markets in bad weather: no device is leased twice, no money appears, everybody is served; and it all repeats."""

import pytest
from support.market_shells import Provider, Renter, open_world
from support.market_world import Weather, World, money_is_conserved

from protocol.machines.purchase import Phase
from protocol.units import MINUTE_MS

CALM = Weather()
ROUGH = Weather(loss=0.15, duplicate=0.1, delay_max_ms=400)
STORM = Weather(loss=0.25, duplicate=0.2, delay_max_ms=900, outage=0.2, keeper_failure=0.2)


def run(seed: int, weather: Weather, minutes: int = 60) -> World:
    world = open_world(seed, weather)
    try:
        world.run(minutes * MINUTE_MS)
    except AssertionError as error:
        pytest.fail(f"seed {seed}, {weather}: {error} after {world.lines} steps")
    return world


def renters(world: World) -> list[Renter]:
    return [node for node in world.nodes.values() if isinstance(node, Renter)]


@pytest.mark.parametrize(
    ("seed", "weather"),
    [(1, CALM), (1, ROUGH), (1, STORM), (2, STORM)],
    ids=["calm", "rough", "storm", "other storm"],
)
def test_everybody_is_served_once_and_pays_once(seed: int, weather: Weather) -> None:
    world = run(seed, weather)
    told = f"seed {seed}, {weather}"
    assert not world.sales, told
    assert money_is_conserved(world), told
    for renter in renters(world):
        assert renter.jobs_left == 0, told
        assert renter.purchase.phase is Phase.SEEKING, told
        assert len(set(renter.leases)) == len(renter.leases) == 3, told
        for lease in renter.leases:
            sale, paid = world.ended[lease]
            assert sale.renter == renter.id, told
            assert sale.price <= renter.max_price, told
            assert paid <= renter.max_spend, told
    for node in world.nodes.values():
        if isinstance(node, Provider):
            auction = node.auction
            assert not auction.leases, told
            granted = sum(len(sale.keys) for sale, _ in world.ended.values() if sale.provider == node.id)
            assert sum(unit.number for unit in auction.units) == 2 * granted, told


def test_the_same_seed_gives_the_same_history_and_another_seed_another() -> None:
    histories = [run(seed, STORM, minutes=10) for seed in (5, 5, 6)]
    first, again, other = [(world.digest, world.lines) for world in histories]
    assert first == again
    assert first != other


def test_in_calm_weather_nobody_is_given_a_lease_that_it_did_not_want() -> None:
    world = run(3, CALM, minutes=40)
    wanted = {lease for renter in renters(world) for lease in renter.leases}
    assert set(world.ended) == wanted
    for renter in renters(world):
        assert renter.releases == set(renter.leases)
