"""The private parts of aioquic that the tunnel stands on: each is named, and missed by name when it is gone.

aioquic is pinned exactly (contrib/adr/0002). When the pin moves, this file is the first to say what broke.
"""

import ast
import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from aioquic import tls
from aioquic.quic import connection as quic
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.retry import QuicRetryTokenHandler
from aioquic.quic.stream import QuicStreamReceiver, QuicStreamSender

from node.tunnel import engine, gate, mutual
from node.tunnel.engine import QuicEngine
from node.tunnel.identity import TunnelIdentity

CONNECTION_ATTRIBUTES = {
    "_close_at": "when the connection ends for silence; None before the first datagram and after the end",
    "_close_event": "why it is ending, as soon as that is decided",
    "_close_pending": "a CONNECTION_CLOSE is about to be sent",
    "_crypto_streams": "bound on a stranger's TLS bytes",
    "_cryptos": "which key phase we send in",
    "_handshake_confirmed": "HANDSHAKE_DONE has come (client), the client is judged (server)",
    "_is_client": "which side we are",
    "_local_max_data": "flow control of the connection",
    "_local_max_streams_bidi": "how many streams a peer may open",
    "_local_max_streams_uni": "none of these",
    "_network_paths": "the peer's validated address",
    "_packet_number": "how many packets were sent under a key",
    "_remote_max_streams_bidi": "how many streams we may open",
    "_spaces": "whether a packet under the present key was acknowledged",
    "_state": "whether it is closing, draining, over",
    "_streams": "the streams that are not finished",
}
CONNECTION_METHODS = {
    "_initialize": ["self", "peer_cid"],
    "_handle_crypto_frame": ["self", "context", "frame_type", "buf"],
    "_get_or_create_stream": ["self", "frame_type", "stream_id"],
    "_write_connection_limits": ["self", "builder", "space"],
    "_write_stream_limits": ["self", "builder", "space", "stream"],
    "_on_max_stream_data_delivery": ["self", "delivery", "stream"],
}
TLS_ATTRIBUTES = {
    "_certificate_request": "whether the server asked for our certificate",
    "_is_client": "which side we are",
    "_peer_certificate": "the certificate to judge",
    "_request_client_certificate": "make the server ask",
    "_signature_algorithms": "Ed25519 only",
    "_supported_groups": "X25519 only",
}
TLS_METHODS = {
    "_set_peer_certificate": ["self", "certificate"],
    "_check_certificate_verify_signature": ["self", "verify"],
    "_server_handle_certificate": ["self", "input_buf"],
    "_client_handle_finished": ["self", "input_buf", "output_buf"],
}
STREAM_ATTRIBUTES = {"_buffer_start", "_buffer_stop", "_ranges", "_reset_error_code"}

HINT = "; aioquic has changed under the tunnel: read its new source before moving the pin"


@pytest.fixture
def dialling() -> QuicEngine:
    return QuicEngine.dialling(TunnelIdentity(bytes(32)), bytes(32), ("192.0.2.1", 1), 0.0)


def test_the_pin_is_the_version_that_was_read() -> None:
    assert version("aioquic") == "1.7.2"


@pytest.mark.parametrize("name", CONNECTION_ATTRIBUTES)
def test_connection_has(name: str, dialling: QuicEngine) -> None:
    assert name in vars(dialling), f"QuicConnection.{name} is gone ({CONNECTION_ATTRIBUTES[name]}){HINT}"


@pytest.mark.parametrize("name", TLS_ATTRIBUTES)
def test_tls_context_has(name: str, dialling: QuicEngine) -> None:
    assert name in vars(dialling.tls), f"tls.Context.{name} is gone ({TLS_ATTRIBUTES[name]}){HINT}"


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [(quic.QuicConnection, *item) for item in CONNECTION_METHODS.items()]
    + [(tls.Context, *item) for item in TLS_METHODS.items()],
)
def test_method_takes(owner: Any, name: str, parameters: list[str]) -> None:
    method = getattr(owner, name, None)
    assert method is not None, f"{owner.__name__}.{name} is gone{HINT}"
    assert list(inspect.signature(method).parameters) == parameters, f"{owner.__name__}.{name} has changed{HINT}"


def test_streams_have_what_buffers_are_counted_by() -> None:
    sender, receiver = QuicStreamSender(0, True), QuicStreamReceiver(0, True)
    for name in ("_buffer_start", "_buffer_stop", "_reset_error_code"):
        assert hasattr(sender, name), f"QuicStreamSender.{name} is gone{HINT}"
    assert len(receiver._ranges) == 0, f"QuicStreamReceiver._ranges is gone{HINT}"
    assert receiver.highest_offset == 0
    assert not receiver.is_finished


def test_limits_have_what_flow_control_writes(dialling: QuicEngine) -> None:
    for limit in (dialling._local_max_data, dialling._local_max_streams_bidi, dialling._local_max_streams_uni):
        assert {"value", "sent", "used"} <= set(vars(limit)), f"Limit has changed{HINT}"


def test_keys_and_spaces_have_what_key_updates_read(dialling: QuicEngine) -> None:
    assert dialling._cryptos[tls.Epoch.ONE_RTT].send.key_phase == 0
    assert dialling._spaces[tls.Epoch.ONE_RTT].largest_acked_packet == 0


def test_states_are_the_ones_that_were_read() -> None:
    assert [state.name for state in quic.QuicConnectionState] == [
        "FIRSTFLIGHT",
        "CONNECTED",
        "CLOSING",
        "DRAINING",
        "TERMINATED",
    ], HINT
    assert QuicPacketType.INITIAL
    assert tls.State.SERVER_EXPECT_CERTIFICATE_VERIFY


def test_frames_go_through_the_methods_that_are_overridden(dialling: QuicEngine) -> None:
    """The table of frame handlers must hold our methods, else the bounds are never looked at."""
    handlers = dialling._QuicConnection__frame_handlers
    assert handlers[0x06][0].__func__ is QuicEngine._handle_crypto_frame, HINT
    assert "self._get_or_create_stream(" in inspect.getsource(quic.QuicConnection._handle_stream_frame), HINT


def test_a_token_handler_takes_what_the_gate_gives() -> None:
    create = set(inspect.signature(QuicRetryTokenHandler.create_token).parameters)
    validate = set(inspect.signature(QuicRetryTokenHandler.validate_token).parameters)
    assert {"address", "original_destination_connection_id", "retry_source_connection_id", "now"} <= create, HINT
    assert {"address", "destination_cid", "token", "now"} <= validate, HINT


def test_every_private_name_that_is_used_is_named_here() -> None:
    """Otherwise the next one is used, and nobody is told when it goes."""
    named = {*CONNECTION_ATTRIBUTES, *CONNECTION_METHODS, *TLS_ATTRIBUTES, *TLS_METHODS, *STREAM_ATTRIBUTES}
    for module in (engine, mutual, gate):
        source = Path(inspect.getfile(module)).read_text()
        tree = ast.parse(source)
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        used, assigned = set(), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                (assigned if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        ours = {name for name in assigned if not _is_aioquics(name)} | {
            name for name in defined if not _is_aioquics(name)
        }
        unnamed = {name for name in used | assigned if name not in ours} - named
        assert not unnamed, f"{module.__name__} uses {sorted(unnamed)} of aioquic: name them in this file"


def _is_aioquics(name: str) -> bool:
    return any(f"self.{name}" in inspect.getsource(owner) for owner in (quic, tls)) or any(
        hasattr(owner, name) for owner in (quic.QuicConnection, tls.Context)
    )
