"""Hypothesis strategies for records, made from the msgspec types themselves.

A new field or a new range is drawn without a change here; only rules that span fields (an offer's dates) are
written down. Values lean to the small and to the bounds.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec import inspect

from protocol.envelope import KINDS
from protocol.records import Curve, Job, Offer, Withdrawal
from protocol.records.fields import MILLIS_MAX
from protocol.records.offer import OFFER_LIFETIME_MAX_MS

T = TypeVar("T")

LIST_DRAWN_MAX = 3
TEXT_DRAWN_MAX = 24
BYTES_DRAWN_MAX = 48
NOW = 1_790_000_000_000
"""A usual time, in Unix ms."""

_CHARACTERS = "abcXYZ019._+:-/\\ \n\t\u00e9\u6f22\U0001f600"


def instances(record_type: type[T]) -> SearchStrategy[T]:
    """Return a strategy for valid instances of a msgspec struct type."""
    tree = _struct(inspect.type_info(record_type))
    return tree.map(lambda fields: msgspec.convert(fields, record_type, strict=True))


def any_record() -> SearchStrategy[Any]:
    """Return a strategy for valid records of every registered kind."""
    return st.one_of([instances(record_type) for record_type in KINDS.values()])


def curves() -> SearchStrategy[Curve]:
    """Return a strategy for curves of usual and of extreme shapes, opened around `NOW`."""
    usual_halving = st.sampled_from([1000, 60_000, 1_800_000, 30 * 24 * 3_600_000])
    prices = st.one_of(st.integers(0, 2000), st.integers(0, 10**6), st.integers(0, 10**15))
    return st.builds(
        lambda prices, opened_at, opening, tick, halving, lift: Curve(
            max(prices), min(prices), opened_at, opening, tick, halving, lift
        ),
        st.tuples(prices, prices),
        st.integers(NOW - 10**8, NOW + 10**6),
        st.sampled_from([0, 2000, 60_000]),
        st.one_of(st.sampled_from([50, 300, 60_000]), st.integers(50, 60_000)),
        st.one_of(usual_halving, st.integers(1000, 10**8)),
        st.integers(0, 1000),
    )


def _dates(tree: SearchStrategy[dict[str, Any]]) -> SearchStrategy[dict[str, Any]]:
    issued = st.integers(0, MILLIS_MAX - OFFER_LIFETIME_MAX_MS)
    return st.builds(
        lambda fields, issued_at, lifetime: fields | {"issued_at": issued_at, "expires_at": issued_at + lifetime},
        tree,
        issued,
        st.integers(1, OFFER_LIFETIME_MAX_MS),
    )


def _offer(tree: SearchStrategy[dict[str, Any]]) -> SearchStrategy[dict[str, Any]]:
    return _dates(tree.map(lambda fields: fields | {"free": min(fields.get("free", 0), fields["quantity"])}))


def _curve(tree: SearchStrategy[dict[str, Any]]) -> SearchStrategy[dict[str, Any]]:
    return tree.map(lambda fields: fields | {"reserve": min(fields["start"], fields["reserve"])})


def _stays_inside(path: str) -> bool:
    return not path.startswith("/") and ".." not in path.split("/")


def _job(tree: SearchStrategy[dict[str, Any]]) -> SearchStrategy[dict[str, Any]]:
    def is_inside(fields: dict[str, Any]) -> bool:
        destinations = [item["destination"] for item in fields.get("inputs", ())]
        return all(map(_stays_inside, [fields.get("workdir", ""), *fields.get("outputs", ()), *destinations]))

    return tree.filter(is_inside)


_RULES: dict[type, Callable[[SearchStrategy[dict[str, Any]]], SearchStrategy[dict[str, Any]]]] = {
    Offer: _offer,
    Withdrawal: _dates,
    Curve: _curve,
    Job: _job,
}


def _struct(info: inspect.Type) -> SearchStrategy[dict[str, Any]]:
    assert isinstance(info, inspect.StructType)
    required = {field.encode_name: _value(field.type) for field in info.fields if field.required}
    optional = {field.encode_name: _value(field.type) for field in info.fields if not field.required}
    tree = st.fixed_dictionaries(required, optional=optional)
    rule = _RULES.get(info.cls)
    return rule(tree) if rule else tree


def _value(info: inspect.Type) -> SearchStrategy[Any]:
    match info:
        case inspect.StructType():
            return _struct(info)
        case inspect.IntType():
            low = info.ge if info.ge is not None else info.gt + 1
            high = info.le if info.le is not None else info.lt - 1
            near = st.integers(low, min(high, low + 1000))
            return st.one_of(near, st.integers(low, high), st.sampled_from([low, high]))
        case inspect.BytesType():
            low, high = info.min_length or 0, info.max_length
            return st.binary(min_size=low, max_size=min(high, max(low, BYTES_DRAWN_MAX)))
        case inspect.StrType():
            return _text(info)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.EnumType():
            return st.sampled_from([member.value for member in info.cls])
        case inspect.VarTupleType():
            low = info.min_length or 0
            return st.lists(_value(info.item_type), min_size=low, max_size=max(low, LIST_DRAWN_MAX))
        case inspect.DictType():
            return st.dictionaries(_value(info.key_type), _value(info.value_type), max_size=LIST_DRAWN_MAX)
        case inspect.UnionType():
            return st.one_of([_value(each) for each in info.types])
        case _:
            raise TypeError(f"no strategy for {info}")


def _text(info: inspect.StrType) -> SearchStrategy[str]:
    low, high = info.min_length or 0, min(info.max_length or TEXT_DRAWN_MAX, TEXT_DRAWN_MAX)
    pattern = re.compile(info.pattern or "")
    first = [character for character in _CHARACTERS if pattern.search(character)]
    inner = [character for character in _CHARACTERS if pattern.search(f"a{character}a")]
    text = st.builds(str.__add__, st.sampled_from(first), st.text(inner, max_size=high - 1))
    return (text if low else st.one_of(st.just(""), text)).filter(lambda drawn: pattern.search(drawn) is not None)
