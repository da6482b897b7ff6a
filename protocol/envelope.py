"""The envelope: who said what, in which network, signed.

`Envelope{kind, body, signer, signature}`. The signature covers
`"gpunode/1" || network id || kind || body`, each part after its 32-bit length. A record's id is the BLAKE3
hash of the whole envelope; its content id is the hash of kind and body alone (it can be computed before the
signature exists, so grant chains link by it). Mark a record as seen by id only *after* its signature was
verified: otherwise a copy with a bad signature would censor the original.
"""

from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from blake3 import blake3

from protocol import codec
from protocol.errors import BadSignature, MalformedRecord, WrongKind
from protocol.identity import KEY_SIZE, SIGNATURE_SIZE, NetworkId, NodeId, Signer, is_signature_valid

MAGIC = b"gpunode/1"
KIND_SIZE_MAX = 32

T = TypeVar("T")

ENVELOPE_SIZE_MAX = codec.RECORD_SIZE_MAX + 256


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A signed body. `body` is the canonical CBOR of a record of `kind`."""

    kind: Annotated[str, msgspec.Meta(min_length=1, max_length=KIND_SIZE_MAX)]
    body: Annotated[bytes, msgspec.Meta(max_length=codec.RECORD_SIZE_MAX)]
    signer: Annotated[bytes, msgspec.Meta(min_length=KEY_SIZE, max_length=KEY_SIZE)]
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_SIZE, max_length=SIGNATURE_SIZE)]


class Sealed(msgspec.Struct, Generic[T], frozen=True):
    """A record whose signature was verified: the record, its signer, its ids and its exact bytes."""

    record: T
    signer: NodeId
    id: bytes
    content_id: bytes
    data: bytes
    """The envelope as it travels."""


KINDS: dict[str, type[Any]] = {}
"""The closed set of kinds; filled by `protocol.records` when it is imported."""
_KIND_OF: dict[type[Any], str] = {}


def record(kind: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that registers a record type under `kind`."""

    def register(record_type: type[T]) -> type[T]:
        if kind in KINDS:
            raise ValueError(f"two records of kind {kind!r}")
        KINDS[kind] = record_type
        _KIND_OF[record_type] = kind
        return record_type

    return register


def kind_of(record_type: type[Any]) -> str:
    """Return the kind under which `record_type` travels; KeyError for a type that never travels."""
    return _KIND_OF[record_type]


def signing_bytes(network: NetworkId, kind: str, body: bytes) -> bytes:
    """Return the exact bytes that a signature covers."""
    parts = (MAGIC, network, kind.encode(), body)
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def content_id(kind: str, body: bytes) -> bytes:
    """Return the 32-byte hash of a record's kind and body, without its signature."""
    framed = len(kind.encode()).to_bytes(4, "big") + kind.encode() + body
    return blake3(framed, derive_key_context="gpunode/1 content id").digest()


def content_id_of(record: Any) -> bytes:  # noqa: ANN401 - any registered record
    """Return the content id of a record that is not signed yet."""
    return content_id(kind_of(type(record)), codec.encode(record))


def seal(record: T, signer: Signer, network: NetworkId) -> Sealed[T]:
    """Sign `record` and return it sealed.

    Raises KeyError for a type that is not a registered record, and ValueError when a field is out of its range or
    the record too large: peers would refuse it, and blame us.
    """
    kind = kind_of(type(record))
    body = codec.encode(record)
    try:
        codec.decode_untrusted(body, type(record))
    except MalformedRecord as error:
        raise ValueError(str(error)) from None
    signature = signer.sign(signing_bytes(network, kind, body))
    data = codec.encode(Envelope(kind, body, signer.public_key, signature))
    return Sealed(record, NodeId(signer.public_key), blake3(data).digest(), content_id(kind, body), data)


def open_untrusted(data: bytes, network: NetworkId) -> Sealed[Any]:
    """Decode and verify an envelope of a peer.

    Raises MalformedRecord (not a record), WrongKind (no such kind) or BadSignature; nothing else.
    """
    envelope = codec.decode_untrusted(data, Envelope, ENVELOPE_SIZE_MAX)
    record_type = KINDS.get(envelope.kind)
    if record_type is None:
        raise WrongKind(f"no record of kind {envelope.kind!r}")
    # Shape before signature: decoding is cheaper than verifying.
    record = _convert_body(envelope, record_type)
    message = signing_bytes(network, envelope.kind, envelope.body)
    if not is_signature_valid(envelope.signer, message, envelope.signature):
        raise BadSignature(f"bad signature on a record of kind {envelope.kind!r}, or another network's record")
    return Sealed(
        record, NodeId(envelope.signer), blake3(data).digest(), content_id(envelope.kind, envelope.body), data
    )


def open_as_untrusted(data: bytes, record_type: type[T], network: NetworkId) -> Sealed[T]:
    """As `open_untrusted`, and raise WrongKind unless the record is a `record_type`."""
    sealed = open_untrusted(data, network)
    if type(sealed.record) is not record_type:
        raise WrongKind(f"a record of kind {kind_of(record_type)!r} belongs here")
    return sealed


def record_id(data: bytes) -> bytes:
    """Return the id (32 bytes) of an envelope as it travels; for dropping duplicates before verification."""
    return blake3(data).digest()


def _convert_body(envelope: Envelope, record_type: type[Any]) -> Any:  # noqa: ANN401
    tree = codec.decode_tree_untrusted(envelope.body)
    if type(tree) is not dict:
        raise MalformedRecord("a record's body is a map")
    return codec.convert_untrusted(tree, record_type)
