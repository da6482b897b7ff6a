"""jobs.*: running something on somebody's GPU."""

import enum
from typing import Annotated

import msgspec

from node.rpc.fields import (
    IGNORE_PATTERNS_MAX,
    LIST_MAX,
    Amount,
    Argument,
    Command,
    Count,
    DurationMs,
    Hex32,
    IgnorePattern,
    JobName,
    JobRef,
    LeaseHex,
    LocalPath,
    Millis,
    Note,
    PeerId,
    Price,
    Quantity,
    RelativePath,
    Size,
    Token,
    VariableName,
)
from node.rpc.method import Access, Call, Params, Stream
from node.rpc.methods.market import Rejection, Requirement


class JobState(enum.StrEnum):
    """Where a job is."""

    BUYING = "buying"
    """No lease yet: waiting for an offer, for the price to fall, or for an answer to a bid."""
    AWARDED = "awarded"
    SIGNED = "signed"
    CONNECTED = "connected"
    STAGING = "staging"
    RUNNING = "running"
    INTERRUPTING = "interrupting"
    COLLECTING = "collecting"
    SETTLED = "settled"
    """Final: ran to an end, results are here, the receipt is accepted. `outcome` and `exit_status` say how."""
    FAILED = "failed"
    """Final: `outcome` is the reason. Cancelled jobs are here, too."""

    @property
    def is_final(self) -> bool:
        """Whether the job will not change any more."""
        return self in {JobState.SETTLED, JobState.FAILED}


OUTCOME_COMPLETED = "completed"
OUTCOME_TIME_LIMIT = "time_limit"
OUTCOME_CANCELLED = "cancelled"


class JobInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file or tree that was scanned by the caller, to be staged."""

    source: LocalPath
    destination: RelativePath
    manifest: Hex32
    size: Size
    """Bytes of content."""
    ignore: Annotated[tuple[IgnorePattern, ...], msgspec.Meta(max_length=IGNORE_PATTERNS_MAX)] = ()
    """What was left out: the tree is read again, with the same patterns, when it is sent."""


class JobOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tree to bring back: `remote` below the job's directory, `local` where it goes."""

    remote: RelativePath
    local: LocalPath


class RunParams(Params, frozen=True, kw_only=True):
    """A job. It runs, reads its inputs and writes its outputs as the caller's uid on this machine."""

    requirement: Requirement
    command: Command
    name: JobName = ""
    """Unique among the caller's unfinished jobs; "": the daemon makes one up."""
    environment: Token = "host"
    variables: Annotated[dict[VariableName, Argument], msgspec.Meta(max_length=1024)] = msgspec.field(
        default_factory=dict
    )
    workdir: Annotated[str, msgspec.Meta(max_length=1024, pattern=r"^([^/\x00][^\x00]*)?$")] = ""
    """Below the job's directory; "": that directory."""
    inputs: Annotated[tuple[JobInput, ...], msgspec.Meta(max_length=LIST_MAX)] = ()
    outputs: Annotated[tuple[JobOutput, ...], msgspec.Meta(max_length=LIST_MAX)] = ()
    time_limit_ms: DurationMs
    max_spend: Amount | None = None
    """Hard cap over all attempts; None: max price x devices x time limit."""
    prepay_ms: DurationMs = 0
    """How far vouchers may run ahead of the meter, so that the job goes on while this machine is away."""


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The job is stored, and buying has begun."""

    job: str
    name: str


class JobParams(Params, frozen=True, kw_only=True):
    """Which job."""

    job: JobRef


class JobsListParams(Params, frozen=True, kw_only=True):
    """Which jobs."""

    all_users: bool = False
    """Also those of others; administrators only."""
    unfinished: bool = False
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100


class JobEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A job in one line."""

    job: str
    name: str
    uid: int
    state: JobState
    detail: str
    """For people: what it waits for, or why it ended so."""
    outcome: str
    """"" until final; then "completed" or the reason: "time_limit", "cancelled", "keeper_died" ..."""
    exit_status: int | None
    """Of the command, 0-255, 128 + n for signal n; None until it ended, or when it never ran to an end."""
    command: tuple[str, ...]
    created_at: Millis
    started_at: Millis | None
    """When the command began to run (on the attempt that is now or was last)."""
    ended_at: Millis | None
    quantity: Quantity
    model: str
    """Of the leased devices; before a lease, as the requirement has it."""
    provider: PeerId | None
    price: Price | None
    """Of the lease; None before one."""
    cost: Amount
    """Metered so far, or as the receipt has it."""
    max_spend: Amount
    simulated: bool
    """Whether it runs on simulated devices."""


class JobAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One lease of a job."""

    lease: LeaseHex
    provider: PeerId
    model: str
    price: Price
    quantity: Quantity
    isolation: str
    simulated: bool
    signed_at: Millis
    until: Millis
    started_at: Millis | None
    ended_at: Millis | None
    metered_ms: DurationMs
    paid: Amount
    """The highest voucher signed."""
    cost: Amount
    outcome: str
    receipt: Hex32 | None
    """Record id of the accepted receipt."""


class OutputEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an output."""

    remote: str
    local: str
    collected: bool
    """Whether it is here, verified."""
    missing: bool
    """Whether the job ended without having made it."""
    manifest: Hex32 | None
    size: Size | None


class JobDetail(msgspec.Struct, frozen=True, kw_only=True):
    """All about a job."""

    entry: JobEntry
    requirement: Requirement
    environment: str
    variables: tuple[str, ...]
    """Names only: values may be private."""
    workdir: str
    inputs: tuple[JobInput, ...]
    outputs: tuple[OutputEntry, ...]
    time_limit_ms: DurationMs
    prepay_ms: DurationMs
    attempts: tuple[JobAttempt, ...]
    """Oldest first; at most one is live."""
    results_until: Millis | None
    """Until when the provider keeps results that are not here yet."""


class JobsListResult(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first."""

    jobs: tuple[JobEntry, ...]


class CancelResult(msgspec.Struct, frozen=True, kw_only=True):
    """The job as it is now; it may still be ending. Cancelling a finished job changes nothing."""

    job: str
    state: JobState
    changed: bool


class WhyParams(Params, frozen=True, kw_only=True):
    """A job, or a requirement: exactly one."""

    job: JobRef | None = None
    requirement: Requirement | None = None


class WhyStep(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to the job while buying or running."""

    at: Millis
    detail: Note


class WhyResult(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job waits, failed or matches nothing."""

    summary: str
    """One sentence that answers the question."""
    advice: str
    """What to do next; "" when nothing needs doing."""
    matching: Count
    """Offers that match now."""
    rejections: tuple[Rejection, ...]
    history: tuple[WhyStep, ...]
    """Oldest first; empty for a requirement."""


class LogStream(enum.StrEnum):
    """Which output of the command."""

    STDOUT = "stdout"
    STDERR = "stderr"


class LogsParams(Params, frozen=True, kw_only=True):
    """Which output, from where. Offsets count bytes that the command wrote."""

    job: JobRef
    streams: Annotated[tuple[LogStream, ...], msgspec.Meta(min_length=1, max_length=2)] = (
        LogStream.STDOUT,
        LogStream.STDERR,
    )
    stdout_offset: Size = 0
    stderr_offset: Size = 0
    follow: bool = False
    """Go on until the job is final and all of its output was sent; else end with what is here now."""


class LogChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of output, at most 64 KiB."""

    stream: LogStream
    offset: Size
    """Of the first byte of `data`. Head and tail are kept: a jump between chunks is output that was dropped."""
    data: bytes


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a transfer: inputs while staging, outputs while collecting."""

    done: Size
    total: Size


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The job changed. The first item tells how it is at the call."""

    at: Millis
    entry: JobEntry
    progress: JobProgress | None = None
    receipt: Hex32 | None = None


class ExecParams(Params, frozen=True, kw_only=True):
    """Another command for the sandbox of a running job. Its input is empty, and it has no terminal."""

    job: JobRef
    command: Command


class ExecPiece(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that the command has written, at most 64 KiB; the last item has its exit status instead."""

    stream: LogStream | None = None
    data: bytes = b""
    exit_status: int | None = None
    """0-255; 128 + n for signal n: the command ends with its job, and with this subscription."""


class FetchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outputs, and whether they are here; those that are not are being collected (watch jobs.events)."""

    job: str
    outputs: tuple[OutputEntry, ...]
    collecting: bool


RUN = Call(
    name="jobs.run", params=RunParams, result=RunResult, doc="Buy a lease for a job and run it; returns at once."
)
LIST = Call(
    name="jobs.list",
    params=JobsListParams,
    result=JobsListResult,
    doc="List jobs, newest first.",
    access=Access.OWNER,
)
SHOW = Call(name="jobs.show", params=JobParams, result=JobDetail, doc="Show all about a job.", access=Access.OWNER)
CANCEL = Call(
    name="jobs.cancel",
    params=JobParams,
    result=CancelResult,
    doc="End a job: outputs so far are collected, what it used is owed.",
    access=Access.OWNER,
)
WHY = Call(
    name="jobs.why",
    params=WhyParams,
    result=WhyResult,
    doc="Say why a job waits or failed, or why a requirement matches nothing.",
    access=Access.OWNER,
)
FETCH = Call(
    name="jobs.fetch",
    params=JobParams,
    result=FetchResult,
    doc="Collect a finished job's outputs that are not here yet.",
    access=Access.OWNER,
)
LOGS = Stream(
    name="jobs.logs", params=LogsParams, item=LogChunk, doc="Stream a job's output.", access=Access.OWNER
)
EXEC = Stream(
    name="jobs.exec",
    params=ExecParams,
    item=ExecPiece,
    doc="Run another command in a running job's sandbox, as its owner, and stream its output and exit status.",
    access=Access.OWNER,
)
EVENTS = Stream(
    name="jobs.events",
    params=JobParams,
    item=JobEvent,
    doc="Stream a job's changes until it is final.",
    access=Access.OWNER,
)
METHODS = (RUN, LIST, SHOW, CANCEL, WHY, FETCH, LOGS, EXEC, EVENTS)
