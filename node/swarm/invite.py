"""Invite tokens: how one person lets another into a network, as one line of text.

A token holds the network's name, its shared key and some addresses of its members. It looks like
`gpunode-invite-1XXXX`: a version digit, then the base58 (no two of its characters look alike) of canonical CBOR
and four bytes of its BLAKE3 hash. Whoever has the token of a private network is a member, so it must travel
like a password. Never loads libp2p: the command line uses it.
"""

from typing import Annotated

import msgspec
from blake3 import blake3

from node.errors import ConfigError
from node.swarm.multiaddrs import MULTIADDR_SIZE_MAX, parse_multiaddr
from protocol import codec
from protocol.errors import MalformedRecord
from protocol.identity import NetworkId, network_id

PREFIX = "gpunode-invite-"
VERSION = "1"
NETWORK_NAME_SIZE_MAX = 64
NETWORK_KEY_SIZE_MAX = 64
ADDRESSES_MAX = 8
TOKEN_SIZE_MAX = 4096
"""Longest token, in characters."""
_CHECKSUM_SIZE = 4
_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BODY_SIZE_MAX = 3 * TOKEN_SIZE_MAX // 4


class Invite(msgspec.Struct, frozen=True, kw_only=True):
    """What a token says."""

    network_name: Annotated[str, msgspec.Meta(min_length=1, max_length=NETWORK_NAME_SIZE_MAX)]
    network_key: Annotated[bytes, msgspec.Meta(max_length=NETWORK_KEY_SIZE_MAX)] = b""
    """Empty for an open network."""
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=MULTIADDR_SIZE_MAX)], ...],
        msgspec.Meta(max_length=ADDRESSES_MAX),
    ] = ()
    """Multiaddrs with /p2p/, for `bootstrap`."""

    def __post_init__(self) -> None:
        for text in self.addresses:
            if parse_multiaddr(text).node is None:
                raise ValueError(f"{text!r} does not say which node it leads to (/p2p/...)")

    @property
    def network(self) -> NetworkId:
        """The id of the network that the token lets in."""
        return network_id(self.network_name, self.network_key)


def encode_invite(invite: Invite) -> str:
    """Return `invite` as text. Raises ValueError when a field is too long to be an invite's."""
    checked = msgspec.convert(msgspec.to_builtins(invite, builtin_types=(bytes,)), Invite)
    body = codec.encode(checked)
    text = PREFIX + VERSION + _to_base58(body + _checksum(body))
    if len(text) > TOKEN_SIZE_MAX:
        raise ValueError(f"the token would have more than {TOKEN_SIZE_MAX} characters: give fewer addresses")
    return text


def decode_invite(text: str) -> Invite:
    """Return what the token `text` says; white space around and inside it is ignored.

    Raises ConfigError with the reason: not a token, a newer version, mistyped or cut off.
    """
    token = "".join(text[: 2 * TOKEN_SIZE_MAX].split())
    if not token.startswith(PREFIX):
        raise ConfigError(
            f"this is not an invite token: one begins with {PREFIX}", hint="copy the whole line that you were sent"
        )
    if len(token) > TOKEN_SIZE_MAX:
        raise ConfigError(f"an invite token has at most {TOKEN_SIZE_MAX} characters")
    version, encoded = token[len(PREFIX) :][:1], token[len(PREFIX) + 1 :]
    if version != VERSION:
        raise ConfigError(
            f"this invite token has the format {version or '(none)'}, and this gpunode reads {VERSION}",
            hint="upgrade the older of the two gpunodes",
        )
    data = _from_base58(encoded)
    body, checksum = data[:-_CHECKSUM_SIZE], data[-_CHECKSUM_SIZE:]
    if len(data) <= _CHECKSUM_SIZE or _checksum(body) != checksum:
        raise ConfigError(
            "the invite token is mistyped or cut off (its checksum does not match)",
            hint="copy it again, all of it",
        )
    try:
        return codec.decode_untrusted(body, Invite, _BODY_SIZE_MAX)
    except MalformedRecord as error:
        raise ConfigError(f"the invite token's content is wrong: {error}") from None


def _checksum(body: bytes) -> bytes:
    return blake3(body, derive_key_context="gpunode/1 invite checksum").digest(_CHECKSUM_SIZE)


def _to_base58(data: bytes) -> str:
    # A leading one keeps leading zero bytes, so that the number says how long the data is.
    number = int.from_bytes(b"\1" + data, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))


def _from_base58(text: str) -> bytes:
    number = 0
    for character in text:
        digit = _ALPHABET.find(character)
        if digit < 0:
            raise ConfigError(
                f"the invite token holds {character!r}, which never occurs in one", hint="copy it again, all of it"
            )
        number = number * 58 + digit
    data = number.to_bytes((number.bit_length() + 7) // 8, "big")
    return data[1:] if data[:1] == b"\1" else b""
