"""What runs: the job. It travels inside the tunnel only; records name it by its hash."""

from typing import Annotated

import msgspec

from protocol import codec
from protocol.identity import hash_bytes
from protocol.records.fields import LIST_MAX, Count, DurationMs, Hash, Mib, Token

ARGUMENT_MAX = 128 * 1024
JOB_SIZE_MAX = 1024 * 1024

Argument = Annotated[str, msgspec.Meta(max_length=ARGUMENT_MAX, pattern=r"^[^\x00]*$")]
RelativePath = Annotated[str, msgspec.Meta(min_length=1, max_length=1024, pattern=r"^[^/\x00][^\x00]*$")]
VariableName = Annotated[
    str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$(?!\n)")
]


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the job may use of the host, for all its devices together."""

    cpus_milli: Count
    memory_mib: Mib
    disk_mib: Mib
    shm_mib: Mib = 0
    """/dev/shm; 0: half of the memory."""
    pids: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 4096


class JobInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tree that the renter stages to `destination` below the job's directory."""

    destination: RelativePath
    manifest: Hash
    size: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    """Bytes of content in the tree."""


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command and what it needs. Paths are relative to the job's directory, and never leave it."""

    command: Annotated[tuple[Argument, ...], msgspec.Meta(min_length=1, max_length=4096)]
    environment: Token = "host"
    variables: dict[VariableName, Argument] = {}
    workdir: Annotated[str, msgspec.Meta(max_length=1024, pattern=r"^[^\x00]*$")] = ""
    inputs: Annotated[tuple[JobInput, ...], msgspec.Meta(max_length=LIST_MAX)] = ()
    outputs: Annotated[tuple[RelativePath, ...], msgspec.Meta(max_length=LIST_MAX)] = ()
    resources: Resources
    time_limit_ms: DurationMs

    def __post_init__(self) -> None:
        for path in (*self.outputs, *(item.destination for item in self.inputs), self.workdir):
            if any(part == ".." for part in path.split("/")) or path.startswith("/"):
                raise ValueError(f"{path!r} leaves the job's directory")


def job_hash(job: Job) -> bytes:
    """Return the 32-byte hash by which bids and grants name `job`."""
    return hash_bytes(codec.encode(job))
