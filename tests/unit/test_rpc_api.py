import inspect
import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from support.rpc_daemon import CannedDaemon

from node.errors import Forbidden
from node.rpc import api, discover
from node.rpc.api import daemon, jobs

COMMITTED = Path(__file__).parents[2] / "contrib" / "schemas" / "openrpc.json"


def test_rpc_committed_openrpc_document_is_what_the_types_say() -> None:
    assert COMMITTED.read_bytes() == discover.render(), (
        "run: python -m node.rpc.discover contrib/schemas/openrpc.json"
    )


def references(tree: Any) -> set[str]:
    if isinstance(tree, dict):
        found = {tree["$ref"]} if "$ref" in tree else set()
        return found.union(*(references(value) for value in tree.values()))
    return set().union(*(references(item) for item in tree)) if isinstance(tree, list) else set()


def test_rpc_openrpc_document_describes_every_method_and_resolves() -> None:
    document = discover.document()
    assert {method["name"] for method in document["methods"]} == api.METHODS.keys()
    schemas = document["components"]["schemas"]
    assert references(document) == {f"#/components/schemas/{name}" for name in schemas}
    logs = next(method for method in document["methods"] if method["name"] == "jobs.logs")
    assert logs["x-item"] == {"$ref": "#/components/schemas/LogChunk"}
    assert [param["name"] for param in logs["params"] if param["required"]] == ["job"]


def test_rpc_document_converts_to_the_result_of_discover() -> None:
    assert msgspec.convert(json.loads(discover.render()), daemon.DiscoverResult).openrpc == "1.3.2"


@pytest.mark.parametrize("method", api.METHODS.values(), ids=lambda method: method.name)
def test_rpc_method_follows_the_rules_of_the_interface(method: api.Method) -> None:
    assert method.doc.endswith(".")
    assert method.params.__struct_config__.forbid_unknown_fields
    answer = method.item if isinstance(method, api.Stream) else method.result
    assert inspect.isclass(answer)
    assert issubclass(answer, msgspec.Struct)
    for shape in (method.params, answer):
        for field in msgspec.structs.fields(shape):
            assert float not in (field.type, *get_args(field.type)), f"{shape.__name__}.{field.name} is a float"


def test_rpc_registry_wants_a_handler_for_each_method_and_no_others() -> None:
    handlers = dict(CannedDaemon().handlers())
    assert api.unhandled(handlers) == ()
    del handlers["jobs.run"]
    assert api.unhandled(handlers) == ("jobs.run",)
    with pytest.raises(ValueError, match=r"jobs\.rnu"):
        api.unhandled({"jobs.rnu": None})


def test_rpc_caller_owns_its_own_and_an_administrator_everything() -> None:
    api.Caller(1000, 1000, 1, is_admin=False).require_owner(1000)
    api.Caller(0, 0, 1, is_admin=True).require_owner(1000)
    with pytest.raises(Forbidden, match="job x belongs to uid 1000") as caught:
        api.Caller(1001, 1001, 1, is_admin=False).require_owner(1000, "job x")
    assert caught.value.hint


def test_rpc_log_bytes_cross_as_base64() -> None:
    chunk = jobs.LogChunk(stream=jobs.LogStream.STDOUT, offset=0, data=bytes(range(256)))
    line = msgspec.json.encode(chunk)
    assert json.loads(line)["data"].startswith("AAECAw")
    assert msgspec.json.decode(line, type=jobs.LogChunk) == chunk
