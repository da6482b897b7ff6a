"""Which offers would do, in which order, and what the others lack."""

import msgspec
import pytest
from support.offers import NOW, a_curve, an_offer, sealed_offer
from support.signers import signer

from protocol.matching import MissReason, Requirement, match, weakest_sufficient
from protocol.pricing import clock_price
from protocol.records import Offer, Terms
from protocol.units import HOUR_MS, MINUTE_MS, Millis, Price


def misses(requirement: Requirement, **fields: object) -> dict[MissReason, str]:
    matches = match(requirement, [sealed_offer(**fields)], NOW)
    assert len(matches.candidates) + len(matches.rejections) == 1
    return {miss.reason: miss.detail for each in matches.rejections for miss in each.misses}


def device(**fields: object) -> dict[str, object]:
    return {"device": msgspec.structs.replace(an_offer().device, **fields)}


def test_a_requirement_of_nothing_takes_any_live_offer() -> None:
    offer = sealed_offer()
    matches = match(Requirement(), [offer], NOW)
    assert matches.rejections == ()
    (candidate,) = matches.candidates
    assert candidate.offer == offer
    assert candidate.price == clock_price(offer.record.curve, NOW)
    assert candidate.affordable_at == NOW
    assert candidate.isolation == "bubblewrap"


def test_candidates_are_ranked_by_price_and_then_by_provider_and_listing() -> None:
    cheap = sealed_offer(3, curve=a_curve(start=200_000))
    dear = sealed_offer(1, curve=a_curve(start=600_000))
    equal = sorted(
        (sealed_offer(who, listing=listing) for who in (1, 2, 4) for listing in ("x", "y")),
        key=lambda each: (each.signer, each.record.listing),
    )
    for offers in ([dear, *equal, cheap], [cheap, *reversed(equal), dear]):
        ranked = [candidate.offer for candidate in match(Requirement(), offers, NOW).candidates]
        assert ranked == [cheap, *equal, dear]


def test_a_price_that_will_fall_far_enough_is_worth_waiting_for() -> None:
    offer = sealed_offer()
    cap = Price(200_000)
    (candidate,) = match(Requirement(max_price=cap), [offer], NOW).candidates
    assert candidate.price > cap
    assert candidate.affordable_at > NOW
    assert clock_price(offer.record.curve, candidate.affordable_at) <= cap
    assert clock_price(offer.record.curve, Millis(candidate.affordable_at - 1)) > cap


def test_a_reserve_above_the_cap_is_a_miss() -> None:
    assert misses(Requirement(max_price=105_554)) == {
        MissReason.PRICE: "wants at most $0.3800/h; the offer has a reserve price of $0.3800/h"
    }
    assert misses(Requirement(max_price=105_555)) == {}
    assert misses(Requirement(max_price=55_555))[MissReason.PRICE].startswith("wants at most $0.2000/h")


@pytest.mark.parametrize(
    ("fields", "reason", "wanted", "has"),
    [
        ({"model": "H100"}, MissReason.MODEL, "H100", "NVIDIA A100-SXM4-40GB"),
        ({"quantity": 5}, MissReason.QUANTITY, "5 devices", "4"),
        ({"memory_mib": 81_920}, MissReason.MEMORY, "80.0 GiB a device", "40.0 GiB"),
        ({"cuda": 12_060}, MissReason.CUDA, "CUDA 12.6", "12.4"),
        ({"compute_capability": 90}, MissReason.COMPUTE_CAPABILITY, "compute capability 9.0", "8.0"),
        ({"cpus_milli": 8500}, MissReason.CPUS, "8.5 cores", "8"),
        ({"host_memory_mib": 65_537}, MissReason.HOST_MEMORY, "64.0 GiB of host memory", "64.0 GiB"),
        ({"disk_mib": 204_800}, MissReason.DISK, "200.0 GiB of disk", "195.3 GiB"),
        ({"shm_mib": 70_000}, MissReason.SHM, "68.4 GiB of /dev/shm", "64.0 GiB of host memory"),
        ({"environment": "torch"}, MissReason.ENVIRONMENT, "environment torch", "host"),
        ({"isolation": "kata"}, MissReason.ISOLATION, "kata", "bubblewrap, gvisor"),
        ({"network_mode": "renter"}, MissReason.NETWORK, "network renter", "none, internet"),
        ({"region": "us"}, MissReason.REGION, "us", "eu-west"),
        ({"duration_ms": 25 * HOUR_MS}, MissReason.DURATION, "25h 00m", "leases of 1m 00s to 24h 00m"),
        ({"duration_ms": 30_000}, MissReason.DURATION, "30.0s", "leases of 1m 00s to 24h 00m"),
    ],
)
def test_each_miss_says_what_was_wanted_and_what_there_is(
    fields: dict[str, object], reason: MissReason, wanted: str, has: str
) -> None:
    assert misses(Requirement(**fields)) == {reason: f"wants {wanted}; the offer has {has}"}


def test_the_host_is_shared_by_the_devices_of_the_lease() -> None:
    wanted = Requirement(cpus_milli=16_000, host_memory_mib=131_072, disk_mib=400_000)
    assert set(misses(wanted)) == {MissReason.CPUS, MissReason.HOST_MEMORY, MissReason.DISK}
    assert misses(msgspec.structs.replace(wanted, quantity=2)) == {}


def test_devices_in_use_are_another_miss_than_devices_that_there_are_not() -> None:
    assert misses(Requirement(quantity=3), free=2) == {
        MissReason.BUSY: "wants 3 devices; the offer has 2 of 4 free"
    }
    assert misses(Requirement(), free=0) == {MissReason.BUSY: "wants 1 device; the offer has 0 of 4 free"}
    assert set(misses(Requirement(quantity=5), free=0)) == {MissReason.QUANTITY}


def test_an_offer_that_is_not_valid_now_is_never_a_candidate() -> None:
    expired = misses(Requirement(), expires_at=NOW)
    assert expired == {
        MissReason.CLOCK: "wants an offer that is valid now; the offer has one that expired 0.0s ago"
    }
    ahead = misses(Requirement(), issued_at=NOW + 2 * MINUTE_MS)
    assert ahead[MissReason.CLOCK].endswith("one dated 2m 00s ahead of our clock")


def test_providers_can_be_named_and_excluded() -> None:
    offers = [sealed_offer(who) for who in (1, 2, 3)]
    only = match(Requirement(provider=signer(2).node), offers, NOW)
    assert [each.offer for each in only.candidates] == [offers[1]]
    assert {miss.reason for each in only.rejections for miss in each.misses} == {MissReason.PROVIDER}
    others = match(Requirement(exclude=(signer(2).node, signer(3).node)), offers, NOW)
    assert [each.offer for each in others.candidates] == [offers[0]]
    assert {miss.reason for each in others.rejections for miss in each.misses} == {MissReason.EXCLUDED}


def test_simulated_devices_are_for_those_who_ask() -> None:
    assert set(misses(Requirement(), simulated=True)) == {MissReason.SIMULATED}
    assert misses(Requirement(allow_simulated=True), simulated=True) == {}


@pytest.mark.parametrize("wanted", ["eu", "EU", "eu-west", "Eu-West"])
def test_a_region_is_named_by_its_beginning(wanted: str) -> None:
    assert misses(Requirement(region=wanted)) == {}


@pytest.mark.parametrize("wanted", ["e", "eu-w", "west", "eu-west-1"])
def test_a_region_is_not_named_by_a_piece(wanted: str) -> None:
    assert set(misses(Requirement(region=wanted))) == {MissReason.REGION}


def test_memory_is_the_products_nominal_size() -> None:
    assert misses(Requirement(memory_mib=81_920), **device(memory_mib=81_559)) == {}
    assert misses(Requirement(memory_mib=16_384), **device(memory_mib=15_109)) == {}
    assert set(misses(Requirement(memory_mib=24_576), **device(memory_mib=16_384))) == {MissReason.MEMORY}


def test_rejections_begin_with_those_that_lack_least() -> None:
    near = sealed_offer(1, listing="near", free=0)
    far = sealed_offer(1, listing="far", free=0, region="us")
    rejections = match(Requirement(region="eu"), [far, near], NOW).rejections
    assert [each.offer.record.listing for each in rejections] == ["near", "far"]
    assert [len(each.misses) for each in rejections] == [1, 2]


@pytest.mark.parametrize(
    ("offered", "least", "tier"),
    [
        (("bubblewrap",), "bubblewrap", "bubblewrap"),
        (("gvisor", "bubblewrap"), "bubblewrap", "bubblewrap"),
        (("kata", "gvisor"), "bubblewrap", "gvisor"),
        (("podman",), "bubblewrap", "podman"),
        (("bubblewrap",), "gvisor", None),
        (("unsafe-process",), "bubblewrap", None),
        (("unsafe-process", "kata"), "unsafe-process", "unsafe-process"),
        (("slurm", "kubernetes"), "bubblewrap", None),
        (("slurm", "kubernetes"), "slurm", "slurm"),
        (("enclave",), "bubblewrap", None),
        (("enclave",), "enclave", "enclave"),
        (("kata",), "enclave", None),
    ],
)
def test_the_weakest_tier_that_is_strong_enough(offered: tuple[str, ...], least: str, tier: str | None) -> None:
    assert weakest_sufficient(offered, least) == tier
    matches = match(Requirement(isolation=least), [sealed_offer(terms=Terms(isolation=offered))], NOW)
    assert [each.isolation for each in matches.candidates] == ([tier] if tier else [])


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"quantity": 0}, "at least one"),
        ({"memory_mib": -1}, "memory_mib must not be negative"),
        ({"duration_ms": -1}, "duration_ms must not be negative"),
        ({"max_price": -1}, "max_price must not be negative"),
        ({"model": "-"}, "no letter or digit"),
        ({"model": "a" * 129}, "more than 128"),
        ({"provider": b"short"}, "32-byte node id"),
    ],
)
def test_a_requirement_that_makes_no_sense_is_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        match(Requirement(**fields), [], NOW)


def test_the_offer_comes_back_as_it_went_in() -> None:
    offers = [sealed_offer(who, region=region) for who in (1, 2) for region in ("eu", "us")]
    matches = match(Requirement(region="eu"), offers, NOW)
    judged = [each.offer for each in (*matches.candidates, *matches.rejections)]
    assert sorted(each.id for each in judged) == sorted(each.id for each in offers)
    assert all(type(each.record) is Offer for each in judged)
