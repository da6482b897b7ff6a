"""Who signs, and in which network.

A node's id is its Ed25519 public key (32 bytes), shown to people as the libp2p peer id of that key. A network
has a name and may have a shared key; the hash of both is mixed into every signature, so that no record can be
replayed from one pool into another. Refuses to hold private keys: `node.keys` does.
"""

from typing import NewType, Protocol

import nacl.bindings
from blake3 import blake3
from nacl.exceptions import BadSignatureError

NodeId = NewType("NodeId", bytes)
NetworkId = NewType("NetworkId", bytes)

KEY_SIZE = 32
SIGNATURE_SIZE = 64
HASH_SIZE = 32
LEASE_ID_SIZE = 16

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
# The identity multihash (0x00, length 36) of libp2p's protobuf for an Ed25519 key (type 1, 32 bytes).
# Source: libp2p specs, peer-ids/peer-ids.md.
_PEER_ID_PREFIX = bytes.fromhex("0024") + bytes.fromhex("08011220")


class Signer(Protocol):
    """Something that signs with one Ed25519 key without showing it."""

    @property
    def public_key(self) -> bytes:
        """The 32-byte Ed25519 public key."""

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of `message`."""


def hash_bytes(data: bytes) -> bytes:
    """Return the 32-byte BLAKE3 hash of `data`."""
    return blake3(data).digest()


def is_signature_valid(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether `signature` is `public_key`'s Ed25519 signature of `message` (RFC 8032)."""
    if len(public_key) != KEY_SIZE or len(signature) != SIGNATURE_SIZE:
        return False
    try:
        nacl.bindings.crypto_sign_open(signature + message, public_key)
    except BadSignatureError:
        return False
    return True


def network_id(name: str, key: bytes = b"") -> NetworkId:
    """Return the id of the network `name` with the shared `key` (empty for an open network)."""
    encoded = name.encode()
    framed = len(encoded).to_bytes(4, "big") + encoded + key
    return NetworkId(blake3(framed, derive_key_context="gpunode/1 network id").digest())


def lease_id(provider: bytes, renter: bytes, nonce: bytes) -> bytes:
    """Return the 16-byte id of the lease that the bid with `nonce` asks for."""
    return hash_bytes(provider + renter + nonce)[:LEASE_ID_SIZE]


def peer_id(node: bytes) -> str:
    """Return the libp2p peer id (base58btc text, "12D3Koo...") of an Ed25519 public key."""
    if len(node) != KEY_SIZE:
        raise ValueError("a node id has 32 bytes")
    number = int.from_bytes(_PEER_ID_PREFIX + node, "big")
    text = ""
    while number:
        number, digit = divmod(number, 58)
        text = _BASE58[digit] + text
    # One leading zero byte (the identity multihash code) is one leading "1".
    return "1" + text


def node_from_peer_id(text: str) -> NodeId:
    """Return the public key inside a libp2p peer id; raise ValueError when there is none of Ed25519."""
    number = 0
    if not 1 < len(text) <= 64:
        raise ValueError(f"{text[:80]!r} is not a peer id")
    for character in text:
        digit = _BASE58.find(character)
        if digit < 0:
            raise ValueError(f"{text!r} is not a peer id: {character!r} is not base58")
        number = number * 58 + digit
    raw = number.to_bytes((number.bit_length() + 7) // 8, "big")
    # Compared as a whole: base58 alone would also accept further leading "1"s, and a node has one name.
    if len(raw) != KEY_SIZE + 5 or peer_id(raw[5:]) != text:
        raise ValueError(f"{text!r} is not the peer id of an Ed25519 key")
    return NodeId(raw[5:])
