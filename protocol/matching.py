"""Matching: which offers would do for a requirement, at what price, and why the others would not.

Ranked candidates and, for every other offer, each miss with what was wanted and what there is: `gpunode why` is
made of these. The same requirement, offers and time give the same answer on every machine.

Refuses to bid, to choose a time (`protocol.bidding` does), and to doubt: what an offer claims is taken as so.
"""

import enum
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

import msgspec

from protocol.bidding import next_bid_at
from protocol.book import mark_of
from protocol.device_models import device_model
from protocol.envelope import Sealed
from protocol.identity import KEY_SIZE, peer_id
from protocol.pricing import clock_price
from protocol.records.offer import DeviceSpec, Offer
from protocol.units import PRICE_MAX, Millis, Price, format_duration, format_price

ISOLATION_STRENGTH: dict[str, int] = {
    "unsafe-process": 0,
    "slurm": 1,
    "kubernetes": 2,
    "podman": 3,
    "bubblewrap": 3,
    "gvisor": 4,
    "kata": 5,
}
"""How well a tier keeps a job and its host apart; equal numbers are interchangeable. A cluster's tiers stand low:
what they isolate is the cluster's configuration, which nobody proved to us. A tier that is not here is accepted
only by its own name."""

PATTERN_SIZE_MAX = 128
MEMORY_TOLERANCE_PERMILLE = 80
"""ECC and firmware take up to this much of the memory that a product's name promises: a 16 GB T4 shows 15109 MiB,
an 80 GB H100 81559 MiB, and who asks for 80 GB means that card."""


class Requirement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a renter needs. Zero, empty and None ask for nothing."""

    quantity: int = 1
    model: str = ""
    """Words that the model's name must have: "A100", "rtx 4090", "A100-80GB"."""
    memory_mib: int = 0
    """Of each device."""
    cuda: int = 0
    """As NVML numbers it: 12040 for CUDA 12.4."""
    compute_capability: int = 0
    """Major x 10 + minor."""
    cpus_milli: int = 0
    """This and the next three: of the host, for all devices together."""
    host_memory_mib: int = 0
    disk_mib: int = 0
    shm_mib: int = 0
    environment: str = ""
    isolation: str = "bubblewrap"
    """The least tier that will do; see `ISOLATION_STRENGTH`."""
    network_mode: str = "none"
    region: str = ""
    """A region, or the beginning of one up to a "-": "eu" is in "eu-west"."""
    provider: bytes | None = None
    """The only provider that will do."""
    exclude: tuple[bytes, ...] = ()
    """Providers that will not: ourselves, and those that failed this job."""
    max_price: int | None = None
    """Nano-credits per device-second: the hard cap."""
    duration_ms: int = 0
    allow_simulated: bool = False


class MissReason(enum.StrEnum):
    """In what an offer falls short of a requirement."""

    CLOCK = "clock"
    EXCLUDED = "excluded"
    PROVIDER = "provider"
    SIMULATED = "simulated"
    MODEL = "model"
    MIG = "mig"
    QUANTITY = "quantity"
    BUSY = "busy"
    MEMORY = "memory"
    CUDA = "cuda"
    COMPUTE_CAPABILITY = "compute_capability"
    CPUS = "cpus"
    HOST_MEMORY = "host_memory"
    DISK = "disk"
    SHM = "shm"
    ENVIRONMENT = "environment"
    ISOLATION = "isolation"
    NETWORK = "network"
    REGION = "region"
    DURATION = "duration"
    PRICE = "price"


class Miss(msgspec.Struct, frozen=True):
    """One thing in which an offer falls short."""

    reason: MissReason
    wanted: str
    has: str

    @property
    def detail(self) -> str:
        """A line for people."""
        return f"wants {self.wanted}; the offer has {self.has}"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An offer that would do."""

    offer: Sealed[Offer]
    price: Price
    """The clock price now; may be above the cap."""
    affordable_at: Millis
    """When the clock is at or below the cap: now, or later (by then the offer may have been re-issued)."""
    isolation: str
    """The tier to name in a bid: of the offer's, the weakest that is strong enough."""


class Rejection(msgspec.Struct, frozen=True):
    """An offer that would not do, and everything in which it falls short."""

    offer: Sealed[Offer]
    misses: tuple[Miss, ...]


class Matches(msgspec.Struct, frozen=True):
    """Every offer, judged."""

    candidates: tuple[Candidate, ...]
    """Cheapest clock price first; of equals by provider and listing."""
    rejections: tuple[Rejection, ...]
    """Fewest misses first; of equals by provider and listing."""


def match(requirement: Requirement, offers: Iterable[Sealed[Offer]], now: Millis) -> Matches:
    """Judge every offer against `requirement` as of the time `now`.

    An offer whose clock is still above `max_price` is a candidate when its reserve is not: waiting will do.
    Raises ValueError when the requirement itself makes no sense (see `check_requirement`).
    """
    check_requirement(requirement)
    candidates, rejections = [], []
    for sealed in offers:
        curve = sealed.record.curve
        tier = weakest_sufficient(sealed.record.terms.isolation, requirement.isolation)
        cap = Price(PRICE_MAX if requirement.max_price is None else requirement.max_price)
        affordable_at = next_bid_at(curve, cap, now)
        misses = [
            *_provider_misses(requirement, sealed, now),
            *_device_misses(requirement, sealed.record),
            *_host_misses(requirement, sealed.record),
            *_terms_misses(requirement, sealed.record),
        ]
        if tier is None:
            misses.append(
                Miss(MissReason.ISOLATION, requirement.isolation, _any_of(sealed.record.terms.isolation))
            )
        if affordable_at is None:
            reserve = f"a reserve price of {format_price(curve.reserve)}"
            misses.append(Miss(MissReason.PRICE, f"at most {format_price(cap)}", reserve))
        if misses or tier is None or affordable_at is None:
            rejections.append(Rejection(sealed, tuple(misses)))
            continue
        candidates.append(
            Candidate(offer=sealed, price=clock_price(curve, now), affordable_at=affordable_at, isolation=tier)
        )
    candidates.sort(key=lambda found: (found.price, *_tie_break(found.offer)))
    rejections.sort(key=lambda found: (len(found.misses), *_tie_break(found.offer)))
    return Matches(tuple(candidates), tuple(rejections))


def check_requirement(requirement: Requirement) -> None:
    """Raise ValueError, saying what to mend, for a requirement that no offer could ever meet or that lies."""
    if requirement.quantity < 1:
        raise ValueError(f"{requirement.quantity} devices: at least one is needed")
    for name in ("memory_mib", "cpus_milli", "host_memory_mib", "disk_mib", "shm_mib", "duration_ms", "cuda"):
        if getattr(requirement, name) < 0:
            raise ValueError(f"{name} must not be negative")
    if requirement.max_price is not None and requirement.max_price < 0:
        raise ValueError("max_price must not be negative")
    if len(requirement.model) > PATTERN_SIZE_MAX:
        raise ValueError(f"a model pattern of more than {PATTERN_SIZE_MAX} characters")
    if requirement.provider is not None and len(requirement.provider) != KEY_SIZE:
        raise ValueError("the provider is a 32-byte node id")
    if requirement.model and not _words(requirement.model):
        raise ValueError(f"the model pattern {requirement.model!r} has no letter or digit")


def is_model_match(pattern: str, device: DeviceSpec) -> bool:
    """Return whether every word of `pattern` is in the device's name, in any case and order.

    A word is compared as a whole ("A10" is not in "A100"), but may run words of the name together ("RTX4090").
    A name also has the words of its entry in `protocol.device_models`, and of its MIG profile.
    """
    name = _name_words(device.model, device.mig_profile)
    return all(any(_begins(name, index, word) for index in range(len(name))) for word in _words(pattern))


def weakest_sufficient(offered: tuple[str, ...], least: str) -> str | None:
    """Return the weakest of the `offered` tiers that is at least as strong as `least`; None when none is."""
    floor = ISOLATION_STRENGTH.get(least)
    if least in offered:
        return least
    if floor is None:
        return None
    enough = [tier for tier in offered if ISOLATION_STRENGTH.get(tier, -1) >= floor]
    return min(enough, key=lambda tier: ISOLATION_STRENGTH[tier]) if enough else None


def _provider_misses(requirement: Requirement, sealed: Sealed[Offer], now: Millis) -> Iterator[Miss]:
    offer = sealed.record
    if mark_of(sealed, now) is not None:
        yield Miss(MissReason.CLOCK, "an offer that is valid now", _validity(offer, now))
    if sealed.signer in requirement.exclude:
        yield Miss(MissReason.EXCLUDED, "another provider", peer_id(sealed.signer))
    if requirement.provider is not None and sealed.signer != requirement.provider:
        yield Miss(MissReason.PROVIDER, peer_id(requirement.provider), peer_id(sealed.signer))
    if offer.simulated and not requirement.allow_simulated:
        yield Miss(MissReason.SIMULATED, "real devices", "simulated ones")
    if requirement.region and not _is_in_region(offer.region, requirement.region):
        yield Miss(MissReason.REGION, requirement.region, offer.region or "no region")


def _device_misses(requirement: Requirement, offer: Offer) -> Iterator[Miss]:
    device = offer.device
    if requirement.model:
        if not is_model_match(requirement.model, device):
            yield Miss(MissReason.MODEL, requirement.model, device.model or "no name")
        elif device.mig_profile and not _names_mig(requirement.model, device):
            yield Miss(MissReason.MIG, "a whole GPU", f"a {device.mig_profile} MIG instance")
    if requirement.quantity > offer.quantity:
        yield Miss(MissReason.QUANTITY, _devices(requirement.quantity), str(offer.quantity))
    elif requirement.quantity > offer.free:
        has = f"{offer.free} of {offer.quantity} free"
        yield Miss(MissReason.BUSY, _devices(requirement.quantity), has)
    if device.memory_mib * 1000 < requirement.memory_mib * (1000 - MEMORY_TOLERANCE_PERMILLE):
        yield Miss(MissReason.MEMORY, f"{_size(requirement.memory_mib)} a device", _size(device.memory_mib))
    if device.cuda < requirement.cuda:
        yield Miss(MissReason.CUDA, f"CUDA {_cuda(requirement.cuda)}", _cuda(device.cuda))
    if device.compute_capability < requirement.compute_capability:
        wanted = f"compute capability {_capability(requirement.compute_capability)}"
        yield Miss(MissReason.COMPUTE_CAPABILITY, wanted, _capability(device.compute_capability))


def _host_misses(requirement: Requirement, offer: Offer) -> Iterator[Miss]:
    """Compare the host's share, stated for each device, with what all of them together need."""
    host, quantity = offer.host, requirement.quantity
    cpus, memory, disk = host.cpus_milli * quantity, host.memory_mib * quantity, host.disk_mib * quantity
    if cpus < requirement.cpus_milli:
        yield Miss(MissReason.CPUS, f"{_cpus(requirement.cpus_milli)} cores", _cpus(cpus))
    if memory < requirement.host_memory_mib:
        yield Miss(MissReason.HOST_MEMORY, f"{_size(requirement.host_memory_mib)} of host memory", _size(memory))
    if disk < requirement.disk_mib:
        yield Miss(MissReason.DISK, f"{_size(requirement.disk_mib)} of disk", _size(disk))
    if memory < requirement.shm_mib:
        yield Miss(MissReason.SHM, f"{_size(requirement.shm_mib)} of /dev/shm", f"{_size(memory)} of host memory")


def _terms_misses(requirement: Requirement, offer: Offer) -> Iterator[Miss]:
    terms = offer.terms
    if requirement.environment and requirement.environment not in offer.environments:
        yield Miss(MissReason.ENVIRONMENT, f"environment {requirement.environment}", _any_of(offer.environments))
    if requirement.network_mode not in terms.network_modes:
        yield Miss(MissReason.NETWORK, f"network {requirement.network_mode}", _any_of(terms.network_modes))
    if requirement.duration_ms and not terms.lease_min_ms <= requirement.duration_ms <= terms.lease_max_ms:
        bounds = f"leases of {format_duration(terms.lease_min_ms)} to {format_duration(terms.lease_max_ms)}"
        yield Miss(MissReason.DURATION, format_duration(requirement.duration_ms), bounds)


def _tie_break(sealed: Sealed[Offer]) -> tuple[bytes, str, bytes]:
    return sealed.signer, sealed.record.listing, sealed.id


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9]+(?:\.[a-z0-9]+)*", text.casefold()))


@lru_cache(maxsize=1024)
def _name_words(model: str, mig_profile: str) -> tuple[str, ...]:
    known = device_model(model)
    profile = f" mig {mig_profile}" if mig_profile else ""
    return _words(model) + _words(profile) + (_words(known.name) if known else ())


def _begins(name: tuple[str, ...], index: int, word: str) -> bool:
    """Return whether `word` is the word of `name` at `index`, or that and whole words after it, run together."""
    for part in name[index:]:
        if word == part:
            return True
        if not word.startswith(part):
            return False
        word = word[len(part) :]
    return False


def _names_mig(pattern: str, device: DeviceSpec) -> bool:
    return not {"mig", *_words(device.mig_profile)}.isdisjoint(_words(pattern))


def _is_in_region(region: str, wanted: str) -> bool:
    return f"{region.casefold()}-".startswith(f"{wanted.casefold()}-")


def _validity(offer: Offer, now: Millis) -> str:
    if now >= offer.expires_at:
        return f"one that expired {format_duration(now - offer.expires_at)} ago"
    return f"one dated {format_duration(offer.issued_at - now)} ahead of our clock"


def _devices(quantity: int) -> str:
    return f"{quantity} device" if quantity == 1 else f"{quantity} devices"


def _any_of(words: tuple[str, ...]) -> str:
    return ", ".join(words) or "none"


def _size(mib: int) -> str:
    return f"{mib / 1024:.1f} GiB"


def _cpus(milli: int) -> str:
    return f"{milli / 1000:g}"


def _capability(number: int) -> str:
    return f"{number // 10}.{number % 10}" if number else "none"


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}" if version else "no CUDA"
