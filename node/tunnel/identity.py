"""A tunnel key as TLS wants to see it: an Ed25519 key in a self-signed certificate, made in memory.

The certificate carries the key and nothing else of meaning: names, dates and its own signature are not judged by
the other side, which compares the key with the one that the lease's signed records name. Refuses to read or write
files, and to make keys: the daemon makes one per lease.
"""

import datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.x509.oid import NameOID

from protocol.identity import KEY_SIZE

_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpunode tunnel")])
# Fixed dates and serial number: nobody judges them, and they would tell strangers when a lease began.
_NOT_BEFORE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(2200, 1, 1, tzinfo=datetime.UTC)


class TunnelIdentity:
    """One side's tunnel key with its certificate."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != KEY_SIZE:
            raise ValueError(f"an Ed25519 seed has {KEY_SIZE} bytes, not {len(seed)}")
        self.private_key = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = self.private_key.public_key().public_bytes_raw()
        """The 32 bytes that the other side pins."""
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(_NAME)
            .issuer_name(_NAME)
            .public_key(self.private_key.public_key())
            .serial_number(1)
            .not_valid_before(_NOT_BEFORE)
            .not_valid_after(_NOT_AFTER)
            .sign(self.private_key, None)
        )
