"""Every record that travels, one file a subject. Importing this package fills `protocol.envelope.KINDS`.

Records hold shapes and ranges only. Offers and withdrawals may carry unknown keys (they are gossip, and a
newer version may say more); everything that binds somebody refuses them, since nobody is bound by terms it
can't read.
"""

from protocol.records.job import Job, JobInput, Resources
from protocol.records.lease import ChainEntry, Grant, GrantDelivery, Release
from protocol.records.money import Receipt, ReceiptAcceptance, Settlement, SettlementAcceptance, Voucher
from protocol.records.offer import ChainHead, Curve, DeviceSpec, HostSpec, Offer, Terms, Withdrawal
from protocol.records.peer import Ack, CounterpartyGrants, OwnRecordsQuery, Refusal
from protocol.records.trade import Award, Bid, BidAck, BidRejected, Countersignature, RejectReason, Transcript

__all__ = [
    "Ack", "Award", "Bid", "BidAck", "BidRejected", "ChainEntry", "ChainHead", "CounterpartyGrants",
    "Countersignature", "Curve", "DeviceSpec", "Grant", "GrantDelivery", "HostSpec", "Job", "JobInput", "Offer",
    "OwnRecordsQuery", "Receipt", "ReceiptAcceptance", "Refusal", "RejectReason", "Release", "Resources",
    "Settlement", "SettlementAcceptance", "Terms", "Transcript", "Voucher", "Withdrawal",
]  # fmt: skip
