"""What travels on a tunnel's streams: a closed set of frames, each a 32-bit length and canonical CBOR.

The renter opens every stream, and its first frame says what for:

    ControlOpened   both say Hello, then: JobSubmitted, VoucherSent, CancelAsked, OutputsCollected, Goodbye from
                    the renter; StatusTold, VoucherTaken, Goodbye from the provider. One at a time; a newer one
                    replaces it.
    BulkOpened      one tree, an input or an output; what follows is `node.jobs.transfer`'s
    LogOpened       LogData from the given offsets on, LogEnded after the job's end
    ShellOpened     another command in the job's sandbox: ShellInput one way, ShellOutput and ShellEnded the other

Nothing here is signed but vouchers: the tunnel has proven both ends. Every frame may be said again after a
reconnection; saying it twice changes nothing. Refuses to know streams.
"""

import enum
import struct
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from protocol import codec
from protocol.envelope import ENVELOPE_SIZE_MAX
from protocol.errors import MalformedRecord
from protocol.machines.lease import COMPLETED, FailReason, LeasePhase
from protocol.records.fields import (
    LIST_MAX,
    AmountField,
    DurationMs,
    Hash,
    LeaseId,
    MillisField,
    Note,
    Number,
)
from protocol.records.job import JOB_SIZE_MAX, Argument

VERSION = 1
VERSION_MIN = 1
FRAME_SIZE_MAX = JOB_SIZE_MAX + 64 * 1024
"""The largest frame carries a job."""
LOG_DATA_MAX = 256 * 1024
SHELL_DATA_MAX = 64 * 1024
PATH_MAX = 1024
LENGTH = struct.Struct(">I")

OutputIndex = Annotated[int, msgspec.Meta(ge=0, lt=LIST_MAX)]
ExitStatus = Annotated[int, msgspec.Meta(ge=-1, le=255)]


class LogSource(enum.StrEnum):
    """The job's two outputs."""

    STDOUT = "stdout"
    STDERR = "stderr"


class Direction(enum.StrEnum):
    """Which way a tree travels."""

    INPUT = "input"
    OUTPUT = "output"


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="frame"):
    """A frame; its tag is its class's name."""


class ControlOpened(_Frame, frozen=True, tag="control"):
    """This stream is the lease's control stream."""


class BulkOpened(_Frame, frozen=True, tag="bulk"):
    """This stream moves the job's `index`-th input or output."""

    direction: Direction
    index: OutputIndex


class LogOpened(_Frame, frozen=True, tag="log"):
    """This stream carries the job's output, from these offsets on."""

    stdout: Number
    stderr: Number


class ShellOpened(_Frame, frozen=True, tag="shell"):
    """This stream is another command in the job's sandbox."""

    argv: Annotated[tuple[Argument, ...], msgspec.Meta(min_length=1, max_length=1024)]


class Hello(_Frame, frozen=True, tag="hello"):
    """The first frame after `ControlOpened`, from both."""

    version: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    """Highest version of the frames that the sender speaks; each speaks the one before, too."""
    lease: LeaseId
    generation: Number
    """Of the sender's keeper; an older one than was seen before is refused."""


class JobSubmitted(_Frame, frozen=True, tag="job"):
    """The job: canonical bytes of a `protocol.records.Job`, whose hash the lease names."""

    job: Annotated[bytes, msgspec.Meta(max_length=JOB_SIZE_MAX)]


class OutputTold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One output of the job, in its order."""

    path: Annotated[str, msgspec.Meta(max_length=PATH_MAX)]
    manifest: Hash | None
    """None: there was nothing at that place."""
    size: Number


class StatusTold(_Frame, frozen=True, kw_only=True, tag="status"):
    """How the lease stands, by its provider. Told after every change, and each voucher interval while it runs."""

    phase: LeasePhase
    outcome: Annotated[str, msgspec.Meta(max_length=64)] = ""
    detail: Note = ""
    has_job: bool = False
    staged: Annotated[tuple[OutputIndex, ...], msgspec.Meta(max_length=LIST_MAX)] = ()
    """Inputs that are in their place."""
    started_at: MillisField = 0
    ended_at: MillisField = 0
    metered_ms: DurationMs = 0
    frozen_ms: DurationMs = 0
    """All the time that the job stood still, a present standstill included."""
    voucher_number: Number = 0
    exit_status: ExitStatus = -1
    job_end: Annotated[str, msgspec.Meta(max_length=64)] = ""
    outputs: Annotated[tuple[OutputTold, ...], msgspec.Meta(max_length=LIST_MAX)] | None = None
    """None until they are known, after the job's end."""
    kept_until: MillisField = 0
    usage: Annotated[dict[Annotated[str, msgspec.Meta(max_length=64)], Number], msgspec.Meta(max_length=32)] = {}

    def __post_init__(self) -> None:
        if self.outcome not in ("", COMPLETED, *FailReason):
            raise ValueError(f"{self.outcome!r} is no outcome")


class VoucherSent(_Frame, frozen=True, tag="voucher"):
    """The newest voucher, sealed."""

    voucher: Annotated[bytes, msgspec.Meta(max_length=ENVELOPE_SIZE_MAX)]


class VoucherTaken(_Frame, frozen=True, tag="voucher_taken"):
    """The provider has stored this voucher, and honours it."""

    number: Number
    amount: AmountField


class CancelAsked(_Frame, frozen=True, tag="cancel"):
    """The renter wants the job to end. Its outputs are collected all the same."""

    reason: Literal["cancelled", "staging_failed", "disk_full", "meters_diverged"]
    detail: Note = ""


class OutputsCollected(_Frame, frozen=True, tag="collected"):
    """The renter has verified every output (in the job's order; None where there is none) and both logs."""

    manifests: Annotated[tuple[Hash | None, ...], msgspec.Meta(max_length=LIST_MAX)]


class Goodbye(_Frame, frozen=True, tag="goodbye"):
    """The sender closes the tunnel, and why."""

    detail: Note = ""


class LogData(_Frame, frozen=True, tag="log_data"):
    """Some of the job's output. An offset above the end of what came before: bytes between were dropped."""

    source: LogSource
    offset: Number
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=LOG_DATA_MAX)]


class LogEnded(_Frame, frozen=True, tag="log_ended"):
    """The job is over, and this is how much it has written."""

    stdout: Number
    stderr: Number


class ShellInput(_Frame, frozen=True, tag="shell_input"):
    """Bytes for the command's standard input; empty: its end."""

    data: Annotated[bytes, msgspec.Meta(max_length=SHELL_DATA_MAX)]


class ShellOutput(_Frame, frozen=True, tag="shell_output"):
    """Bytes that the command has written."""

    source: LogSource
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=SHELL_DATA_MAX)]


class ShellEnded(_Frame, frozen=True, tag="shell_ended"):
    """The command is over, or could not be started: then `detail` says why, and the status is -1."""

    status: ExitStatus
    detail: Note = ""


Opener: TypeAlias = ControlOpened | BulkOpened | LogOpened | ShellOpened
ToProvider: TypeAlias = Hello | JobSubmitted | VoucherSent | CancelAsked | OutputsCollected | Goodbye
ToRenter: TypeAlias = Hello | StatusTold | VoucherTaken | Goodbye
FromLog: TypeAlias = LogData | LogEnded
FromShell: TypeAlias = ShellOutput | ShellEnded
Frame: TypeAlias = Opener | ToProvider | ToRenter | FromLog | ShellInput | FromShell

_FRAME: Any = Frame
"""As msgspec takes it: to a type checker a union is no type."""


def encode(frame: Frame) -> bytes:
    """Return the frame as it travels, length included."""
    body = codec.encode(frame)
    if len(body) > FRAME_SIZE_MAX:
        raise ValueError(f"a frame of {len(body)} bytes")
    return LENGTH.pack(len(body)) + body


def size_untrusted(header: bytes) -> int:
    """Return the size of the body after a frame's 4-byte length; raise MalformedRecord if it is too large."""
    (size,) = LENGTH.unpack(header)
    if size > FRAME_SIZE_MAX:
        raise MalformedRecord(f"a frame of {size} bytes is more than the {FRAME_SIZE_MAX} allowed")
    return int(size)


def parse_untrusted(body: bytes) -> Frame:
    """Return the frame that `body` (without its length) is; raise MalformedRecord when it is none."""
    frame: Frame = codec.convert_untrusted(codec.decode_tree_untrusted(body, FRAME_SIZE_MAX), _FRAME)
    return frame
