"""The hello: two nodes prove to each other that they are of the same network, before anything else.

    dialler                                     listener
       | HelloOpen{network, nonce}                  |
       |------------------------------------------->|  other network: HelloRefusal, and the connection is cut
       | HelloProof{nonce, proof}                   |
       |<-------------------------------------------|
       | HelloConfirm{proof, agent, addresses}      |
       |------------------------------------------->|  the listener admits the dialler
       | HelloDone{agent, addresses}                |
       |<-------------------------------------------|  the dialler admits the listener

A proof is a keyed BLAKE3 hash over the role, both peer ids (which Noise has proven) and both nonces, under a
key derived from the network's id and shared key. So it can neither be replayed, nor reflected (the roles
differ), nor relayed from another connection (the ids differ). Without the key a stranger learns no agent and
no address, and no more of the network than its id (a hash), when it is dialled itself. An open network's key is
empty: there the hello only keeps networks apart. The key must be long and random: a short one could be guessed
from one proof.

No IO, no clock, no randomness here: messages, proofs and their checks.
"""

import hmac
from typing import Annotated, TypeVar

import msgspec
from blake3 import blake3

from node.swarm.multiaddrs import MULTIADDR_SIZE_MAX, Address, parse_multiaddr
from protocol import codec
from protocol.errors import MalformedRecord
from protocol.identity import KEY_SIZE, NetworkId, NodeId

HELLO_PROTOCOL = "/gpunode/hello/1"
HELLO_SIZE_MAX = 4096
"""Largest message of the hello, in bytes."""
NONCE_SIZE = 32
AGENT_SIZE_MAX = 64
ADDRESSES_MAX = 8

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_SIZE, max_length=NONCE_SIZE)]
Proof = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Agent = Annotated[str, msgspec.Meta(max_length=AGENT_SIZE_MAX)]
Addresses = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=MULTIADDR_SIZE_MAX)], ...], msgspec.Meta(max_length=ADDRESSES_MAX)
]


class HelloOpen(msgspec.Struct, frozen=True, kw_only=True, tag_field="hello", tag="open"):
    """The dialler's first word."""

    network: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    nonce: Nonce


class HelloProof(msgspec.Struct, frozen=True, kw_only=True, tag_field="hello", tag="proof"):
    """The listener's nonce and proof."""

    nonce: Nonce
    proof: Proof


class HelloConfirm(msgspec.Struct, frozen=True, kw_only=True, tag_field="hello", tag="confirm"):
    """The dialler's proof, and who it is."""

    proof: Proof
    agent: Agent
    addresses: Addresses = ()


class HelloDone(msgspec.Struct, frozen=True, kw_only=True, tag_field="hello", tag="done"):
    """The listener admitted the dialler."""

    agent: Agent
    addresses: Addresses = ()


class HelloRefusal(msgspec.Struct, frozen=True, kw_only=True, tag_field="hello", tag="refusal"):
    """The listener will not have the dialler."""

    reason: Annotated[str, msgspec.Meta(max_length=64)]


Hello = HelloOpen | HelloProof | HelloConfirm | HelloDone | HelloRefusal
H = TypeVar("H", bound=Hello)

REASON_NETWORK = "network"
REASON_PROOF = "proof"
REASON_FULL = "full"
_REASONS = {
    REASON_NETWORK: "it belongs to another network, or has another network key",
    REASON_PROOF: "it does not accept our network key",
    REASON_FULL: "it has no room for more peers",
}


class HelloFailed(Exception):
    """The other side is not of this network, or does not speak the hello. The text is for people."""


def hello_key(network: NetworkId, network_key: bytes) -> bytes:
    """Return the 32-byte key under which the members of a network prove themselves."""
    framed = len(network).to_bytes(4, "big") + network + network_key
    return blake3(framed, derive_key_context="gpunode/1 hello key").digest()


def dialler_proof(key: bytes, dialler: NodeId, listener: NodeId, nonces: tuple[bytes, bytes]) -> bytes:
    """Return the dialler's proof. `nonces` are the dialler's and the listener's, in this order."""
    return _proof(key, b"dialler", dialler, listener, nonces)


def listener_proof(key: bytes, dialler: NodeId, listener: NodeId, nonces: tuple[bytes, bytes]) -> bytes:
    """Return the listener's proof. `nonces` are the dialler's and the listener's, in this order."""
    return _proof(key, b"listener", dialler, listener, nonces)


def is_proof_valid(expected: bytes, received: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(expected, received)


def encode_hello(message: Hello) -> bytes:
    """Return the canonical CBOR of a message."""
    return codec.encode(message)


def decode_hello_untrusted(data: bytes, expected: type[H]) -> H:
    """Return the message in `data`. Raises HelloFailed for a refusal, MalformedRecord for anything else."""
    tree = codec.decode_tree_untrusted(data, HELLO_SIZE_MAX)
    try:
        message = msgspec.convert(tree, Hello, strict=True)
    except (msgspec.ValidationError, ValueError):
        raise MalformedRecord("not a message of the hello") from None
    if isinstance(message, HelloRefusal):
        raise HelloFailed(_REASONS.get(message.reason, "it refused us"))
    if not isinstance(message, expected):
        raise MalformedRecord(f"a {expected.__name__} belongs here")
    return message


def agent_untrusted(text: str) -> str:
    """Return a peer's agent as it may be shown: printable ASCII only."""
    return "".join(character for character in text if character.isascii() and character.isprintable())


def addresses_untrusted(texts: tuple[str, ...], node: NodeId) -> tuple[Address, ...]:
    """Return those of a peer's addresses that parse and lead to the peer itself."""
    addresses = []
    for text in texts:
        try:
            address = parse_multiaddr(text)
        except ValueError:
            continue
        if address.node == node:
            addresses.append(address)
    return tuple(addresses)


def _proof(key: bytes, role: bytes, dialler: NodeId, listener: NodeId, nonces: tuple[bytes, bytes]) -> bytes:
    if len(dialler) != KEY_SIZE or len(listener) != KEY_SIZE or any(len(n) != NONCE_SIZE for n in nonces):
        raise ValueError("ids have 32 bytes and nonces too")
    # Fixed lengths but for the role, which goes last: the concatenation is unambiguous.
    return blake3(dialler + listener + nonces[0] + nonces[1] + role, key=key).digest()
