"""Invite tokens round-trip, and whatever happens to one on its way is noticed and named."""

import pytest

from node.errors import ConfigError
from node.swarm import invite
from node.swarm.invite import ADDRESSES_MAX, PREFIX, Invite, decode_invite, encode_invite
from protocol import codec
from protocol.identity import network_id, peer_id

ADDRESS = f"/ip4/192.0.2.7/tcp/4001/p2p/{peer_id(bytes(range(32)))}"
INVITE = Invite(
    network_name="lab",
    network_key=b"k" * 32,
    addresses=(ADDRESS, ADDRESS.replace("ip4/192.0.2.7", "dns/gpu.example")),
)


@pytest.mark.parametrize(
    "original",
    [INVITE, Invite(network_name="open"), Invite(network_name="ümlaut/ zero", network_key=b"\0\0\0\1")],
)
def test_tokens_round_trip(original: Invite):
    token = encode_invite(original)
    assert token.startswith("gpunode-invite-1")
    assert token.isascii()
    assert " " not in token
    assert decode_invite(token) == original
    assert decode_invite(f"\n  {token[:30]}\n  {token[30:]} \n") == original


def test_a_token_names_its_network():
    assert INVITE.network == network_id("lab", b"k" * 32)


def test_the_text_of_version_1_never_changes():
    assert encode_invite(Invite(network_name="lab", network_key=b"key")) == TOKEN_OF_VERSION_1


TOKEN_OF_VERSION_1 = "gpunode-invite-12AuaQpJqGD2mtR3nKLRXwsXBMAxgdPF7XzkKP9a6aWfpXxXndqcjy75zYC3c2ShsR6dp"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda token: "", "not an invite token"),
        (lambda token: "hello", "not an invite token"),
        (lambda token: token.replace(PREFIX + "1", PREFIX + "2"), "format 2"),
        (lambda token: PREFIX, r"format \(none\)"),
        (lambda token: PREFIX + "1", "mistyped or cut off"),
        (lambda token: token[:-1], "mistyped or cut off"),
        (lambda token: token[:-5], "mistyped or cut off"),
        (lambda token: token + "x", "mistyped or cut off"),
        (lambda token: token[:40] + ("x" if token[40] != "x" else "y") + token[41:], "mistyped or cut off"),
        (lambda token: token[:40] + token[41] + token[40] + token[42:], "mistyped or cut off"),
        (lambda token: token[:40] + "0" + token[41:], "'0', which never occurs"),
        (lambda token: token[:40] + "é" + token[41:], "never occurs"),
        (lambda token: token + "x" * 5000, "at most"),
    ],
)
def test_damaged_tokens_are_refused_with_the_reason(change, reason: str):
    with pytest.raises(ConfigError, match=reason):
        decode_invite(change(encode_invite(INVITE)))


def test_a_token_made_by_a_liar_is_refused():

    for content in (
        {"network_name": ""},
        {"network_name": "x", "addresses": ["/ip4/1.2.3.4/tcp/1"]},
        {"x": 1},
        [],
    ):
        with pytest.raises(ConfigError, match="content is wrong"):
            decode_invite(_token_of(codec.encode(content)))


def _token_of(body: bytes) -> str:
    return PREFIX + "1" + invite._to_base58(body + invite._checksum(body))


@pytest.mark.parametrize(
    "fields",
    [
        {"network_name": ""},
        {"network_name": "x" * 65},
        {"network_name": "x", "network_key": b"k" * 65},
        {"network_name": "x", "addresses": (ADDRESS,) * (ADDRESSES_MAX + 1)},
        {"network_name": "x", "addresses": ("/ip4/192.0.2.7/tcp/4001",)},
        {"network_name": "x", "addresses": ("nonsense",)},
    ],
)
def test_invites_that_could_not_be_read_are_not_written(fields):
    with pytest.raises(ValueError):
        encode_invite(Invite(**fields))
