"""What a renter wants run, and what it takes to buy it: stored with the job, and turned into records bid by bid.

Refuses to buy: `node.market.buying` does.
"""

from typing import Annotated

import msgspec

from node.errors import BadArgument
from protocol.matching import Candidate, Requirement
from protocol.records import Job, JobInput, Resources, Terms
from protocol.records.fields import LIST_MAX
from protocol.units import Price, cost

DISK_DEFAULT_MIB = 10 * 1024
MIB = 1024 * 1024
INPUT_RATE = 4 * 1024 * 1024
"""Bytes a second that inputs are expected to travel at least."""


class SpecInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tree on this machine that the caller has scanned."""

    source: str
    destination: str
    manifest: bytes
    size: int
    ignore: tuple[str, ...] = ()
    """Patterns of what the scan has left out."""


class SpecOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tree to bring back, and where it goes."""

    remote: str
    local: str


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job as its owner submitted it."""

    requirement: Requirement
    """`max_price` is set: the cap is decided when the job is submitted."""
    command: tuple[str, ...]
    environment: str = "host"
    variables: dict[str, str] = {}
    workdir: str = ""
    inputs: Annotated[tuple[SpecInput, ...], msgspec.Meta(max_length=LIST_MAX)] = ()
    outputs: Annotated[tuple[SpecOutput, ...], msgspec.Meta(max_length=LIST_MAX)] = ()
    time_limit_ms: int
    max_spend: int
    prepay_ms: int = 0

    @property
    def max_price(self) -> int:
        """The hard cap of the price."""
        if self.requirement.max_price is None:
            raise AssertionError("a stored job has its cap")
        return self.requirement.max_price


def job_for(spec: JobSpec, candidate: Candidate) -> Job:
    """Return the job as it would run on `candidate`: what the spec leaves open is the offer's share."""
    wanted, host = spec.requirement, candidate.offer.record.host
    share = wanted.quantity
    resources = Resources(
        cpus_milli=wanted.cpus_milli or host.cpus_milli * share,
        memory_mib=wanted.host_memory_mib or host.memory_mib * share,
        disk_mib=wanted.disk_mib or min(DISK_DEFAULT_MIB, host.disk_mib * share),
        shm_mib=wanted.shm_mib,
    )
    return Job(
        command=spec.command,
        environment=spec.environment,
        variables=spec.variables,
        workdir=spec.workdir,
        inputs=tuple(JobInput(item.destination, item.manifest, item.size) for item in spec.inputs),
        outputs=tuple(item.remote for item in spec.outputs),
        resources=resources,
        time_limit_ms=spec.time_limit_ms,
    )


def with_room_for_inputs(wanted: Requirement, size: int) -> Requirement:
    """Return `wanted` with a disk on which inputs of `size` bytes leave room, where it names none.

    Raises BadArgument when it names one on which they do not fit.
    """
    size_mib = -(-size // MIB)
    if wanted.disk_mib and size_mib > wanted.disk_mib:
        raise BadArgument(
            f"the inputs take {size_mib} MiB, and the job's disk is to have {wanted.disk_mib} MiB",
            hint="ask for a larger disk with --disk",
        )
    if wanted.disk_mib or size_mib * 2 <= DISK_DEFAULT_MIB:
        return wanted
    return msgspec.structs.replace(wanted, disk_mib=size_mib + DISK_DEFAULT_MIB)


def lease_ms(spec: JobSpec, terms: Terms) -> int:
    """Return how long a lease for the job is to be: its time limit, and what its inputs need on their way."""
    travel_ms = sum(item.size for item in spec.inputs) * 1000 // INPUT_RATE
    return max(spec.time_limit_ms, min(spec.time_limit_ms + travel_ms, terms.lease_max_ms))


def spend_cap(spec: JobSpec, price: Price) -> int:
    """Return the cap of a lease at `price`: what its whole time would cost, at most the job's own cap."""
    return min(spec.max_spend, cost(price, spec.requirement.quantity, spec.time_limit_ms))
