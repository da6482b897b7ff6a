"""peers.*: who is out there, and how far each is trusted with credit."""

from typing import Annotated

import msgspec

from node.rpc.fields import Amount, Count, Millis, Multiaddr, PeerId, SignedAmount
from node.rpc.method import Access, Call, Nothing, Params


class PeerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A peer."""

    node: PeerId
    address: str
    """"" when it is not connected and none is known."""
    connected: bool
    inbound: bool
    latency_ms: int | None
    agent: str
    credit_limit: Amount | None
    """What it may owe us; None: it is a stranger, and shares the strangers' common limit."""
    balance: SignedAmount
    """What it owes us; negative: what we owe it."""


class PeersListResult(msgspec.Struct, frozen=True, kw_only=True):
    """Connected ones first."""

    peers: tuple[PeerEntry, ...]


class ConnectParams(Params, frozen=True, kw_only=True):
    """Where to."""

    address: Annotated[str, msgspec.Meta(min_length=1, max_length=2048, pattern=r"^[\x21-\x7e]*$")]
    """A multiaddr ending in /p2p/<peer id>, or an invitation token."""


class ConnectResult(msgspec.Struct, frozen=True, kw_only=True):
    """Connected; the address is remembered and dialled again after a restart."""

    node: PeerId
    address: str


class InviteResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a friend gives to `gpunode peers connect`. In a keyed network the token contains the key."""

    token: str
    network: str
    addresses: tuple[Multiaddr, ...]
    secret: bool
    """Whether the token must be kept from strangers."""


class PeerParams(Params, frozen=True, kw_only=True):
    """Which peer."""

    peer: Annotated[str, msgspec.Meta(min_length=2, max_length=64)]
    """A peer id, or a unique prefix or suffix of one."""


class PeerOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A listing of that peer."""

    listing: str
    model: str
    free: Count
    simulated: bool


class PeerDetail(msgspec.Struct, frozen=True, kw_only=True):
    """All about a peer."""

    entry: PeerEntry
    addresses: tuple[str, ...]
    offers: tuple[PeerOffer, ...]
    receipts: Count
    """Accepted receipts with it, either way."""
    earned: Amount
    """From it, by accepted receipts."""
    spent: Amount
    """On it, by accepted receipts."""
    exposure: Amount
    """What it may still come to owe us by live leases, beyond the balance."""
    misdeeds: tuple[str, ...]
    """What it did wrong lately, newest first."""
    last_seen_at: Millis | None


class LimitParams(Params, frozen=True, kw_only=True):
    """How much a peer may owe us."""

    peer: Annotated[str, msgspec.Meta(min_length=2, max_length=64)]
    credit_limit: Amount | None
    """None: a stranger again."""


class LimitResult(msgspec.Struct, frozen=True, kw_only=True):
    """The peer after the change."""

    entry: PeerEntry


LIST = Call(name="peers.list", params=Nothing, result=PeersListResult, doc="List the peers.")
CONNECT = Call(
    name="peers.connect",
    params=ConnectParams,
    result=ConnectResult,
    doc="Connect to a peer by address or invitation.",
    access=Access.ADMIN,
)
INVITE = Call(
    name="peers.invite",
    params=Nothing,
    result=InviteResult,
    doc="Make an invitation token for a friend.",
    access=Access.ADMIN,
)
SHOW = Call(name="peers.show", params=PeerParams, result=PeerDetail, doc="Show all about a peer.")
LIMIT = Call(
    name="peers.limit",
    params=LimitParams,
    result=LimitResult,
    doc="Set how much a peer may owe us.",
    access=Access.ADMIN,
)
METHODS = (LIST, CONNECT, INVITE, SHOW, LIMIT)
