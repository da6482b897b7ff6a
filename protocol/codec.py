"""Canonical CBOR, and the only way in for bytes from a peer.

The subset is RFC 8949 with deterministic encoding: integers below 2^63 in magnitude, bytes, text, booleans,
null, lists, and maps with text keys. Floats, tags, dates, duplicate keys, trailing bytes and non-minimal
lengths are refused, since cbor2 by itself accepts them (and turns bignum tags into integers). Tags are refused
before cbor2 acts on them: it would compile a regular expression of tag 35, and a chosen 64 KiB of those takes
minutes.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import cbor2
import msgspec

from protocol.errors import MalformedRecord

RECORD_SIZE_MAX = 64 * 1024
"""Largest record body or envelope accepted from a peer, in bytes."""
DEPTH_MAX = 16
NODES_MAX = 20_000
"""Largest number of values in one record; bounds the work of a walk."""
INT_BOUND = 2**63
ERROR_TEXT_MAX = 300
"""Longest message made from a peer's bytes, in characters."""

T = TypeVar("T")


def encode(value: Any) -> bytes:  # noqa: ANN401 - any tree of the subset
    """Return the canonical bytes of `value`, a msgspec struct or a tree of the subset.

    Raises ValueError when the value is outside the subset: our own bug, never a peer's.
    """
    tree = msgspec.to_builtins(value, builtin_types=(bytes,))
    problem = _problem(tree)
    if problem:
        raise ValueError(problem)
    return cbor2.dumps(tree, canonical=True)


def decode_tree_untrusted(data: bytes, size_max: int = RECORD_SIZE_MAX) -> Any:  # noqa: ANN401
    """Return the tree that `data` encodes; raise `MalformedRecord` for anything but its canonical form."""
    if len(data) > size_max:
        raise MalformedRecord(f"{len(data)} bytes is more than the {size_max} allowed")
    try:
        tree = cbor2.loads(
            data,
            semantic_decoders=_NO_TAGS,
            max_depth=DEPTH_MAX,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            strict_hashable_types=True,
        )
    except (AssertionError, MemoryError):
        raise
    except Exception as error:
        raise MalformedRecord(_printable(f"not CBOR of the subset: {error}")) from None
    problem = _problem(tree)
    if problem:
        raise MalformedRecord(problem)
    if cbor2.dumps(tree, canonical=True) != data:
        raise MalformedRecord("not in canonical form")
    return tree


def decode_untrusted(data: bytes, record_type: type[T], size_max: int = RECORD_SIZE_MAX) -> T:
    """Return the `record_type` that `data` encodes; raise `MalformedRecord` when it is none.

    Whether unknown keys pass is the record type's own choice (`forbid_unknown_fields`).
    """
    return convert_untrusted(decode_tree_untrusted(data, size_max), record_type)


def convert_untrusted(tree: Any, record_type: type[T]) -> T:  # noqa: ANN401
    """Return `tree` as a `record_type`; raise `MalformedRecord` when a field or a range does not fit."""
    try:
        return msgspec.convert(tree, record_type, strict=True)
    except (msgspec.ValidationError, ValueError) as error:
        # A union of types, such as all frames of a stream, has no name.
        name = getattr(record_type, "__name__", "record of this place")
        raise MalformedRecord(_printable(f"not a {name}: {error}")) from None


def _printable(text: str) -> str:
    """Return `text`, which may quote a peer, bounded and in printable ASCII."""
    return ascii(text[:ERROR_TEXT_MAX])[1:-1]


class _NoTags(Mapping[int, Any]):
    """A table of tag decoders that has one for every tag, and each refuses."""

    def __getitem__(self, tag: int) -> Any:  # noqa: ANN401 - as Mapping has it
        return self._refuse

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0

    @staticmethod
    def _refuse(*_: object) -> None:
        raise ValueError("a tag")


_NO_TAGS = _NoTags()


def _problem(tree: Any) -> str | None:  # noqa: ANN401
    """Return what in `tree` is outside the subset, or None. Iterative, so that depth can't exhaust the stack."""
    stack: list[tuple[Any, int]] = [(tree, 1)]
    nodes = 0
    while stack:
        value, depth = stack.pop()
        nodes += 1
        if nodes > NODES_MAX:
            return f"more than {NODES_MAX} values"
        if depth > DEPTH_MAX:
            return f"nested deeper than {DEPTH_MAX}"
        kind = type(value)
        if kind is int:
            if not -INT_BOUND < value < INT_BOUND:
                return "an integer of 64 bits or more"
        elif kind is list or kind is tuple:
            if len(value) > NODES_MAX:
                return f"more than {NODES_MAX} values"
            stack.extend((item, depth + 1) for item in value)
        elif kind is dict:
            for key, item in value.items():
                if type(key) is not str:
                    return "a map key that is not text"
                stack.append((item, depth + 1))
        elif kind not in (bytes, str, bool, type(None)):
            return f"a value of type {kind.__name__}"
    return None
