"""The small interfaces between the rooms of the house.

`node.market`, `node.daemon` and `node.keeper` know these; the siblings below them (`swarm`, `tunnel`, `jobs`,
`sandbox`, `devices`, `store`, `ledger`) implement them and never import each other. Nothing here does anything.
"""

import enum
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import trio

from protocol.identity import NodeId
from protocol.units import Millis

# --- time ---------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """The two clocks. Wall time dates records; boot time (it counts suspend) measures lengths."""

    def now(self) -> Millis:
        """Return Unix time in ms."""

    def boot_ms(self) -> int:
        """Return ms since boot, suspend included (CLOCK_BOOTTIME)."""


TaskStatus: TypeAlias = Any
"""What `trio.Nursery.start` hands in: `trio.TaskStatus`, which outdated stubs of a dependency hide from mypy."""


# --- swarm --------------------------------------------------------------------------------------------------


class GossipVerdict(enum.Enum):
    """What a validator says of a gossiped record: pass it on, drop it silently, or hold it against the sender."""

    ACCEPT = "accept"
    IGNORE = "ignore"
    REJECT = "reject"


class Peer(msgspec.Struct, frozen=True):
    """A connected (or lately connected) peer."""

    node: NodeId
    address: str
    connected: bool
    latency_ms: int | None
    """Round trip by our own ping; None before the first."""
    agent: str
    inbound: bool


GossipHandler = Callable[[NodeId, bytes], GossipVerdict]
"""(forwarder, envelope bytes) -> verdict. Must be quick and must not block."""
RequestHandler = Callable[[NodeId, bytes], Awaitable[bytes]]
"""(caller, request bytes) -> reply bytes. Raising ends that stream and counts against the peer, unless it is a
NodeError: a fault of this machine."""
ConnectHandler = Callable[[NodeId], Awaitable[None]]


class Network(Protocol):
    """The swarm as the market sees it."""

    @property
    def node(self) -> NodeId:
        """Our own id."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs at which we listen, each ending in /p2p/<our peer id>."""

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip `data` (at most 64 KiB) under `topic`. Best effort; never raises for absent peers."""

    def on_gossip(self, topic: str, handler: GossipHandler) -> None:
        """Subscribe to `topic`. One handler a topic; call before `run`'s ready or at any time after."""

    def on_request(self, name: str, handler: RequestHandler) -> None:
        """Answer requests of protocol `name` (a short path such as "trade/1")."""

    def on_connect(self, handler: ConnectHandler) -> None:
        """Call `handler` in a task of its own whenever a peer has connected."""

    async def request(self, node: NodeId, name: str, data: bytes, *, timeout_ms: int = 10_000) -> bytes:
        """Send one request and return its reply (at most 1 MiB). Raises SwarmError, also on timeout."""

    async def connect(self, multiaddr: str) -> NodeId:
        """Dial a /ip4|ip6|dns.../tcp/.../p2p/... address. Raises SwarmError with the reason."""

    def add_address(self, node: NodeId, multiaddrs: tuple[str, ...]) -> None:
        """Remember where `node` may be dialled; `request` dials it when it is not connected."""

    def peers(self) -> tuple[Peer, ...]:
        """Return the peers known to this run, connected ones first."""

    def misdeeds(self, node: NodeId) -> tuple[str, ...]:
        """Return what `node` did wrong in this run, in words, the newest kind first."""


# --- tunnel -------------------------------------------------------------------------------------------------


class TunnelConnection(Protocol):
    """One mutually authenticated QUIC connection of a lease."""

    @property
    def peer_key(self) -> bytes:
        """The peer's proven 32-byte Ed25519 tunnel key."""

    @property
    def peer_address(self) -> str:
        """The peer's UDP address as "host:port"."""

    async def open_stream(self) -> trio.abc.HalfCloseableStream:
        """Open a bidirectional stream. Raises TunnelClosed."""

    async def accept_stream(self) -> trio.abc.HalfCloseableStream:
        """Wait for the peer's next bidirectional stream. Raises TunnelClosed."""

    async def wait_closed(self) -> str:
        """Wait until the connection has ended, and return why."""

    async def aclose(self, reason: str = "") -> None:
        """Close at once; idempotent."""


class TunnelEndpoint(Protocol):
    """One UDP socket: the provider's listens, the renter's dials."""

    @property
    def port(self) -> int:
        """The bound UDP port."""

    async def accept(self) -> TunnelConnection:
        """Wait for the next connection of an admitted peer (server)."""

    async def connect(
        self, host: str, port: int, peer_key: bytes, *, timeout_ms: int = 10_000
    ) -> TunnelConnection:
        """Dial, and return once the server has proven `peer_key` and accepted ours. Raises TunnelError."""


# --- sandbox ------------------------------------------------------------------------------------------------


class Probe(msgspec.Struct, frozen=True):
    """Whether a tier works on this machine, found out by running something in it."""

    tier: str
    works: bool
    proves: str = ""
    """What the probe showed, or why it failed."""
    hint: str = ""
    """The command that mends it."""


class SandboxLimits(msgspec.Struct, frozen=True):
    """Limits of one job's control group and file systems."""

    cpus_milli: int
    memory_mib: int
    pids: int
    shm_mib: int
    tmp_mib: int


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a tier needs to start one job."""

    name: str
    """Unique on this machine, [a-z0-9-], at most 40 characters; names the control group."""
    argv: tuple[str, ...]
    variables: dict[str, str]
    root: Path
    """The job's directory on the host (scratch), owned by `uid`; the job sees it writable at /job."""
    workdir: str
    """Below /job."""
    uid: int
    """Host uid and gid of the job's processes."""
    limits: SandboxLimits
    environment: str = "host"
    device_nodes: tuple[str, ...] = ()
    read_only_mounts: tuple[tuple[str, str], ...] = ()
    """(host path, path in the job): CDI mounts."""
    visible_devices: tuple[str, ...] = ()
    """GPU UUIDs, for NVIDIA_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES."""
    stdout: int
    """File descriptors, owned by the caller, that the job's output goes to."""
    stderr: int


class EndReason(enum.StrEnum):
    """Why a job's processes ended."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    OUT_OF_MEMORY = "out_of_memory"
    KILLED = "killed"


class JobEnd(msgspec.Struct, frozen=True):
    """How a job ended."""

    reason: EndReason
    status: int
    """Exit status 0-255; 128 + n for signal n."""


class RunningJob(Protocol):
    """A job in its sandbox."""

    async def wait(self) -> JobEnd:
        """Wait for the job's first process to end, then for its group to be empty (killing what is left)."""

    def signal(self, number: int) -> None:
        """Send a signal to the job's processes (not to the sandbox's own monitors); no-op once ended."""

    async def kill(self) -> None:
        """Kill everything in the job's control group and wait until it is empty. Idempotent."""

    def freeze(self) -> None:
        """Stop the job's processes where they are."""

    def thaw(self) -> None:
        """Let them go on."""

    def usage(self) -> dict[str, int]:
        """Return measured use: cpu_ms, memory_peak_mib (keys are absent when the kernel doesn't tell)."""

    async def execute(self, argv: tuple[str, ...], stdin: int, stdout: int, stderr: int) -> int:
        """Run another command inside the job's namespaces and limits; return its exit status."""


class Sandbox(Protocol):
    """One isolation tier."""

    @property
    def tier(self) -> str:
        """Its name in offers: "bubblewrap", "unsafe-process"."""

    async def probe(self) -> Probe:
        """Run something real in it. Never raises for a tier that does not work."""

    async def start(self, spec: SandboxSpec) -> RunningJob:
        """Start a job. Raises SandboxError; nothing is left behind when it does."""

    async def sweep(self, name: str) -> None:
        """Kill and remove whatever a dead keeper left under `name` (control groups). Idempotent."""


class Scratch(Protocol):
    """A lease's directory for the job, bounded in size."""

    @property
    def path(self) -> Path:
        """Where it is mounted."""

    def used_mib(self) -> int:
        """Return how much of it is used."""

    async def erase(self) -> None:
        """Unmount and remove it. Idempotent."""


OpenScratch = Callable[[Path, int, int], AbstractAsyncContextManager[Scratch]]
"""(lease directory, size in MiB, owner uid) -> scratch; opened again after a crash it is the same one."""


# --- devices ------------------------------------------------------------------------------------------------


class DeviceHealth(enum.StrEnum):
    """Whether a device may be sold."""

    OK = "ok"
    BUSY = "busy"
    """A process that is not ours uses it."""
    QUARANTINED = "quarantined"
    UNSUPPORTED = "unsupported"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as last measured."""

    uuid: str
    index: int
    vendor: str
    model: str
    memory_mib: int
    memory_used_mib: int
    compute_capability: int
    driver: str
    cuda: int
    pci: str
    utilisation_percent: int | None
    temperature_c: int | None
    power_w: int | None
    power_limit_w: int | None
    processes: tuple[int, ...]
    """Pids that use it, ours and foreign."""
    ecc_errors: int | None
    health: DeviceHealth
    problem: str = ""
    """Why it is not OK, and what to do."""
    simulated: bool = False
    nodes: tuple[str, ...] = ()
    """Device nodes that a job needs, such as /dev/nvidia0 and /dev/nvidiactl."""


class DeviceSource(Protocol):
    """Where devices come from: NVML, or the configuration's simulated ones."""

    async def poll(self) -> tuple[Device, ...]:
        """Measure every device now. One that fails is reported quarantined; this never raises."""

    def claim(self, uuid: str) -> None:
        """Lock the device for this daemon (flock). Raises DeviceBusy naming the holder."""

    def unclaim(self, uuid: str) -> None:
        """Give it back. Idempotent."""

    def problem(self) -> str:
        """Return why there are no devices ("no NVIDIA driver: ..."), or "" when the source works."""


# --- misc ---------------------------------------------------------------------------------------------------

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""
ByteStream = AsyncIterator[bytes]
