"""What `provider_lease` is about: the provider's lease, what happens to it, and what it asks for.

Refuses to hold transitions.
"""

from typing import TypeAlias

import msgspec

from protocol.frames import OutputTold
from protocol.machines.lease import FailReason, LeaseFacts, LeasePhase
from protocol.records.fields import PERMILLE
from protocol.units import Amount

# --- state --------------------------------------------------------------------------------------------------


class ProviderLease(msgspec.Struct, frozen=True, kw_only=True):
    """The lease. Times are ms of the lease's clock."""

    facts: LeaseFacts
    phase: LeasePhase = LeasePhase.SIGNED
    outcome: str = ""
    detail: str = ""
    began_at: int
    heard_at: int
    """When the renter was last heard of before the job ran: tunnel or staging progress."""
    is_connected: bool = False
    peer_generation: int = 0
    faults: int = 0
    inputs: int | None = None
    """Number of inputs; None before the job came."""
    staged: tuple[int, ...] = ()
    time_limit_ms: int = 0
    started_at: int | None = None
    ended_at: int | None = None
    over_at: int | None = None
    frozen_ms: int = 0
    """Of standstills that are over."""
    frozen_at: int | None = None
    kill_at: int | None = None
    was_killed: bool = False
    voucher: bytes = b""
    voucher_number: int = 0
    voucher_amount: int = 0
    exit_status: int = -1
    job_end: str = ""
    outputs: tuple[OutputTold, ...] | None = None
    has_left: bool = False
    """The keeper has stopped to wait for its daemon."""

    @property
    def kept_until(self) -> int | None:
        """Until when results wait for their renter; None before the job's end."""
        return None if self.ended_at is None else self.ended_at + self.facts.terms.retention_ms

    def frozen_total_ms(self, now: int) -> int:
        """Return how long the job stood still, a present standstill included."""
        present = 0 if self.frozen_at is None else max(0, now - self.frozen_at)
        return self.frozen_ms + present

    def metered_ms(self, now: int) -> int:
        """Return the job time that is to be paid for."""
        if self.started_at is None:
            return 0
        end = now if self.ended_at is None else self.ended_at
        return max(0, end - self.started_at - self.frozen_total_ms(end))

    def owed(self, now: int) -> int:
        """Return what is owed: the cost of the metered time less the refund, at most the highest voucher."""
        amount = self.facts.cost(self.metered_ms(now))
        if self.outcome == FailReason.INTERRUPTED:
            amount = Amount(amount * (PERMILLE - self.facts.terms.refund_permille) // PERMILLE)
        return min(amount, self.voucher_amount)


# --- events -------------------------------------------------------------------------------------------------


class TunnelOpened(msgspec.Struct, frozen=True):
    """The renter's keeper has said hello."""

    generation: int


class TunnelLost(msgspec.Struct, frozen=True):
    """No tunnel is left."""


class JobArrived(msgspec.Struct, frozen=True):
    """The renter has sent the job; its hash is the lease's."""

    inputs: int
    time_limit_ms: int


class StagingMoved(msgspec.Struct, frozen=True):
    """Bytes of an input have arrived."""


class InputPlaced(msgspec.Struct, frozen=True):
    """An input was verified and is in its place."""

    index: int


class InputFailed(msgspec.Struct, frozen=True):
    """An input can't be stored."""

    reason: FailReason
    detail: str


class JobStarted(msgspec.Struct, frozen=True):
    """The job's first process runs."""


class SandboxFailed(msgspec.Struct, frozen=True):
    """The sandbox could not be started; nothing runs."""

    detail: str


class JobEnded(msgspec.Struct, frozen=True):
    """The job's processes are gone, all of them."""

    status: int
    how: str


class SuspendSeen(msgspec.Struct, frozen=True):
    """The machine slept; the job stood still."""

    length_ms: int


class VoucherReceived(msgspec.Struct, frozen=True):
    """The renter has sent a voucher: a sealed envelope, not opened yet."""

    data: bytes


class CancelAsked(msgspec.Struct, frozen=True):
    """The renter, the owner or the daemon wants the job to end."""

    reason: FailReason
    detail: str = ""
    notice_ms: int | None = None
    """From SIGTERM to the kill; None: what the terms give that reason."""


class OutputsListed(msgspec.Struct, frozen=True):
    """The job's outputs were read."""

    outputs: tuple[OutputTold, ...]
    detail: str = ""


class OutputsCollected(msgspec.Struct, frozen=True):
    """The renter says that it has verified these outputs."""

    manifests: tuple[bytes | None, ...]


class PeerBroke(msgspec.Struct, frozen=True):
    """The renter broke the protocol."""

    detail: str


class KeeperRestarted(msgspec.Struct, frozen=True):
    """This keeper found a lease that another had begun; what ran under it was killed."""


class SettleAsked(msgspec.Struct, frozen=True):
    """The daemon has closed the accounts."""


class Ticked(msgspec.Struct, frozen=True):
    """Time has passed."""


Event: TypeAlias = (
    TunnelOpened
    | TunnelLost
    | JobArrived
    | StagingMoved
    | InputPlaced
    | InputFailed
    | JobStarted
    | SandboxFailed
    | JobEnded
    | SuspendSeen
    | VoucherReceived
    | CancelAsked
    | OutputsListed
    | OutputsCollected
    | PeerBroke
    | KeeperRestarted
    | SettleAsked
    | Ticked
)

# --- effects ------------------------------------------------------------------------------------------------


class StartJob(msgspec.Struct, frozen=True):
    """Start the job in its sandbox."""


class TerminateJob(msgspec.Struct, frozen=True):
    """Send SIGTERM to the job's processes."""


class KillJob(msgspec.Struct, frozen=True):
    """Kill the job; when it is just being started, as soon as it has been."""


class FreezeJob(msgspec.Struct, frozen=True):
    """Stop the job's processes."""


class ThawJob(msgspec.Struct, frozen=True):
    """Let them go on."""


class ListOutputs(msgspec.Struct, frozen=True):
    """Read the job's outputs into manifests."""


class AcknowledgeVoucher(msgspec.Struct, frozen=True):
    """Tell the renter that its voucher is stored."""

    number: int
    amount: int


class EraseScratch(msgspec.Struct, frozen=True):
    """Erase the job's files. Idempotent."""


class DeleteKeys(msgspec.Struct, frozen=True):
    """Delete the lease's keys. Idempotent."""


class Leave(msgspec.Struct, frozen=True):
    """End the keeper."""


Effect: TypeAlias = (
    StartJob
    | TerminateJob
    | KillJob
    | FreezeJob
    | ThawJob
    | ListOutputs
    | AcknowledgeVoucher
    | EraseScratch
    | DeleteKeys
    | Leave
)


class Step(msgspec.Struct, frozen=True):
    """The lease after an event, and what to do, in order, once that is durable."""

    lease: ProviderLease
    effects: tuple[Effect, ...] = ()
