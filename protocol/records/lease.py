"""The entries that a lease makes in its devices' hash chains: grant and release.

Links are content ids (`protocol.envelope.content_id`), which exist before the signature does.
"""

from typing import Annotated

import msgspec

from protocol import codec
from protocol.envelope import ENVELOPE_SIZE_MAX, record
from protocol.identity import HASH_SIZE, hash_bytes
from protocol.records.fields import (
    DEVICES_MAX,
    Address,
    Hash,
    Key,
    LeaseId,
    MillisField,
    Note,
    Number,
    PriceField,
)

GENESIS = bytes(HASH_SIZE)
"""The previous hash of a chain's first entry."""


class ChainEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device's link: its chain, the entry's number in it, and the content id of the entry before."""

    key: Hash
    number: Number
    previous: Hash


Entries = Annotated[tuple[ChainEntry, ...], msgspec.Meta(min_length=1, max_length=DEVICES_MAX)]


@record("grant")
class Grant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lease begins: one record lists all its devices. Renter, price and job are committed, not shown."""

    lease: LeaseId
    entries: Entries
    epoch: Number
    countersignature_id: Hash
    commitment: Hash
    starts_at: MillisField
    until: MillisField
    simulated: bool


@record("release")
class Release(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lease has left its devices."""

    lease: LeaseId
    entries: Entries
    epoch: Number
    released_at: MillisField
    reason: Note


@record("grant_delivery")
class GrantDelivery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The grant as its renter gets it: with the salt of its commitment, and where the keeper listens."""

    grant: Annotated[bytes, msgspec.Meta(max_length=ENVELOPE_SIZE_MAX)]
    salt: Hash
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=8)]
    """UDP host:port addresses of the provider's keeper, best first; IPv6 hosts in brackets."""


class CommittedTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a grant's commitment hides from third parties."""

    salt: Hash
    renter: Key
    price: PriceField
    job_hash: Hash


def grant_commitment(terms: CommittedTerms) -> bytes:
    """Return the 32-byte salted commitment of a grant to its renter, price and job."""
    return hash_bytes(b"gpunode/1 grant commitment" + codec.encode(terms))


def chain_key(provider: bytes, device_uuid: str) -> bytes:
    """Return the 32-byte key of the grant chain of a provider's physical GPU (a MIG instance's parent)."""
    return hash_bytes(b"gpunode/1 chain key" + provider + device_uuid.encode())
