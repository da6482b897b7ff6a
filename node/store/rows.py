"""The rows of the database, one struct a table: field names are column names, the first field is the key.

Amounts are nano-credits, times Unix ms, ids bytes. Columns that hold a state machine or a record hold its
canonical CBOR.
"""

import msgspec


class ListingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One listing that this provider sells, and its auction."""

    name: str
    auction: bytes
    """`protocol.machines.auction_types.Auction`."""
    offer: bytes | None = None
    """The newest offer or withdrawal, as gossiped."""


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """One job of a renter on this machine."""

    id: str
    name: str
    uid: int
    """Whose job it is."""
    gid: int
    state: str
    spec: bytes
    """`node.market.jobspec.JobSpec`: what to buy and what to run."""
    purchase: bytes
    """`protocol.machines.purchase.Purchase`."""
    lease: bytes | None = None
    outcome: str = ""
    detail: str = ""
    created_at: int
    ended_at: int = 0


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One lease, from award to settlement; both roles."""

    lease: bytes
    role: str
    state: str
    """`node.market.leases.LeaseState`."""
    peer: bytes
    listing: str
    job_id: str
    """The renter's job; "" on the provider's side."""
    bid_id: bytes
    award_id: bytes
    countersignature_id: bytes | None = None
    grant_id: bytes | None = None
    receipt_id: bytes | None = None
    devices: bytes
    """The chain keys, concatenated (32 bytes each)."""
    job_hash: bytes
    price: int
    quantity: int
    max_spend: int
    until: int
    simulated: bool
    salt: bytes
    uid: int
    gid: int
    """Whom the keeper runs as."""
    status: bytes = b""
    """The keeper's last `LeaseStatus`."""
    outcome: str = ""
    created_at: int
    released_at: int = 0
    """Provider: when its devices were free again; 0 before."""
    ended_at: int = 0


class LeaseSecretRow(msgspec.Struct, frozen=True, kw_only=True):
    """The private keys of a lease, from bid or award until its keeper's directory holds them."""

    lease: bytes
    tunnel: bytes
    voucher: bytes | None = None
    expires_at: int


class RecordRow(msgspec.Struct, frozen=True, kw_only=True):
    """A signed record that matters later: evidence, or the answer to a repeated message."""

    id: bytes
    kind: str
    signer: bytes
    lease: bytes | None
    reply_to: bytes | None
    """The record that this one answers."""
    data: bytes
    """The envelope."""
    at: int


class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """A message that must reach a peer, or expire trying."""

    number: int
    peer: bytes
    kind: str
    record_id: bytes
    data: bytes
    expires_at: int


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A peer that we know by name, by credit, or by where it was."""

    node: bytes
    label: str = ""
    credit_limit: int | None = None
    """None: it shares the strangers' bucket (or has the pool's default)."""
    addresses: str = ""
    """Multiaddrs, space-separated."""
    seen_at: int = 0


class EntryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the ledger: what a receipt or a settlement changed between a peer and us."""

    id: bytes
    """Of the receipt or settlement."""
    peer: bytes
    kind: str
    amount: int
    """Positive: the peer owes us more; negative: we owe the peer more."""
    lease: bytes | None
    simulated: bool
    confirmed: bool
    """Both signatures are there."""
    note: str
    at: int
