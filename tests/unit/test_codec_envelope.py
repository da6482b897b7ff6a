"""Envelopes: who signed what, in which network; and what sealing refuses."""

import msgspec
import pytest
from blake3 import blake3
from support.signers import NETWORK, OTHER_NETWORK, signer

from protocol import codec
from protocol.envelope import (
    ENVELOPE_SIZE_MAX,
    KINDS,
    Envelope,
    content_id,
    content_id_of,
    kind_of,
    open_as_untrusted,
    open_untrusted,
    record,
    record_id,
    seal,
    signing_bytes,
)
from protocol.errors import BadSignature, MalformedRecord, WrongKind
from protocol.records import Ack, Refusal, Voucher

VOUCHER = Voucher(lease=bytes(16), number=1, amount=5, covers_ms=10)


def resigned(kind: str, body: bytes, **fields: bytes) -> bytes:
    """Return an envelope that person 1 really signed, with `fields` changed afterwards."""
    parts = {
        "signer": signer(1).public_key,
        "signature": signer(1).sign(signing_bytes(NETWORK, kind, body)),
    } | fields
    return codec.encode(Envelope(kind, body, **parts))


def test_the_signed_bytes_are_those_of_the_specification() -> None:
    body = codec.encode(VOUCHER)
    message = signing_bytes(NETWORK, "voucher", body)
    assert message == (
        b"\x00\x00\x00\x09gpunode/1" + b"\x00\x00\x00\x20" + NETWORK + b"\x00\x00\x00\x07voucher"
        + len(body).to_bytes(4, "big") + body
    )  # fmt: skip


def test_ids_are_hashes_of_the_whole_and_of_the_content() -> None:
    sealed = seal(VOUCHER, signer(1), NETWORK)
    assert sealed.id == blake3(sealed.data).digest() == record_id(sealed.data)
    assert sealed.content_id == content_id("voucher", codec.encode(VOUCHER)) == content_id_of(VOUCHER)
    other = seal(VOUCHER, signer(2), NETWORK)
    assert other.content_id == sealed.content_id
    assert other.id != sealed.id


def test_another_networks_record_is_refused() -> None:
    with pytest.raises(BadSignature, match="another network"):
        open_untrusted(seal(VOUCHER, signer(1), OTHER_NETWORK).data, NETWORK)


def test_a_body_is_not_taken_under_another_kind() -> None:
    """Ack's body under another registered kind has another shape; signed bytes differ even if it had not."""
    body = codec.encode(Ack(of=bytes(32)))
    with pytest.raises(MalformedRecord):
        open_untrusted(resigned("voucher", body), NETWORK)
    refusal = codec.encode(Refusal(of=bytes(32), reason="no"))
    moved = signer(1).sign(signing_bytes(NETWORK, "ack", refusal))
    with pytest.raises(BadSignature):
        open_untrusted(resigned("refusal", refusal, signature=moved), NETWORK)


def test_a_signature_is_its_signers() -> None:
    body = codec.encode(VOUCHER)
    with pytest.raises(BadSignature):
        open_untrusted(resigned("voucher", body, signer=signer(2).public_key), NETWORK)
    assert open_untrusted(resigned("voucher", body), NETWORK).signer == signer(1).node


@pytest.mark.parametrize("kind", ["", "vouchers", "Voucher", "transcript", "envelope", "k" * 32])
def test_the_set_of_kinds_is_closed(kind: str) -> None:
    with pytest.raises((WrongKind, MalformedRecord)):
        open_untrusted(resigned(kind, codec.encode(VOUCHER)), NETWORK)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "k" * 33},
        {"body": bytes(codec.RECORD_SIZE_MAX + 1)},
        {"signer": bytes(31)},
        {"signature": bytes(65)},
        {"extra": 0},
        {"body": b""},
        {"body": b"\x00"},
        {"body": b"\x80"},
        {"body": codec.encode([1, 2, 3])},
        {"kind": None},
    ],
)
def test_the_shape_of_an_envelope_is_fixed(change: dict[str, object]) -> None:
    tree = codec.decode_tree_untrusted(seal(VOUCHER, signer(1), NETWORK).data) | change
    with pytest.raises(MalformedRecord):
        open_untrusted(codec.encode(tree), NETWORK)


def test_an_envelope_has_a_size() -> None:
    with pytest.raises(MalformedRecord, match="more than"):
        open_untrusted(bytes(ENVELOPE_SIZE_MAX + 1), NETWORK)


def test_the_expected_kind_is_asked_for() -> None:
    sealed = seal(VOUCHER, signer(1), NETWORK)
    assert open_as_untrusted(sealed.data, Voucher, NETWORK) == sealed
    with pytest.raises(WrongKind, match="'ack' belongs here"):
        open_as_untrusted(sealed.data, Ack, NETWORK)


@pytest.mark.parametrize(
    "fields", [{"amount": -1}, {"number": 2**62}, {"lease": b""}, {"covers_ms": 10**15}, {"amount": None}]
)
def test_sealing_refuses_what_peers_would_refuse(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a Voucher"):
        seal(msgspec.structs.replace(VOUCHER, **fields), signer(1), NETWORK)


def test_only_registered_records_travel() -> None:
    class Note(msgspec.Struct):
        text: str

    with pytest.raises(KeyError):
        seal(Note("hello"), signer(1), NETWORK)
    with pytest.raises(ValueError, match="two records of kind 'voucher'"):
        record("voucher")(Note)


def test_kinds_are_known_by_name() -> None:
    assert {kind: kind_of(record_type) for kind, record_type in KINDS.items()} == {kind: kind for kind in KINDS}
    assert all(kind.isascii() and kind.islower() for kind in KINDS)
