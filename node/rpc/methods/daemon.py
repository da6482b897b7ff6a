"""daemon.*, doctor.*, rpc.*: the daemon itself."""

import enum
from typing import Any

import msgspec

from node.rpc.fields import Amount, Count, DurationMs, Millis, PeerId
from node.rpc.method import Access, Call, Nothing, Params
from node.rpc.methods.jobs import JobEntry
from node.rpc.methods.lend import DeviceEntry, LendState


class SwarmStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The peer-to-peer side."""

    network: str
    keyed: bool
    """Whether the network has a shared key (a private pool)."""
    addresses: tuple[str, ...]
    """Multiaddrs at which the daemon listens."""
    peers_connected: Count
    peers_known: Count
    offers_known: Count
    """Live offers of others in the order book."""


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon is doing, at a glance."""

    version: str
    node: PeerId
    pid: int
    started_at: Millis
    now: Millis
    uptime_ms: DurationMs
    """By the boot clock, suspend included."""
    socket: str
    state_dir: str
    config_path: str
    """"" when no file was read."""
    draining: bool
    swarm: SwarmStatus
    lending: LendState
    lending_detail: str
    """Why it is in that state, and until when; "" when there is nothing to say."""
    devices: tuple[DeviceEntry, ...]
    jobs: tuple[JobEntry, ...]
    """Unfinished jobs that the caller may see."""
    jobs_hidden: Count
    """Unfinished jobs of others, when the caller is no administrator."""
    earned: Amount
    """By accepted receipts, ever."""
    spent: Amount
    notes: tuple[str, ...]
    """What an administrator should know or mend, worst first: clock off, disk nearly full, unreachable."""


class StopMode(enum.StrEnum):
    """What becomes of leases when the daemon stops."""

    KEEP = "keep"
    """Stop the daemon only; keepers go on, and the next daemon finds them again."""
    DRAIN = "drain"
    """Sell nothing more, wait until every lease has ended, then stop."""
    NOW = "now"
    """End every lease now (jobs are cancelled, owners' terms apply), then stop."""


class StopParams(Params, frozen=True, kw_only=True):
    """How to stop."""

    mode: StopMode = StopMode.KEEP


class StopResult(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon is about to stop; the socket disappears when it has."""

    mode: StopMode
    leases: Count
    """Live leases at the time of the call, both sides together."""


class ConfigResult(msgspec.Struct, frozen=True, kw_only=True):
    """The effective configuration. Secrets read "<hidden>"."""

    path: str
    """The file that was read, or ""."""
    config: dict[str, Any]
    """As TOML would have it: tables are objects."""


class CheckStatus(enum.StrEnum):
    """How a check went."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding of the doctor."""

    name: str
    """A stable short name: "driver", "sandbox.bubblewrap", "clock"."""
    status: CheckStatus
    detail: str
    hint: str = ""
    """The command or the setting that mends it; "" when ok."""


class DoctorResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon found about itself."""

    checks: tuple[Check, ...]


class DiscoverResult(msgspec.Struct, frozen=True, kw_only=True):
    """An OpenRPC 1.3 document."""

    openrpc: str
    info: dict[str, Any]
    methods: list[dict[str, Any]]
    components: dict[str, Any]
    error: dict[str, Any] = msgspec.field(name="x-error")


STATUS = Call(
    name="daemon.status",
    params=Nothing,
    result=DaemonStatus,
    doc="Say what the daemon, its GPUs and jobs are doing.",
)
STOP = Call(
    name="daemon.stop",
    params=StopParams,
    result=StopResult,
    doc="Stop the daemon; leases go on, are waited for, or are ended.",
    access=Access.ADMIN,
)
CONFIG = Call(name="daemon.config", params=Nothing, result=ConfigResult, doc="Show the effective configuration.")
DOCTOR = Call(
    name="doctor.run",
    params=Nothing,
    result=DoctorResult,
    doc="Check what only the daemon can see: devices, tiers it probed, peers, clock against peers, database.",
)
DISCOVER = Call(
    name="rpc.discover", params=Nothing, result=DiscoverResult, doc="Return this interface as an OpenRPC document."
)
METHODS = (STATUS, STOP, CONFIG, DOCTOR, DISCOVER)
