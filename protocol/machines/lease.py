"""The words that both sides of a lease share: its phases, and the reasons why one fails.

Refuses to hold transitions: `provider_lease` and `renter_lease` do. Their clock is the lease's own: Unix ms when
the lease began, and from then on what boot time adds to it, so that a set clock moves no deadline.
"""

import enum

import msgspec

from protocol.records.offer import Terms
from protocol.units import Amount, Price, cost

COMPLETED = "completed"
"""A lease's outcome when its job ran to an end of its own; otherwise the outcome is a `FailReason`."""


class LeasePhase(enum.StrEnum):
    """Where a lease is, from the moment that both have signed it."""

    SIGNED = "signed"
    """The keeper is up; no tunnel yet."""
    CONNECTED = "connected"
    """The tunnel is open; the job is being sent."""
    STAGING = "staging"
    """Inputs are travelling."""
    RUNNING = "running"
    FROZEN = "frozen"
    """The job stands still, because vouchers lag; it is thawed when they come, and ended after the grace."""
    INTERRUPTING = "interrupting"
    """The job was told to end (SIGTERM), and is killed at a deadline."""
    COLLECTING = "collecting"
    """The job is over and its devices are free; the outputs wait for, or travel to, the renter."""
    COLLECTED = "collected"
    """The renter has verified its outputs (or there were none); the accounts may be settled."""
    FAILED = "failed"
    """The lease is over without collected outputs."""
    SETTLED = "settled"
    """The daemon has what it needs: keys and scratch are gone, and the keeper exits."""


JOB_PHASES = frozenset({LeasePhase.RUNNING, LeasePhase.FROZEN, LeasePhase.INTERRUPTING})
"""Phases in which processes of the job may exist: its devices are taken."""
OVER_PHASES = frozenset({LeasePhase.COLLECTED, LeasePhase.FAILED, LeasePhase.SETTLED})
"""Phases in which nothing that is owed or stored will change any more."""
AFTER_JOB_PHASES = OVER_PHASES | {LeasePhase.COLLECTING}
"""Phases after the job: its processes are gone, and what is owed is final but for late vouchers."""


class FailReason(enum.StrEnum):
    """Why a lease did not complete."""

    CANCELLED = "cancelled"
    """The renter cancelled it."""
    INTERRUPTED = "interrupted"
    """The owner took the machine back."""
    SHUTDOWN = "shutdown"
    """The provider's machine or daemon is going down."""
    TIME_LIMIT = "time_limit"
    """The job passed its own time limit."""
    LEASE_OVER = "lease_over"
    """The lease's end came first."""
    RENTER_AWAY = "renter_away"
    """Nothing was heard of the renter, or no voucher came, for longer than the grace."""
    PROVIDER_AWAY = "provider_away"
    """Nothing was heard of the provider."""
    UNPAID = "unpaid"
    """The cap of the lease is spent: no voucher can pay for more."""
    METERS_DIVERGED = "meters_diverged"
    """The two meters differ by more than 1% and 2 s."""
    STAGING_FAILED = "staging_failed"
    """An input could not be read, sent or stored."""
    DISK_FULL = "disk_full"
    """There was no room for inputs or outputs."""
    SANDBOX_FAILED = "sandbox_failed"
    """The sandbox could not be started."""
    COLLECTING_FAILED = "collecting_failed"
    """The outputs could not be read, sent or stored."""
    RETENTION_PASSED = "retention_passed"
    """The outputs were not fetched in time, and are erased."""
    KEEPER_DIED = "keeper_died"
    """The provider's keeper died while the job ran; the job was killed."""
    PEER_FAULT = "peer_fault"
    """The other side broke the protocol."""


PROVIDER_FAULTS = frozenset(
    {
        FailReason.INTERRUPTED,
        FailReason.SHUTDOWN,
        FailReason.PROVIDER_AWAY,
        FailReason.SANDBOX_FAILED,
        FailReason.KEEPER_DIED,
    }
)
"""What a renter may try again elsewhere without having done anything wrong itself."""


class LeaseFacts(msgspec.Struct, frozen=True):
    """What both sides have signed about a lease: the constants of its machines."""

    lease: bytes
    network: bytes
    voucher_key: bytes
    price: int
    quantity: int
    max_spend: int
    until: int
    terms: Terms

    @property
    def rate(self) -> int:
        """Nano-credits per second of job time, all devices together."""
        return self.price * self.quantity

    @property
    def grace_ms(self) -> int:
        """How long either side may be unheard of before that ends what can't go on without it."""
        return max(self.terms.grace_ms, GRACE_MIN_MS)

    def cost(self, metered_ms: int) -> Amount:
        """Return what `metered_ms` of job time costs, in nano-credits, rounded down."""
        return cost(Price(self.price), self.quantity, metered_ms)

    def paid_ms(self, amount: int) -> int | None:
        """Return the longest job time that `amount` pays for; None: any, since it is free."""
        if not self.rate:
            return None
        # The largest t with rate * t // 1000 <= amount.
        return (amount * 1000 + 999) // self.rate


GRACE_MIN_MS = 5_000
"""Shorter than this, a reconnection would count as an absence."""
CONNECT_MAX_MS = 120_000
"""How long a renter may take from the grant to its first tunnel: its devices are held for it meanwhile."""
FAULTS_MAX = 8
"""How often a peer may break the protocol before the lease ends; each time the tunnel is closed."""
