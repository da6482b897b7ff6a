"""What `renter_lease` is about: the renter's lease, what happens to it, and what it asks for.

Refuses to hold transitions.
"""

from typing import TypeAlias

import msgspec

from protocol.frames import StatusTold
from protocol.machines.lease import FailReason, LeaseFacts, LeasePhase

# --- state --------------------------------------------------------------------------------------------------


class RenterLease(msgspec.Struct, frozen=True, kw_only=True):
    """The lease. Times are ms of the lease's clock."""

    facts: LeaseFacts
    inputs: int
    prepay_ms: int
    time_limit_ms: int
    phase: LeasePhase = LeasePhase.SIGNED
    outcome: str = ""
    detail: str = ""
    began_at: int
    lost_at: int
    """Since when there has been no tunnel, while there is none."""
    is_connected: bool = False
    peer_generation: int = 0
    faults: int = 0
    told: StatusTold | None = None
    """What the provider said last."""
    told_at: int = 0
    is_told: bool = False
    """It was said on the present tunnel: what it said before a cut may no longer hold."""
    idle_at: int
    """When the job was last known not to run yet: our own meter begins there at the earliest."""
    cancel: str = ""
    """Why we want the lease to end (a `FailReason`), "" while we don't."""
    voucher: bytes = b""
    """The highest voucher that was signed, sealed."""
    voucher_number: int = 0
    voucher_amount: int = 0
    covers_ms: int = 0
    fetched: tuple[int, ...] = ()
    """Outputs that are verified and in their place, or that don't exist."""
    waits: str = ""
    """Why an output can't be stored for now, "" while none was tried in vain."""
    has_logs: bool = False
    """Both logs are here to their end."""
    over_at: int | None = None
    has_left: bool = False

    def metered_ms(self, now: int) -> int:
        """Return the job time by the provider's last word, and what has passed since while the job runs."""
        if self.told is None:
            return 0
        return self.told.metered_ms + (max(0, now - self.told_at) if self.is_metering else 0)

    @property
    def is_metering(self) -> bool:
        """Whether the job runs, as far as is known."""
        return (
            self.told is not None
            and self.is_told
            and self.told.phase in (LeasePhase.RUNNING, LeasePhase.INTERRUPTING)
            and self.told.started_at > 0
        )

    def owed(self) -> int:
        """Return what is owed: the cost of the job time told last, at most the highest voucher."""
        metered_ms = 0 if self.told is None else self.told.metered_ms
        return min(self.facts.cost(metered_ms), self.voucher_amount)


# --- events -------------------------------------------------------------------------------------------------


class TunnelOpened(msgspec.Struct, frozen=True):
    """The provider's keeper has said hello."""

    generation: int


class TunnelLost(msgspec.Struct, frozen=True):
    """No tunnel is left."""


class ToldStatus(msgspec.Struct, frozen=True):
    """The provider has told how the lease stands."""

    status: StatusTold


class VoucherSigned(msgspec.Struct, frozen=True):
    """A voucher was signed as `SignVoucher` asked."""

    data: bytes
    number: int
    amount: int
    covers_ms: int


class InputFailed(msgspec.Struct, frozen=True):
    """An input can't be read, or the provider can't store it."""

    reason: FailReason
    detail: str


class OutputFetched(msgspec.Struct, frozen=True):
    """An output was verified and is in its place."""

    index: int
    manifest: bytes
    detail: str = ""
    """What the user should know about where it is."""


class LogsFetched(msgspec.Struct, frozen=True):
    """Both logs are here to their end."""


class FetchFailed(msgspec.Struct, frozen=True):
    """An output can't be stored for now; it is tried again."""

    detail: str


class CancelAsked(msgspec.Struct, frozen=True):
    """The user or the daemon wants the job to end."""

    reason: FailReason
    detail: str = ""


class PeerBroke(msgspec.Struct, frozen=True):
    """The provider broke the protocol."""

    detail: str


class ProviderDone(msgspec.Struct, frozen=True):
    """The provider has signed that the lease is over: it keeps nothing of it, and answers no tunnel any more."""

    reason: FailReason
    """Why the lease fails, if anything is missing here."""
    detail: str = ""


class KeeperRestarted(msgspec.Struct, frozen=True):
    """This keeper found a lease that another had begun."""


class SettleAsked(msgspec.Struct, frozen=True):
    """The daemon has closed the accounts."""


class Ticked(msgspec.Struct, frozen=True):
    """Time has passed."""


Event: TypeAlias = (
    TunnelOpened
    | TunnelLost
    | ToldStatus
    | VoucherSigned
    | InputFailed
    | OutputFetched
    | LogsFetched
    | FetchFailed
    | CancelAsked
    | PeerBroke
    | ProviderDone
    | KeeperRestarted
    | SettleAsked
    | Ticked
)

# --- effects ------------------------------------------------------------------------------------------------


class SendJob(msgspec.Struct, frozen=True):
    """Send the job."""


class SignVoucher(msgspec.Struct, frozen=True):
    """Sign this voucher, and report it as `VoucherSigned`."""

    number: int
    amount: int
    covers_ms: int


class SendVoucher(msgspec.Struct, frozen=True):
    """Send the newest voucher."""

    data: bytes


class SendCancel(msgspec.Struct, frozen=True):
    """Ask the provider to end the job."""

    reason: str
    detail: str


class SendCollected(msgspec.Struct, frozen=True):
    """Say that all outputs and logs are verified and here."""

    manifests: tuple[bytes | None, ...]


class DeleteKeys(msgspec.Struct, frozen=True):
    """Delete the lease's keys. Idempotent."""


class Leave(msgspec.Struct, frozen=True):
    """End the keeper."""


Effect: TypeAlias = SendJob | SignVoucher | SendVoucher | SendCancel | SendCollected | DeleteKeys | Leave


class Step(msgspec.Struct, frozen=True):
    """The lease after an event, and what to do, in order, once that is durable."""

    lease: RenterLease
    effects: tuple[Effect, ...] = ()
