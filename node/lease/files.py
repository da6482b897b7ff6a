"""The lease directory: what the daemon tells a keeper, and what the keeper tells the daemon, on disk.

    lease.cbor   LeaseFile, written once by the daemon before the keeper starts
    keys         LeaseKeys, 0600, deleted at settlement
    lock         flock held by the keeper for life; names it (`node.lease.lock`)
    generation   raised by each new holder of the lock
    status.cbor  LeaseStatus, replaced atomically by the keeper at every transition
    log/         the job's bounded output (`node.jobs.logs`)

A renter's directory belongs to the calling user, while the daemon may be root: so nothing here follows a
symbolic link, opens anything but a regular file, or believes what it reads further than its types go.
Every write is complete or absent after a crash: a new file is fsynced, renamed over the old one, and the
directory is fsynced. Refuses to decide anything.
"""

import contextlib
import enum
import os
import secrets
import stat
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

import msgspec

from node.errors import NodeError
from protocol import codec
from protocol.envelope import ENVELOPE_SIZE_MAX
from protocol.errors import MalformedRecord
from protocol.machines.lease import LeasePhase
from protocol.records.fields import (
    DEVICES_MAX,
    LIST_MAX,
    Address,
    AmountField,
    DurationMs,
    Hash,
    Key,
    LeaseId,
    Mib,
    MillisField,
    Number,
    PriceField,
    Quantity,
    Token,
)
from protocol.records.job import Job, Resources
from protocol.records.offer import Terms

LEASE_FILE = "lease.cbor"
KEYS_FILE = "keys"
STATUS_FILE = "status.cbor"
LEASE_FILE_MAX = 4 * 1024 * 1024
"""Largest lease file: a job is at most 1 MiB, paths come on top."""
STATUS_FILE_MAX = 256 * 1024
KEYS_FILE_MAX = 1024
VERSION = 1
"""Version of the directory's layout; a keeper reads its own and the one before."""

T = TypeVar("T")

LocalPath = Annotated[str, msgspec.Meta(min_length=1, max_length=4096, pattern=r"^/[^\x00]*$")]


class LeaseFileError(NodeError):
    """A file of the lease directory is missing or damaged."""

    code: ClassVar[int] = 2310


class Role(enum.StrEnum):
    """Which side of the lease a keeper looks after."""

    PROVIDER = "provider"
    RENTER = "renter"


class LeasedDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device of the lease, and what a sandbox must show of it."""

    uuid: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    nodes: tuple[LocalPath, ...] = ()
    mounts: tuple[tuple[LocalPath, LocalPath], ...] = ()
    """Read-only (host path, path in the job), from the CDI specification."""


class ProviderSide(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What only the provider's keeper needs."""

    bind_host: str = "::"
    port_min: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """0: any port."""
    port_max: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    job_uid: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 2)]
    allow_unsafe: bool = False
    """Whether the configuration allows the tier `unsafe-process`."""
    allow_polled: bool = False
    """Whether it allows jobs whose limits are polled, where there are no control groups."""
    environments: dict[str, tuple[LocalPath, ...]] = {}
    """What environments besides "host" show of this machine."""
    devices: Annotated[tuple[LeasedDevice, ...], msgspec.Meta(max_length=DEVICES_MAX)] = ()


class InputSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an input of the job lies on the renter's machine; the n-th belongs to the job's n-th input."""

    path: LocalPath
    ignore: Annotated[tuple[str, ...], msgspec.Meta(max_length=1024)] = ()
    """Patterns left out when the tree is scanned (`node.jobs.tree.scan_tree`)."""


class RenterSide(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What only the renter's keeper needs."""

    addresses: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=8)]
    """The provider's UDP host:port addresses, best first."""
    job: Job
    inputs: Annotated[tuple[InputSource, ...], msgspec.Meta(max_length=LIST_MAX)] = ()
    outputs: Annotated[tuple[LocalPath, ...], msgspec.Meta(max_length=LIST_MAX)] = ()
    """Where the job's n-th output goes."""
    prepay_ms: DurationMs = 0
    """How far vouchers run ahead of the meter, beyond one interval."""


class LeaseFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a keeper knows of its lease. Never changes."""

    version: int = VERSION
    role: Role
    lease: LeaseId
    network: Hash
    provider: Key
    renter: Key
    peer_tunnel_key: Key
    voucher_key: Key
    """Public; its vouchers pay for the lease."""
    price: PriceField
    quantity: Quantity
    max_spend: AmountField
    until: MillisField
    terms: Terms
    job_hash: Hash
    resources: Resources
    isolation: Token
    network_mode: Token = "none"
    simulated: bool
    provider_side: ProviderSide | None = None
    renter_side: RenterSide | None = None

    def __post_init__(self) -> None:
        side = self.provider_side if self.role is Role.PROVIDER else self.renter_side
        if side is None:
            raise ValueError(f"a lease file of the {self.role} lacks its side")


class LeaseKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lease's delegated private keys: 32-byte Ed25519 seeds."""

    tunnel: Key
    voucher: Key | None = None
    """Only on the renter's side."""


class OutputStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One output, in the job's order."""

    path: str
    manifest: Hash | None
    """None: the job made no such file."""
    size: Number = 0
    fetched: bool = False
    """Renter: verified, and in its place. Provider: the renter said so."""


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A keeper's account of its lease. Amounts are nano-credits."""

    version: int = VERSION
    lease: LeaseId
    role: Role
    generation: Number
    """Of the keeper that wrote it."""
    sequence: Number
    """Raised by each change; a later keeper's are above those of all before it."""
    phase: LeasePhase
    outcome: str = ""
    """"" while undecided, "completed", or a `FailReason`."""
    detail: str = ""
    """A sentence for people about the outcome, or about what the keeper waits for."""
    port: int = 0
    """The provider's UDP port, once bound."""
    connected: bool = False
    peer_address: str = ""
    started_at: MillisField = 0
    """When the job started, in Unix ms; 0 before."""
    ended_at: MillisField = 0
    metered_ms: DurationMs = 0
    """Job time that is paid for: from start to exit, without the time frozen."""
    frozen_ms: DurationMs = 0
    amount: AmountField = 0
    """What is owed for it, at most the highest voucher's amount."""
    voucher: Annotated[bytes, msgspec.Meta(max_length=ENVELOPE_SIZE_MAX)] = b""
    """The highest voucher, sealed; empty before the first."""
    voucher_number: Number = 0
    voucher_amount: AmountField = 0
    exit_status: Annotated[int, msgspec.Meta(ge=-1, le=255)] = -1
    job_end: str = ""
    """How the job's processes ended: an `EndReason` of `node.ports`, "" before."""
    outputs: tuple[OutputStatus, ...] = ()
    collected: bool = False
    """The renter has verified every output."""
    staged_bytes: Number = 0
    staging_bytes: Number = 0
    """Bytes of input content: there by now, and in all."""
    collected_bytes: Number = 0
    collecting_bytes: Number = 0
    stdout_size: Number = 0
    """Bytes that the job has written there so far (of which the log keeps head and tail)."""
    stderr_size: Number = 0
    kept_until: MillisField = 0
    """Until when uncollected results are kept; 0 before the job's end."""
    usage: dict[str, int] = {}
    """What the sandbox measured: cpu_ms, memory_peak_mib."""
    scratch_used_mib: Mib = 0
    machine: Annotated[bytes, msgspec.Meta(max_length=128 * 1024)] = b""
    """The keeper's own state, for the next keeper; only in the file, empty on the link."""


def read_lease_file(directory: Path) -> LeaseFile:
    """Return the lease file of `directory`; raise LeaseFileError."""
    return _read(directory / LEASE_FILE, LeaseFile, LEASE_FILE_MAX)


def read_keys(directory: Path) -> LeaseKeys:
    """Return the lease's keys; raise LeaseFileError, also when they were deleted at settlement."""
    return _read(directory / KEYS_FILE, LeaseKeys, KEYS_FILE_MAX)


def read_status(directory: Path) -> LeaseStatus | None:
    """Return the last status that a keeper wrote, or None before the first; raise LeaseFileError."""
    try:
        return _read(directory / STATUS_FILE, LeaseStatus, STATUS_FILE_MAX)
    except FileNotFoundError:
        return None


def write_status(directory: Path, status: LeaseStatus) -> None:
    """Replace the status, durably. Blocks on the disk."""
    write_atomically(directory / STATUS_FILE, codec.encode(status))


def delete_keys(directory: Path) -> None:
    """Delete the lease's keys, durably. Idempotent."""
    (directory / KEYS_FILE).unlink(missing_ok=True)
    fsync_directory(directory)


def create_lease_directory(
    directory: Path, lease_file: LeaseFile, keys: LeaseKeys, *, uid: int | None = None, gid: int | None = None
) -> None:
    """Make `directory` (0700), write lease file and keys, and give all of it to `uid` and `gid` when they are set.

    Ready for a keeper once this returns: the directory appears under its name only when it is complete.
    Raises FileExistsError when it exists, OSError. Blocks on the disk.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists")
    directory.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    draft = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}")
    draft.mkdir(mode=0o700)
    write_atomically(draft / LEASE_FILE, codec.encode(lease_file))
    write_atomically(draft / KEYS_FILE, codec.encode(keys))
    if uid is not None or gid is not None:
        for path in (draft / LEASE_FILE, draft / KEYS_FILE, draft):
            os.chown(path, -1 if uid is None else uid, -1 if gid is None else gid)
    draft.rename(directory)
    fsync_directory(directory.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file at `path` (0600) by `data`, durably: old or new after a crash, never a part."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb", closefd=True) as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        raise
    fsync_directory(path.parent)


def read_bounded(path: Path, size_max: int) -> bytes:
    """Return the bytes of the regular file at `path`, following no link.

    Raises FileNotFoundError, or LeaseFileError when it is anything else, larger than `size_max` bytes or
    unreadable.
    """
    try:
        # O_NONBLOCK: a fifo in a stranger's directory must not hold us up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LeaseFileError(f"cannot read {path}: {error.strerror}") from None
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor, not a path
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise LeaseFileError(f"{path} is not a regular file")
        data = file.read(size_max + 1)
    if len(data) > size_max:
        raise LeaseFileError(f"{path} is larger than {size_max} bytes")
    return data


def fsync_directory(directory: Path) -> None:
    """Make renames and deletions in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, record_type: type[T], size_max: int) -> T:
    try:
        data = read_bounded(path, size_max)
    except FileNotFoundError:
        if record_type is LeaseStatus:
            raise
        raise LeaseFileError(f"{path} is missing") from None
    try:
        return codec.decode_untrusted(data, record_type, size_max)
    except MalformedRecord as error:
        raise LeaseFileError(f"{path} is damaged: {error}") from None
