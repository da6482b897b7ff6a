"""The OpenRPC document, generated from the msgspec structs: `python -m node.rpc.discover FILE` writes it.

The committed copy is `contrib/schemas/openrpc.json`; a test fails when it differs from what this generates.
Refuses hand-written schemas: the structs are the only source.
"""

import inspect
import sys
from pathlib import Path
from typing import Any

import msgspec

from node.rpc.api import METHODS
from node.rpc.method import ErrorBody, Method, Stream, Subscribed

OPENRPC_VERSION = "1.3.2"
"""Source: https://spec.open-rpc.org, the version whose shapes this document has."""
INTERFACE_VERSION = "1.0.0"
"""Of the interface itself: the first number changes when something that a caller relies on goes away."""


def document() -> dict[str, Any]:
    """Return the OpenRPC document of every method."""
    shapes: list[type[Any]] = [Subscribed, ErrorBody]
    shapes += [shape for method in METHODS.values() for shape in (method.params, _answer(method))]
    schemas, components = msgspec.json.schema_components(shapes, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(shapes, schemas, strict=True))
    # OpenRPC spells the params out, so their structs are nobody's reference.
    inlined = {method.params.__name__ for method in METHODS.values()}
    return {
        "openrpc": OPENRPC_VERSION,
        "info": {
            "title": "gpunode",
            "version": INTERFACE_VERSION,
            "license": {"name": "Apache-2.0"},
            "description": inspect.cleandoc(
                """
                JSON-RPC 2.0, one request a line, on a unix socket. Params are named; batches are refused. A method
                with `x-item` is a subscription: its result names it, then come notifications whose method is the
                method's name and whose params are {"subscription": n, "item": {...}}; the last one's are
                {"subscription": n, "done": true} or {"subscription": n, "error": {...}}. It ends when the caller
                disconnects.
                """
            ),
        },
        "methods": [_describe(method, schema_of, components) for method in METHODS.values()],
        "components": {"schemas": {name: shape for name, shape in components.items() if name not in inlined}},
        "x-error": schema_of[ErrorBody],
    }


def render() -> bytes:
    """Return the document as it is committed."""
    return msgspec.json.format(msgspec.json.encode(document(), order="sorted"), indent=2) + b"\n"


def _answer(method: Method) -> type[Any]:
    return method.item if isinstance(method, Stream) else method.result


def _describe(method: Method, schema_of: dict[type[Any], Any], components: dict[str, Any]) -> dict[str, Any]:
    shape = components[method.params.__name__]
    required = shape.get("required", [])
    described: dict[str, Any] = {
        "name": method.name,
        "summary": method.doc,
        "paramStructure": "by-name",
        "params": [
            {"name": name, "required": name in required, "schema": schema}
            for name, schema in shape["properties"].items()
        ],
        "result": {"name": "result", "schema": schema_of[_answer(method)]},
        "x-access": method.access.value,
    }
    if isinstance(method, Stream):
        described["result"] = {"name": "subscription", "schema": schema_of[Subscribed]}
        described["x-item"] = schema_of[method.item]
    return described


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(render())
