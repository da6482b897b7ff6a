"""The settings as a tree of types: the one strict conversion, and errors that say path, found and allowed.

The tree comes from msgspec's own view of `Config`, so that a setting is described once, where it is declared.
Texts such as "15m" become integers here, on the way into `msgspec.convert`. Refuses to know where a value came
from: `node.config.loading` merges files, environment and flags.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec
import msgspec.inspect as types

from node.config import text
from node.config.settings import Config, Reads
from node.errors import ConfigError

FOUND_SIZE_MAX = 80
"""Longest quotation of a wrong value, in characters."""
_MISSING_FIELD = re.compile(r"Object missing required field `(.+)`")
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>[0-9]+)\]|(?P<any>\[\.\.\.\])")

Where = tuple[str | int, ...]
N = TypeVar("N", bound=types.Type)


class Way(NamedTuple):
    """How a kind of setting is read and written."""

    parse: Callable[[object], Any]
    write: Callable[[Any], str]
    quoted: bool
    """Whether its TOML form is a text."""


WAYS: dict[Reads, Way] = {
    Reads.DURATION: Way(text.parse_duration, text.write_duration, True),
    Reads.SIZE: Way(text.parse_size, text.write_size, True),
    Reads.PRICE: Way(text.parse_price, text.write_price, False),
    Reads.CREDITS: Way(text.parse_credits, text.write_credits, False),
    Reads.THOUSANDTHS: Way(text.parse_thousandths, text.write_thousandths, False),
    Reads.COMPUTE_CAPABILITY: Way(text.parse_compute_capability, text.write_compute_capability, True),
    Reads.CUDA: Way(text.parse_cuda, text.write_cuda, True),
    Reads.PATH: Way(text.parse_path, str, True),
    Reads.SECRET: Way(text.parse_secret, repr, True),
}


class Leaf(NamedTuple):
    """One setting that the environment and flags can set too."""

    path: tuple[str, ...]
    type: types.Type
    default: Any
    """`msgspec.NODEFAULT` when there is none."""

    @property
    def name(self) -> str:
        """Its dotted path, such as "network.max_peers"."""
        return ".".join(self.path)

    @property
    def reads(self) -> Reads | None:
        """How its text is read; None for what TOML has itself."""
        return reads_of(self.type)


def root() -> types.StructType:
    """Return the tree's root: the type of `Config`."""
    return _expect(types.type_info(Config), types.StructType)


def leaves() -> Iterator[Leaf]:
    """Yield every setting that is no table of the user's own (model prices, simulated devices)."""
    yield from _leaves(root(), ())


def convert(raw: dict[str, Any]) -> Config:
    """Return the `Config` that `raw` (as TOML has it) says. Raises ConfigError."""
    tree = normalise(root(), raw, ())
    try:
        return msgspec.convert(tree, Config, strict=True)
    except msgspec.ValidationError as error:
        raise _explained(str(error), raw, tree) from None


def normalise(node: types.Type, raw: Any, path: Where) -> Any:  # noqa: ANN401 - any tree of TOML
    """Return `raw` with every human text read. Raises ConfigError for a wrong text, shape or key."""
    reads, node = reads_of(node), bare(node)
    if reads is not None:
        try:
            return WAYS[reads].parse(raw)
        except ValueError as error:
            raise wrong(path, raw, str(error), secret=reads is Reads.SECRET) from None
    match node:
        case types.StructType():
            if not isinstance(raw, dict):
                raise wrong(path, raw, "a table")
            return {key: normalise(_field(node, key, path).type, item, (*path, key)) for key, item in raw.items()}
        case types.DictType():
            if not isinstance(raw, dict):
                raise wrong(path, raw, "a table")
            return {key: normalise(node.value_type, item, (*path, key)) for key, item in raw.items()}
        case types.VarTupleType():
            if not isinstance(raw, list):
                raise wrong(path, raw, allowed(node))
            return [normalise(node.item_type, item, (*path, index)) for index, item in enumerate(raw)]
        case _:
            return raw


def from_word(node: types.Type, word: str) -> Any:  # noqa: ANN401
    """Return what TOML would have for the text of an environment variable or a flag.

    Lists are separated by commas. Raises ValueError with what is allowed.
    """
    if reads_of(node) is not None:
        return word
    match bare(node):
        case types.BoolType():
            if word.lower() not in ("true", "false", "1", "0"):
                raise ValueError("true or false")
            return word.lower() in ("true", "1")
        case types.IntType():
            if re.fullmatch(r"-?[0-9]{1,18}", word) is None:
                raise ValueError(allowed(node))
            return int(word)
        case types.VarTupleType(item_type=item):
            return [from_word(item, part.strip()) for part in word.split(",") if part.strip()]
        case _:
            return word


def wrong(path: Where, found: object, expected: str, *, secret: bool = False) -> ConfigError:
    """Return the error of a value: where, what was found, what is allowed."""
    quoted = "(not shown)" if secret else _quoted(found)
    return ConfigError(f"{dotted(path)} is {quoted}", f"allowed: {expected}")


def unknown(what: str, name: str, names: list[str], where: str = "") -> ConfigError:
    """Return the error of a misspelt name, with the nearest valid one."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(names))}"
    return ConfigError(f"there is no {what} {name}{where}", hint)


def dotted(path: Where) -> str:
    """Return a path as people write it: lend.price."NVIDIA A100".start_price, simulated_device[0].model."""
    written = ""
    for step in path:
        if isinstance(step, int):
            written += f"[{step}]"
        else:
            plain = re.fullmatch(r"[A-Za-z0-9_-]+", step) is not None
            written += ("." if written else "") + (step if plain else json.dumps(step, ensure_ascii=False))
    return written or "the configuration"


def allowed(node: types.Type) -> str:
    """Return what a setting may be, in words."""
    extra = node.extra or {} if isinstance(node, types.Metadata) else {}
    if "allowed" in extra:
        return str(extra["allowed"])
    reads, node = reads_of(node), bare(node)
    match node:
        case types.IntType():
            write = str if reads is None else WAYS[reads].write
            bounds = [write(bound) for bound in (node.ge, node.le) if bound is not None]
            number = "a whole number" if reads is None else "a value"
            return f"{number} from {' to '.join(bounds)}" if bounds else number
        case types.LiteralType():
            return "one of " + ", ".join(f'"{value}"' for value in node.values)
        case types.BoolType():
            return "true or false"
        case types.VarTupleType():
            most = "" if node.max_length is None else f", {node.min_length or 0} to {node.max_length} of them"
            return f"a list, each item {allowed(node.item_type)}{most}"
        case types.DictType():
            return f"at most {node.max_length} tables"
        case types.StrType():
            return "a text"
        case _:
            return "a table"


def reads_of(node: types.Type) -> Reads | None:
    """Return how a type's text is read."""
    if isinstance(node, types.Metadata):
        return (node.extra or {}).get("reads") or reads_of(node.type)
    if isinstance(node, types.UnionType):
        return reads_of(_some(node))
    return None


def bare(node: types.Type) -> types.Type:
    """Return a type without its metadata and without the None that stands for "not set"."""
    while isinstance(node, types.Metadata | types.UnionType):
        node = node.type if isinstance(node, types.Metadata) else _some(node)
    return node


def _some(node: types.UnionType) -> types.Type:
    return next(member for member in node.types if not isinstance(member, types.NoneType))


def _leaves(node: types.StructType, path: tuple[str, ...]) -> Iterator[Leaf]:
    for item in node.fields:
        below, here = bare(item.type), (*path, item.encode_name)
        if isinstance(below, types.StructType):
            yield from _leaves(below, here)
        elif not _is_table(below):
            default = item.default if item.default_factory is msgspec.NODEFAULT else item.default_factory()
            yield Leaf(here, item.type, default)


def _is_table(node: types.Type) -> bool:
    return isinstance(node, types.DictType) or (
        isinstance(node, types.VarTupleType) and isinstance(bare(node.item_type), types.StructType)
    )


def _field(node: types.StructType, key: str, path: Where) -> types.Field:
    for item in node.fields:
        if item.encode_name == key:
            return item
    # The nearest name anywhere: a key may also stand in the wrong table.
    here = [dotted((*path, item.encode_name)) for item in node.fields]
    written = dotted((*path, key))
    if difflib.get_close_matches(written, here, n=1, cutoff=0.8):
        raise unknown("setting", written, here)
    elsewhere = [leaf.name for leaf in leaves() if leaf.path[-1] == key]
    raise unknown("setting", written, elsewhere or here)


def _explained(message: str, raw: Any, tree: Any) -> ConfigError:  # noqa: ANN401
    """Return msgspec's complaint about `tree` in the words of `raw`, which the user wrote."""
    what, _, where = message.partition(" - at `$")
    missing = _MISSING_FIELD.fullmatch(what)
    path, node = _locate(where.removesuffix("`"), tree)
    if missing is not None:
        return ConfigError(f"{dotted((*path, missing[1]))} is missing", "every such table needs it")
    if not isinstance(bare(node), types.StructType) and what.startswith(("Expected", "Invalid")):
        found = raw
        for step in path:
            found = found[step]
        return wrong(path, found, allowed(node))
    prefix = f"{dotted(path)}: " if path else ""
    return ConfigError(prefix + what, "see the comments in gpunode.toml")


def _locate(msgspec_path: str, tree: Any) -> tuple[Where, types.Type]:  # noqa: ANN401
    """Return the path and type that msgspec's `.lend.price[...].start_price` means in `tree`."""
    path: list[str | int] = []
    node: types.Type = root()
    for step in _STEP.finditer(msgspec_path):
        inner = bare(node)
        key: str | int
        if step["key"] is not None:
            struct = _expect(inner, types.StructType)
            key, node = step["key"], _field(struct, step["key"], tuple(path)).type
        elif step["index"] is not None:
            key, node = int(step["index"]), _expect(inner, types.VarTupleType).item_type
        else:
            # msgspec does not say which key of a dict it was: it is the first whose value does not convert.
            node = _expect(bare(_expect(inner, types.DictType).value_type), types.StructType)
            cls = node.cls
            key = next(name for name, value in tree.items() if not _converts(value, cls))
        path.append(key)
        tree = tree[key]
    return tuple(path), node


def _expect(node: types.Type, kind: type[N]) -> N:
    """Return `node`, which is of `kind` unless this module and `settings` disagree: our own bug."""
    if not isinstance(node, kind):
        raise TypeError(f"{kind.__name__} expected, not {type(node).__name__}")
    return node


def _converts(value: Any, cls: type) -> bool:  # noqa: ANN401
    try:
        msgspec.convert(value, cls, strict=True)
    except msgspec.ValidationError:
        return False
    return True


def _quoted(found: object) -> str:
    written = json.dumps(found, default=str, ensure_ascii=False)
    return written if len(written) <= FOUND_SIZE_MAX else written[:FOUND_SIZE_MAX] + "..."
