"""What a peer, or a record of a peer, can do wrong.

Refuses to describe faults of the local machine: those are `node.errors`. Every class has a stable number in
1000-1999; the docstring is the sentence a user reads.
"""

from typing import ClassVar


class ProtocolError(Exception):
    """A peer broke the protocol."""

    code: ClassVar[int] = 1000


class MalformedRecord(ProtocolError):
    """The bytes are not a well-formed record."""

    code: ClassVar[int] = 1001


class BadSignature(ProtocolError):
    """The signature does not belong to the record and its signer."""

    code: ClassVar[int] = 1002


class WrongKind(ProtocolError):
    """The record is well formed, but not of the kind that belongs here."""

    code: ClassVar[int] = 1003


class IllegalTransition(ProtocolError):
    """The event cannot happen in this state."""

    code: ClassVar[int] = 1004


class BadVoucher(ProtocolError):
    """The voucher decreases, passes its cap, or belongs to another lease."""

    code: ClassVar[int] = 1005


class BadManifest(ProtocolError):
    """The manifest lies about its size, its hashes or its paths."""

    code: ClassVar[int] = 1006
