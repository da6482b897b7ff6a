"""What daemons say to each other about messages and about each other's memory."""

from typing import Annotated

import msgspec

from protocol.envelope import ENVELOPE_SIZE_MAX, record
from protocol.records.fields import Hash, MillisField, Note, Token

GRANTS_MAX = 32
GRANT_SIZE_MAX = 8192
"""Bytes of one grant's or release's envelope: room for the most devices of a lease."""


@record("ack")
class Ack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record with this id was taken (or had been taken before: delivery is idempotent)."""

    of: Hash


@record("refusal")
class Refusal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record with this id was not taken, and sending it again will not change that."""

    of: Hash
    reason: Token
    detail: Note = ""


@record("own_records_query")
class OwnRecordsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At start: "what is the newest of mine that you hold?" Answered only about the asker itself."""

    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


@record("counterparty_grants")
class CounterpartyGrants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer: the asker's newest offers, and its grants to the answerer and their releases, as received."""

    query_id: Hash
    answered_at: MillisField = 0
    """By the answerer's clock, so that both can tell whether theirs is off; 0: it does not say."""
    offers: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(max_length=ENVELOPE_SIZE_MAX)], ...], msgspec.Meta(max_length=4)
    ] = ()
    grants: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(max_length=GRANT_SIZE_MAX)], ...], msgspec.Meta(max_length=GRANTS_MAX)
    ] = ()
