"""money.*: what is owed, why, and recording that it was paid."""

import enum
from typing import Annotated

import msgspec

from node.rpc.fields import (
    Amount,
    DurationMs,
    Hex32,
    JobRef,
    LeaseHex,
    Millis,
    Note,
    PeerId,
    Price,
    Quantity,
    SignedAmount,
)
from node.rpc.method import Access, Call, Nothing, Params


class SettlementState(enum.StrEnum):
    """How far a settlement is."""

    AWAITING_PEER = "awaiting_peer"
    """We signed; the other side has not agreed yet."""
    AWAITING_US = "awaiting_us"
    """The other side signed; accept it with money.accept."""
    ACCEPTED = "accepted"


class SettlementEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A statement that money changed hands outside."""

    settlement: Hex32
    peer: PeerId
    paid_by_us: bool
    amount: Amount
    balance_after: SignedAmount
    """What the peer owes us afterwards, by the signer's books; negative: we owe it."""
    reference: str
    state: SettlementState
    settled_at: Millis


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Our books with one peer."""

    peer: PeerId
    balance: SignedAmount
    """What it owes us; negative: we owe it."""
    earned: Amount
    """By accepted receipts."""
    spent: Amount
    settled_to_us: Amount
    settled_by_us: Amount
    exposure: Amount
    """What it may still come to owe us by live leases."""
    credit_limit: Amount | None
    """None: a stranger."""


class LedgerResult(msgspec.Struct, frozen=True, kw_only=True):
    """Every account with a movement, the largest balance first. Simulated leases count for nothing here."""

    accounts: tuple[Account, ...]
    owed_to_us: Amount
    owed_by_us: Amount
    strangers_exposure: Amount
    """All strangers together."""
    strangers_limit: Amount
    pending: tuple[SettlementEntry, ...]
    """Settlements that one side has not accepted yet."""


class ReceiptsParams(Params, frozen=True, kw_only=True):
    """Which receipts."""

    job: JobRef | None = None
    peer: Annotated[str, msgspec.Meta(min_length=2, max_length=64)] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100


class ReceiptEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A provider's signed account of a finished lease."""

    receipt: Hex32
    lease: LeaseHex
    job: str | None
    """Ours as renter; None where we were the provider."""
    peer: PeerId
    """The other side."""
    earned: bool
    """True: we were the provider."""
    outcome: str
    exit_status: int
    """-1 when the job never ran to an end."""
    started_at: Millis
    ended_at: Millis
    metered_ms: DurationMs
    price: Price
    quantity: Quantity
    amount: Amount
    simulated: bool
    accepted: bool
    """Whether it has both signatures."""


class ReceiptsResult(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first."""

    receipts: tuple[ReceiptEntry, ...]


class SettleParams(Params, frozen=True, kw_only=True):
    """A payment that was made outside, to be put on record with both signatures."""

    peer: Annotated[str, msgspec.Meta(min_length=2, max_length=64)]
    amount: Amount
    paid_by_us: bool
    """True: we paid the peer; false: it paid us."""
    reference: Note = ""
    """How it was paid: "bank transfer 2024-05-01"."""


class AcceptParams(Params, frozen=True, kw_only=True):
    """A pending settlement that the peer signed."""

    settlement: Annotated[str, msgspec.Meta(min_length=4, max_length=64, pattern="^[0-9a-f]+$")]
    """Its id, or a unique prefix."""


class SettleResult(msgspec.Struct, frozen=True, kw_only=True):
    """The settlement as it is now."""

    entry: SettlementEntry


LEDGER = Call(
    name="money.ledger", params=Nothing, result=LedgerResult, doc="Show who owes whom.", access=Access.ADMIN
)
RECEIPTS = Call(
    name="money.receipts",
    params=ReceiptsParams,
    result=ReceiptsResult,
    doc="List receipts: all for an administrator, else those of the caller's jobs.",
    access=Access.OWNER,
)
SETTLE = Call(
    name="money.settle",
    params=SettleParams,
    result=SettleResult,
    doc="Record a payment that was made outside; the peer is asked to agree.",
    access=Access.ADMIN,
)
ACCEPT = Call(
    name="money.accept",
    params=AcceptParams,
    result=SettleResult,
    doc="Agree with a settlement that the peer recorded.",
    access=Access.ADMIN,
)
METHODS = (LEDGER, RECEIPTS, SETTLE, ACCEPT)
