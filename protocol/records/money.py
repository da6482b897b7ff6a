"""What is owed and why: vouchers, receipts, settlements."""

from typing import Annotated

import msgspec

from protocol.envelope import record
from protocol.records.fields import (
    LIST_MAX,
    AmountField,
    DurationMs,
    Hash,
    Key,
    Label,
    LeaseId,
    MillisField,
    Note,
    Number,
    PriceField,
    Quantity,
    SignedAmountField,
)


@record("voucher")
class Voucher(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cumulative promise, signed by the lease's voucher key: `amount` in all, of which the highest counts."""

    lease: LeaseId
    number: Number
    amount: AmountField
    covers_ms: DurationMs
    """Job time that `amount` pays for, by the renter's meter; may run ahead (prepayment)."""


@record("receipt")
class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The provider's signed account of a finished lease."""

    lease: LeaseId
    provider: Key
    renter: Key
    countersignature_id: Hash
    job_hash: Hash
    outcome: Label
    """"completed", or the reason of a failed or ended lease (a `FailReason`)."""
    exit_status: Annotated[int, msgspec.Meta(ge=-1, le=255)]
    """The job's; 128 + n for signal n; -1 when the job never ran to an end."""
    started_at: MillisField
    ended_at: MillisField
    metered_ms: DurationMs
    price: PriceField
    quantity: Quantity
    amount: AmountField
    """What is owed: price x quantity x metered time, at most the highest voucher."""
    voucher_amount: AmountField
    voucher_number: Number
    outputs: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=LIST_MAX)] = ()
    """Manifests of the collected outputs, in the job's order."""
    simulated: bool


@record("receipt_acceptance")
class ReceiptAcceptance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The renter agrees with a receipt: with it, the receipt has both signatures."""

    receipt_id: Hash
    lease: LeaseId
    accepted_at: MillisField


@record("settlement")
class Settlement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One side's statement that `amount` was paid by payer to payee outside (the `manual` driver)."""

    payer: Key
    payee: Key
    amount: AmountField
    balance_after: SignedAmountField
    """What payer owes payee afterwards, as the signer's ledger has it."""
    reference: Note
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    settled_at: MillisField


@record("settlement_acceptance")
class SettlementAcceptance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The other side agrees with a settlement."""

    settlement_id: Hash
    accepted_at: MillisField
