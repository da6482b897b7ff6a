"""rpc: call any method of the daemon's interface from a shell."""

import sys
from typing import Any

import click
import msgspec

from node.cli.connection import connect
from node.cli.output import json_option, print_json, say, table
from node.errors import BadArgument
from node.rpc.api import METHODS, Call, Stream


def _complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    from click.shell_completion import CompletionItem

    return [
        CompletionItem(name, help=method.doc) for name, method in METHODS.items() if name.startswith(incomplete)
    ]


@click.command()
@click.argument("method", required=False, shell_complete=_complete)
@click.argument("params", required=False)
@json_option
def rpc(method: str | None, params: str | None, as_json: bool) -> None:
    """Call METHOD of the daemon's interface.

    PARAMS is a JSON object. Prints the result as JSON; of a subscription every item, one a line. Without METHOD
    lists the methods; the whole interface is described by: gpunode rpc rpc.discover
    """
    if method is None:
        _list_methods(as_json=as_json)
        return
    try:
        tree = msgspec.json.decode(params or "{}")
    except msgspec.DecodeError as error:
        raise BadArgument(f"PARAMS is not JSON: {error}", """write it as an object: '{"job": "-"}'""") from None
    if not isinstance(tree, dict):
        raise BadArgument("PARAMS is not a JSON object", """write it as an object: '{"job": "-"}'""")
    known = METHODS.get(method)
    with connect() as client:
        if isinstance(known, Stream):
            for item in client.stream(known, _typed(known, tree)):
                sys.stdout.write(msgspec.json.encode(item).decode() + "\n")
                sys.stdout.flush()
        else:
            print_json(client.call_raw(method, tree))


def _typed(method: Call[Any, Any] | Stream[Any, Any], tree: dict[str, Any]) -> Any:  # noqa: ANN401 - its params
    try:
        return msgspec.convert(tree, method.params, strict=True)
    except msgspec.ValidationError as error:
        raise BadArgument(f"bad params for {method.name}: {error}", "see: gpunode rpc rpc.discover") from None


def _list_methods(*, as_json: bool) -> None:
    if as_json:
        print_json({"methods": [{"name": name, "doc": method.doc} for name, method in METHODS.items()]})
        return
    table(
        ("method", "who", "what"),
        ((method.name, method.access.value, method.doc) for method in METHODS.values()),
    )
    say("each is described by: gpunode rpc rpc.discover")
