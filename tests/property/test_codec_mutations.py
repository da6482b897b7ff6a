"""Whatever the bytes, only the three named errors come out, and nothing but the canonical form goes in."""

import cbor2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.signers import NETWORK, signer
from support.strategies import any_record

from protocol import codec
from protocol.envelope import KINDS, Envelope, open_untrusted, seal
from protocol.errors import BadSignature, MalformedRecord, WrongKind

RECORD_TYPES = [KINDS[kind] for kind in sorted(KINDS)]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63) + 1, 2**63 - 1), st.binary(max_size=12), st.text(max_size=12)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)),
    max_leaves=12,
)
ANY_CBOR = st.recursive(
    st.one_of(
        SCALARS,
        st.floats(),
        st.integers(),
        st.datetimes().map(str),
        st.builds(cbor2.CBORTag, st.integers(0, 300), SCALARS),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.integers(0, 5), inner, max_size=3)),
    max_leaves=8,
)
EDITS = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 3), st.integers(0, 255)), min_size=1, max_size=6)


def mutated(data: bytes, edits: list[tuple[int, int, int]]) -> bytes:
    """Return `data` after edits of (place, what to do there, a byte): replace, insert, delete, cut off."""
    out = bytearray(data)
    for place, what, byte in edits:
        index = place % (len(out) + 1)
        if what == 0 and index < len(out):
            out[index] = byte
        elif what == 1:
            out.insert(index, byte)
        elif what == 2:
            del out[index : index + 1 + byte % 4]
        elif byte < 64:
            del out[index:]
    return bytes(out)


def attempt(data: bytes) -> None:
    """Feed `data` to every way in."""
    for record_type in (*RECORD_TYPES, Envelope):
        try:
            record = codec.decode_untrusted(data, record_type)
        except MalformedRecord:
            continue
        assert type(record) is record_type
    try:
        open_untrusted(data, NETWORK)
    except (MalformedRecord, WrongKind, BadSignature) as error:
        assert len(str(error)) < 4 * codec.ERROR_TEXT_MAX
        assert str(error).isprintable()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    attempt(data)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=ANY_CBOR)
def test_any_cbor(tree: object) -> None:
    attempt(cbor2.dumps(tree))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(record=any_record(), edits=EDITS)
def test_mutations_of_an_envelope_never_pass(record: object, edits: list[tuple[int, int, int]]) -> None:
    data = seal(record, signer(1), NETWORK).data
    changed = mutated(data, edits)
    if changed != data:
        with pytest.raises((MalformedRecord, WrongKind, BadSignature)):
            open_untrusted(changed, NETWORK)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(record=any_record(), edits=EDITS)
def test_mutated_bodies_signed_by_their_author(record: object, edits: list[tuple[int, int, int]]) -> None:
    """A hostile signer can sign anything: what opens is a valid record, byte for byte."""
    body = mutated(codec.encode(record), edits)
    attempt(body)
    try:
        opened = codec.decode_untrusted(body, type(record))
    except MalformedRecord:
        return
    assert codec.decode_untrusted(codec.encode(opened), type(record)) == opened


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(record=any_record(), place=st.integers(0, 2**16), value=TREES)
def test_a_field_of_any_other_value(record: object, place: int, value: object) -> None:
    tree = codec.decode_tree_untrusted(codec.encode(record))
    field = sorted(tree)[place % len(tree)]
    attempt(codec.encode(tree | {field: value}))
    attempt(codec.encode({key: kept for key, kept in tree.items() if key != field}))


@settings(max_examples=100, deadline=None)
@given(tree=TREES)
def test_the_canonical_form_is_the_only_one(tree: object) -> None:
    data = codec.encode(tree)
    assert codec.decode_tree_untrusted(data) == tree
    with pytest.raises(MalformedRecord):
        codec.decode_tree_untrusted(data + b"\0")
    with pytest.raises(MalformedRecord):
        codec.decode_tree_untrusted(data[:-1])
