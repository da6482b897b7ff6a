"""The configuration as TOML, each value with its origin: what `gpunode config show` prints.

What it writes can be read back. Refuses to show secrets.
"""

import json
from typing import Any

from node.config import strict
from node.config.loading import Loaded, variable_of
from node.config.settings import Reads


def as_toml(loaded: Loaded) -> str:
    """Return all settings as TOML, each line with a comment that says where its value came from."""
    tables: dict[tuple[str, ...], list[str]] = {(): []}
    for leaf in strict.leaves():
        tables.setdefault(leaf.path[:-1], []).append(_line(loaded, leaf))
    blocks = [
        "\n".join([*([f"[{strict.dotted(table)}]"] if table else []), *lines]) for table, lines in tables.items()
    ]
    blocks.extend(_own_tables(loaded.raw))
    return "\n\n".join(blocks) + "\n"


def explain(loaded: Loaded) -> list[dict[str, str]]:
    """Return every setting as {"name", "value", "origin", "variable", "allowed"}, for `--json` and for people.

    Values are in their TOML form; "" stands for one that is not set.
    """
    return [
        {
            "name": leaf.name,
            "value": _value(loaded, leaf) or "",
            "origin": loaded.origins[leaf.name],
            "variable": variable_of(leaf),
            "allowed": strict.allowed(leaf.type),
        }
        for leaf in strict.leaves()
    ]


def _line(loaded: Loaded, leaf: strict.Leaf) -> str:
    value, origin = _value(loaded, leaf), loaded.origins[leaf.name]
    if leaf.reads is Reads.SECRET:
        return f"# {leaf.path[-1]} is {'not set' if value is None else 'set, and not shown'}  # {origin}"
    if value is None:
        return f"# {leaf.path[-1]} is not set"
    return f"{leaf.path[-1]} = {value}  # {origin}"


def _value(loaded: Loaded, leaf: strict.Leaf) -> str | None:
    """Return a setting's value in TOML: as it was written, or the default; None when it is not set."""
    written: Any = loaded.raw
    for step in leaf.path:
        written = written.get(step) if isinstance(written, dict) else None
    if leaf.reads is Reads.SECRET:
        return None if loaded.config.network.key is None else '"(not shown)"'
    if written is not None:
        return _toml(written)
    if leaf.default is None:
        return None
    if leaf.reads is None:
        return _toml(leaf.default)
    way = strict.WAYS[leaf.reads]
    text = way.write(leaf.default)
    return _toml(text) if way.quoted else text


def _own_tables(raw: dict[str, Any]) -> list[str]:
    """Return the tables that the user named: model prices and simulated devices, as they were written."""
    prices = raw.get("lend", {}).get("price", {})
    blocks = [_table(f"[{strict.dotted(('lend', 'price', model))}]", table) for model, table in prices.items()]
    blocks.extend(_table("[[simulated_device]]", table) for table in raw.get("simulated_device", []))
    return blocks


def _table(head: str, values: dict[str, Any]) -> str:
    return "\n".join([head, *(f"{key} = {_toml(value)}" for key, value in values.items())])


def _toml(value: Any) -> str:  # noqa: ANN401 - any value that TOML gave
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    # JSON's texts, numbers and booleans are TOML's too (but for DEL, which no setting allows).
    return json.dumps(value, default=str, ensure_ascii=False)
