import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.errors import DaemonUnreachable, NotFound
from node.rpc import client, wire
from node.rpc.api import jobs
from node.rpc.method import ErrorBody, ErrorData
from protocol.errors import BadVoucher


def refused(line: bytes) -> wire.BadRequest:
    with pytest.raises(wire.BadRequest) as caught:
        wire.parse_untrusted(line)
    return caught.value


@pytest.mark.parametrize("request_id", [0, -3, 2**53, "x", "", None])
def test_rpc_request_keeps_its_id(request_id: object) -> None:
    line = msgspec.json.encode({"jsonrpc": "2.0", "id": request_id, "method": "m", "params": {"a": 1}})
    assert wire.parse_untrusted(line) == wire.Request(request_id, "m", {"a": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", wire.PARSE_ERROR),
        (b"\xff\xfe", wire.PARSE_ERROR),
        (b"[" * 100_000, wire.PARSE_ERROR),
        (b'{"a":' * 100_000, wire.PARSE_ERROR),
        (b"9" * 10_000, wire.PARSE_ERROR),
        (b'[{"jsonrpc":"2.0","id":1,"method":"m"}]', wire.INVALID_REQUEST),
        (b"1", wire.INVALID_REQUEST),
        (b'{"id":1,"method":"m"}', wire.INVALID_REQUEST),
        (b'{"jsonrpc":"1.0","id":1,"method":"m"}', wire.INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"m"}', wire.INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":true,"method":"m"}', wire.INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":{},"method":"m"}', wire.INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":1,"method":7}', wire.INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":1,"method":"m","params":[1]}', wire.INVALID_PARAMS),
        (b'{"jsonrpc":"2.0","id":1,"method":"m","params":null}', wire.INVALID_PARAMS),
    ],
)
def test_rpc_bad_line_is_refused_with_its_number(line: bytes, code: int) -> None:
    assert refused(line).body.code == code


def test_rpc_bad_request_echoes_the_id_when_there_is_one() -> None:
    assert refused(b'{"jsonrpc":"2.0","id":"q","method":7}').request_id == "q"
    assert refused(b"nonsense").request_id is None


def test_rpc_notification_wants_no_answer() -> None:
    assert wire.parse_untrusted(b'{"jsonrpc":"2.0","method":"jobs.cancel","params":{"job":"-"}}') is None


@settings(max_examples=300)
@given(
    st.binary(max_size=200) | st.text(alphabet='{}[]":,0123456789eE.-jsonrpcidmethodparams \\u\n', max_size=120)
)
def test_rpc_parser_raises_nothing_but_bad_request(junk: bytes | str) -> None:
    try:
        wire.parse_untrusted(junk if isinstance(junk, bytes) else junk.encode())
    except wire.BadRequest as bad:
        assert bad.body.code in {wire.PARSE_ERROR, wire.INVALID_REQUEST, wire.INVALID_PARAMS}


@given(st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line), max_size=8), st.data())
def test_rpc_lines_come_out_however_they_are_cut(lines: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    buffer = wire.LineBuffer()
    out = []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        out += buffer.feed(whole[start:end])
    assert out == [line for line in lines if line.strip()]


@pytest.mark.parametrize("end", [b"", b"\n", b"\n{}\n"])
def test_rpc_line_has_a_greatest_length(end: bytes) -> None:
    buffer = wire.LineBuffer()
    assert buffer.feed(b"x" * wire.LINE_SIZE_MAX) == []
    with pytest.raises(wire.BadRequest, match="at most"):
        buffer.feed(b"x" + end)


def test_rpc_params_refuse_unknown_names_and_bad_ranges() -> None:
    for params, says in (
        ({"job": "a", "jbo": 1}, "jbo"),
        ({}, "job"),
        ({"job": ""}, "length"),
        ({"job": 3}, "int"),
        ({"job": "../x"}, "regex"),
    ):
        with pytest.raises(wire.BadRequest, match=says) as caught:
            wire.convert_params(wire.Request(1, "jobs.show", params), jobs.JobParams)
        assert caught.value.body.code == wire.INVALID_PARAMS


def test_rpc_errors_keep_number_message_and_hint() -> None:
    assert wire.body_of(NotFound("no job x", "see: gpunode jobs")) == ErrorBody(
        2303, "no job x", ErrorData("see: gpunode jobs")
    )
    body = wire.body_of(BadVoucher())
    assert body.code == 1005
    assert "voucher" in body.message


def test_rpc_error_comes_back_as_its_own_class() -> None:
    error = client.error_from(ErrorBody(2303, "no job x", ErrorData("look")))
    assert type(error) is NotFound
    assert (str(error), error.hint) == ("no job x", "look")
    assert type(client.error_from(ErrorBody(2901, "m"))) is DaemonUnreachable
    unknown = client.error_from(ErrorBody(-32601, "no method"))
    assert isinstance(unknown, client.RemoteError)
    assert unknown.number == -32601
