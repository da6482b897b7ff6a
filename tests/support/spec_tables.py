"""What the field tables of contrib/spec.md must say: computed from the record types."""

import enum
from typing import Any

import msgspec
from msgspec import inspect

from protocol import units
from protocol.records import fields
from protocol.records.job import RelativePath, VariableName

_TEXTS: dict[str | None, str] = {
    inspect.type_info(annotated).pattern: name  # type: ignore[attr-defined]
    for name, annotated in {
        "token": fields.Token,
        "label": fields.Label,
        "note": fields.Note,
        "address": fields.Address,
        "path": RelativePath,
        "variable name": VariableName,
    }.items()
}
_TEXTS[None] = "text"
_TEXTS[r"^[^\x00]*$"] = "text without NUL"


_WORDS_MAX = 3
"""A field of few words names them; one of more has a table of its own."""
_INTEGERS = {
    (0, int(units.PRICE_MAX)): "price",
    (0, int(units.AMOUNT_MAX)): "amount",
    (-int(units.AMOUNT_MAX), int(units.AMOUNT_MAX)): "signed amount",
    (0, fields.MILLIS_MAX): "time",
    (0, fields.DURATION_MAX_MS): "duration",
    (0, 2**62 - 1): "number",
    (0, 2**31): "count",
    (0, 2**40): "mebibytes",
}


def rows(record_type: type[Any]) -> list[tuple[str, str, str]]:
    """Return (field, type, default) of each field, in order."""
    info = inspect.type_info(record_type)
    assert isinstance(info, inspect.StructType)
    return [(field.encode_name, type_text(field.type), _default(field)) for field in info.fields]


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ", ".join(default) or "empty"
    return str(default or "0") if isinstance(default, int) else default or "empty"


def type_text(info: inspect.Type) -> str:
    """Return a type as the specification writes it."""
    match info:
        case inspect.StructType():
            return info.cls.__name__
        case inspect.IntType():
            low = info.ge if info.ge is not None else info.gt + 1
            high = info.le if info.le is not None else info.lt - 1
            return _INTEGERS.get((low, high), f"int {low}..{high}")
        case inspect.BytesType():
            return f"bytes {_size(info.min_length, info.max_length)}"
        case inspect.StrType():
            return f"{_TEXTS[info.pattern]} {_size(info.min_length, info.max_length)}"
        case inspect.BoolType():
            return "bool"
        case inspect.NoneType():
            return "null"
        case inspect.EnumType():
            assert issubclass(info.cls, enum.StrEnum)
            if len(info.cls) <= _WORDS_MAX:
                return " or ".join(f'"{word}"' for word in info.cls)
            return info.cls.__name__
        case inspect.LiteralType():
            return " or ".join(f'"{word}"' for word in info.values)
        case inspect.VarTupleType():
            return f"list {_size(info.min_length, info.max_length)} of {type_text(info.item_type)}"
        case inspect.DictType():
            return f"map of {type_text(info.key_type)} to {type_text(info.value_type)}"
        case inspect.UnionType():
            return " or ".join(sorted(map(type_text, info.types), key=lambda text: text == "null"))
        case _:
            raise TypeError(f"no text for {info}")


def _size(low: int | None, high: int | None) -> str:
    assert high is not None, "everything that a peer sends has a bound"
    return str(high) if low == high else f"{low or 0}..{high}"
