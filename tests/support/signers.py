"""Signers for tests: an Ed25519 key from a small number, so that a test names its people by numbers."""

from functools import cache

from nacl.signing import SigningKey

from protocol.identity import NodeId, network_id

NETWORK = network_id("test")
OTHER_NETWORK = network_id("test", b"a pool's key")


class SeededSigner:
    """A `protocol.identity.Signer` whose private key is in the open."""

    def __init__(self, seed: bytes) -> None:
        self._key = SigningKey(seed)
        self.public_key = bytes(self._key.verify_key)
        self.node = NodeId(self.public_key)

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message).signature


@cache
def signer(number: int) -> SeededSigner:
    """Return the signer of person `number`."""
    return SeededSigner(number.to_bytes(32, "big"))
