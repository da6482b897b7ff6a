"""Ids: peer ids are libp2p's own, and every hash keeps apart what must not be confused."""

import pytest
from libp2p.crypto.ed25519 import Ed25519PublicKey
from libp2p.peer.id import ID
from support.signers import signer

from protocol.identity import (
    KEY_SIZE,
    SIGNATURE_SIZE,
    hash_bytes,
    is_signature_valid,
    lease_id,
    network_id,
    node_from_peer_id,
    peer_id,
)
from protocol.records.lease import CommittedTerms, chain_key, grant_commitment

KEYS = [signer(number).public_key for number in range(1, 30)] + [bytes(32), b"\xff" * 32, bytes(31) + b"\x01"]


@pytest.mark.parametrize("key", KEYS)
def test_a_peer_id_is_the_one_that_libp2p_makes(key: bytes) -> None:
    theirs = ID.from_pubkey(Ed25519PublicKey.from_bytes(key))
    assert peer_id(key) == theirs.to_base58()
    assert node_from_peer_id(theirs.to_base58()) == key


def test_a_peer_id_looks_familiar() -> None:
    assert peer_id(signer(1).public_key).startswith("12D3KooW")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "12D3KooW",
        "1" + peer_id(KEYS[0]),
        peer_id(KEYS[0])[1:],
        peer_id(KEYS[0])[:-1],
        peer_id(KEYS[0]) + "1",
        peer_id(KEYS[0]).replace("1", "l", 1),
        peer_id(KEYS[0]) + "\n",
        " " + peer_id(KEYS[0]),
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "z" * 64,
        "1" * 64,
        "2" * 10_000,
        "\u0661" * 52,
    ],
)
def test_what_is_no_peer_id(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not (a|the) peer id") as caught:
        node_from_peer_id(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_node_id_has_32_bytes(size: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        peer_id(bytes(size))


def test_networks_differ_by_name_and_by_key() -> None:
    ids = [
        network_id(name, key)
        for name, key in [
            ("main", b""), ("demo", b""), ("main", b"k"), ("mai", b"nk"), ("maink", b""), ("", b"main"), ("", b"")
        ]
    ]  # fmt: skip
    assert len(set(ids)) == len(ids)
    assert all(len(each) == 32 for each in ids)


def test_a_lease_id_names_provider_renter_and_nonce() -> None:
    provider, renter = signer(1).node, signer(2).node
    nonce = bytes(range(16))
    lease = lease_id(provider, renter, nonce)
    assert lease == hash_bytes(provider + renter + nonce)[:16]
    assert len({lease, lease_id(renter, provider, nonce), lease_id(provider, renter, bytes(16))}) == 3


def test_a_chain_is_of_one_provider_and_one_device() -> None:
    keys = {chain_key(signer(number).node, uuid) for number in (1, 2) for uuid in ("GPU-1", "GPU-2")}
    assert len(keys) == 4


def test_a_commitment_hides_and_binds() -> None:
    terms = CommittedTerms(salt=bytes(32), renter=signer(2).node, price=5, job_hash=bytes(32))
    others = [
        CommittedTerms(salt=b"\x01" + bytes(31), renter=signer(2).node, price=5, job_hash=bytes(32)),
        CommittedTerms(salt=bytes(32), renter=signer(3).node, price=5, job_hash=bytes(32)),
        CommittedTerms(salt=bytes(32), renter=signer(2).node, price=6, job_hash=bytes(32)),
        CommittedTerms(salt=bytes(32), renter=signer(2).node, price=5, job_hash=b"\x01" + bytes(31)),
    ]
    assert len({grant_commitment(each) for each in (terms, *others)}) == 5


def test_a_signature_is_of_one_key_and_one_message() -> None:
    message = b"message"
    signature = signer(1).sign(message)
    assert is_signature_valid(signer(1).public_key, message, signature)
    assert not is_signature_valid(signer(2).public_key, message, signature)
    assert not is_signature_valid(signer(1).public_key, message + b"\0", signature)
    assert not is_signature_valid(signer(1).public_key, b"", signature)


def test_every_flipped_bit_of_a_signature_counts() -> None:
    message, key = b"message", signer(1).public_key
    signature = signer(1).sign(message)
    for index in range(0, SIGNATURE_SIZE * 8, 7):
        flipped = bytearray(signature)
        flipped[index // 8] ^= 1 << index % 8
        assert not is_signature_valid(key, message, bytes(flipped))


@pytest.mark.parametrize(
    ("key", "signature"),
    [
        (b"", bytes(SIGNATURE_SIZE)),
        (bytes(KEY_SIZE), b""),
        (bytes(KEY_SIZE + 1), bytes(SIGNATURE_SIZE)),
        (bytes(KEY_SIZE), bytes(SIGNATURE_SIZE - 1)),
        (bytes(KEY_SIZE), bytes(SIGNATURE_SIZE)),
        (b"\x01" + bytes(31), b"\x01" + bytes(63)),
    ],
)
def test_degenerate_keys_and_signatures_are_invalid(key: bytes, signature: bytes) -> None:
    """The last two are of small order: some verifiers take such a signature for any message."""
    assert not is_signature_valid(key, b"any message", signature)


def test_a_signature_has_one_spelling() -> None:
    """S + L verifies by the equation alone, and would give a record a second id."""
    order = 2**252 + 27742317777372353535851937790883648493
    signature = signer(1).sign(b"message")
    malleable = int.from_bytes(signature[32:], "little") + order
    assert malleable < 2**256
    other = signature[:32] + malleable.to_bytes(32, "little")
    assert not is_signature_valid(signer(1).public_key, b"message", other)
