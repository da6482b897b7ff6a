"""What the codec refuses, one test a trick."""

import datetime
from fractions import Fraction

import cbor2
import msgspec
import msgspec.inspect
import pytest

from protocol import codec
from protocol.errors import MalformedRecord
from protocol.records import Offer, Voucher


def refused(data: bytes, because: str = "[a-z]") -> None:
    with pytest.raises(MalformedRecord, match=because):
        codec.decode_tree_untrusted(data)


@pytest.mark.parametrize(
    "tree",
    [
        0,
        -1,
        23,
        24,
        255,
        256,
        2**16,
        2**32,
        2**63 - 1,
        1 - 2**63,
        b"",
        b"\xff",
        "",
        "\u00e9",
        True,
        False,
        None,
        [],
        {},
    ],
)
def test_every_value_of_the_subset(tree: object) -> None:
    assert codec.decode_tree_untrusted(codec.encode(tree)) == tree
    assert codec.decode_tree_untrusted(codec.encode({"key": [tree]})) == {"key": [tree]}


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "nothing"),
        (b"\x00\x00", "a trailing byte"),
        (b"\x18\x17", "an integer in too many bytes"),
        (b"\x19\x00\xff", "an integer in too many bytes"),
        (b"\x1b\x00\x00\x00\x00\xff\xff\xff\xff", "an integer in too many bytes"),
        (b"\x78\x01a", "a length in too many bytes"),
        (b"\x9f\xff", "an indefinite list"),
        (b"\xbf\xff", "an indefinite map"),
        (b"\x5f\x41a\xff", "indefinite bytes"),
        (b"\x7f\x61a\xff", "indefinite text"),
        (b"\xa2\x61a\x00\x61a\x01", "a key twice"),
        (b"\xa2\x61b\x00\x61a\x01", "keys out of order"),
        (b"\xa2\x62aa\x00\x61b\x01", "a longer key before a shorter one"),
        (b"\xa1\x00\x00", "a key that is a number"),
        (b"\xa1\x41a\x00", "a key that is bytes"),
        (b"\xa1\x80\x00", "a key that is a list"),
        (b"\xf9\x00\x00", "half of a float"),
        (b"\xfa\x3f\x80\x00\x00", "a float"),
        (b"\xfb\x7f\xf8\x00\x00\x00\x00\x00\x00", "not a number"),
        (b"\xf7", "undefined"),
        (b"\xe0", "a simple value"),
        (b"\xf8\xff", "a simple value"),
        (b"\xff", "a break"),
        (b"\x61\xff", "text that is not UTF-8"),
        (b"\x63\xed\xa0\x80", "half a surrogate pair"),
        (b"\x1c", "a reserved length"),
        (b"\x1b\x80\x00\x00\x00\x00\x00\x00\x00", "2^63"),
        (b"\x3b\x7f\xff\xff\xff\xff\xff\xff\xff", "-2^63"),
    ],
)  # fmt: skip
def test_bytes_outside_the_subset(data: bytes, what: str) -> None:
    refused(data)


@pytest.mark.parametrize("tag", [*range(40), 100, 256, 258, 260, 261, 1004, 43000, 55799, 2**32, 2**64 - 1])
def test_every_tag_is_refused(tag: int) -> None:
    for content in (0, b"\x01", "1", [1, 2], {}):
        data = cbor2.dumps(cbor2.CBORTag(tag, content))
        refused(data, "tag")
        refused(b"\x81" + data, "error decoding array|tag")


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        2**64,
        2**200,
        -(2**70),
        1.5,
        Fraction(1, 2),
        datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        {1, 2},
    ],
)
def test_python_values_that_cbor2_would_take(value: object) -> None:
    refused(cbor2.dumps(value))


def test_tags_are_refused_before_they_are_acted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A regular expression (tag 35) of 60 kB can take minutes to compile."""
    compiled = []
    monkeypatch.setattr("re.compile", compiled.append)
    data = b"\xd8\x23" + cbor2.dumps("(?i:[\0-\U0010ffff])" * 3000)
    with pytest.raises(MalformedRecord):
        codec.decode_tree_untrusted(data)
    assert compiled == []
    cbor2.loads(data)
    assert len(compiled) == 1


@pytest.mark.parametrize(
    "opener", [b"\x81", b"\x9f", b"\xa1\x61a", b"\xbf\x61a", b"\xc1", b"\x9b\x7f" + b"\xff" * 7]
)
def test_a_hundred_thousand_levels(opener: bytes) -> None:
    with pytest.raises(MalformedRecord):
        codec.decode_tree_untrusted(opener * 100_000, size_max=10**7)


@pytest.mark.parametrize("major", [0x40, 0x60, 0x80, 0xA0])
@pytest.mark.parametrize("length", [2**16, 2**31, 2**32, 2**40, 2**63 - 1, 2**64 - 1])
def test_a_length_that_is_a_lie(major: int, length: int) -> None:
    refused(bytes([major | 27]) + length.to_bytes(8, "big") + b"\0" * 64)


def test_depth_ends_at_sixteen_values() -> None:
    assert codec.decode_tree_untrusted(b"\x81" * 15 + b"\x00") == [[[[[[[[[[[[[[[0]]]]]]]]]]]]]]]
    refused(b"\x81" * 16 + b"\x00", "deeper than 16")
    refused(b"\xa1\x61a" * 16 + b"\x00", "deeper than 16")


def test_the_number_of_values_is_bounded() -> None:
    assert len(codec.decode_tree_untrusted(codec.encode([0] * (codec.NODES_MAX - 1)))) == codec.NODES_MAX - 1
    refused(cbor2.dumps([0] * codec.NODES_MAX), "more than 20000 values")
    refused(cbor2.dumps([[0] * 15_000, [0] * 15_000]), "more than 20000 values")


def test_the_size_is_bounded() -> None:
    data = codec.encode(b"\0" * 100)
    assert codec.decode_tree_untrusted(data, size_max=len(data)) == b"\0" * 100
    with pytest.raises(MalformedRecord, match="102 bytes is more than the 101 allowed"):
        codec.decode_tree_untrusted(data, size_max=101)


@pytest.mark.parametrize(
    "value", [1.5, 2**63, -(2**63), {1: 2}, "\ud800", [float("nan")], {"a": {"b": 2**64}}, [[]] * 20_000]
)
def test_our_own_values_outside_the_subset_are_our_bug(value: object) -> None:
    with pytest.raises(ValueError):
        codec.encode(value)


def test_map_keys_are_sorted_by_length_and_then_by_bytes() -> None:
    keys = ["a", "b", "\u00e9", "aa", "ab", "z" * 23, "a" * 24, "a" * 255, "a" * 256]
    encoded = codec.encode(dict.fromkeys(reversed(keys), 0))
    assert list(cbor2.loads(encoded)) == sorted(keys, key=cbor2.dumps)
    assert encoded == codec.encode(dict.fromkeys(keys, 0))


def voucher(**fields: object) -> bytes:
    tree = {"lease": bytes(16), "number": 1, "amount": 5, "covers_ms": 10} | fields
    return codec.encode(tree)


def test_a_record_is_what_its_type_says() -> None:
    assert codec.decode_untrusted(voucher(), Voucher) == Voucher(lease=bytes(16), number=1, amount=5, covers_ms=10)


@pytest.mark.parametrize(
    "fields",
    [
        {"number": "1"},
        {"number": True},
        {"number": None},
        {"number": -1},
        {"number": 2**62},
        {"amount": 2**62 + 1},
        {"covers_ms": b"\x01"},
        {"lease": bytes(15)},
        {"lease": bytes(17)},
        {"lease": "\0" * 16},
        {"lease": [0] * 16},
        {"extra": 0},
    ],
)
def test_a_field_is_never_coerced(fields: dict[str, object]) -> None:
    with pytest.raises(MalformedRecord, match="not a Voucher"):
        codec.decode_untrusted(voucher(**fields), Voucher)


@pytest.mark.parametrize("tree", [None, 0, b"", "voucher", [], [bytes(16), 1, 5, 10], {}])
def test_a_record_is_a_map(tree: object) -> None:
    with pytest.raises(MalformedRecord):
        codec.decode_untrusted(codec.encode(tree), Voucher)


def test_rules_of_a_type_come_out_as_malformed() -> None:
    class Even(msgspec.Struct):
        number: int

        def __post_init__(self) -> None:
            if self.number % 2:
                raise ValueError("odd")

    with pytest.raises(MalformedRecord, match="odd"):
        codec.decode_untrusted(codec.encode({"number": 3}), Even)


def test_a_union_of_types_is_refused_like_one() -> None:
    class One(msgspec.Struct, tag="one"):
        number: int

    class Other(msgspec.Struct, tag="other"):
        text: str

    assert codec.convert_untrusted({"type": "one", "number": 1}, One | Other) == One(1)
    for tree in ({"type": "none"}, {"number": 1}, {"type": "other", "text": 1}, [], 3):
        with pytest.raises(MalformedRecord, match="not a record of this place"):
            codec.convert_untrusted(tree, One | Other)


def test_an_error_quotes_its_peer_only_bounded_and_printable() -> None:
    with pytest.raises(MalformedRecord) as caught:
        codec.decode_untrusted(voucher(**{"\x1b[2J\n\u202e" + "x" * 5000: 0}), Voucher)
    assert len(str(caught.value)) < 4 * codec.ERROR_TEXT_MAX
    assert str(caught.value).isprintable()
    assert str(caught.value).isascii()


def test_offers_take_unknown_keys_only_at_the_top() -> None:
    offer = msgspec.inspect.type_info(Offer)
    assert not offer.cls.__struct_config__.forbid_unknown_fields
    bound = [field.type.cls for field in offer.fields if field.name in ("curve", "terms")]
    assert all(cls.__struct_config__.forbid_unknown_fields for cls in bound)
