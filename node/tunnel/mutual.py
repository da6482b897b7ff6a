"""TLS 1.3 in which both sides must prove a pinned Ed25519 key, on top of aioquic's TLS context.

aioquic has no public way for a server to demand a client's certificate, so this subclass overrides the steps at
which certificates are taken and judged. A key counts as the peer's only after its CertificateVerify: before that,
anyone could have copied the certificate. Refuses session tickets, early data, every signature but Ed25519 and
every key exchange but X25519 (fewer kinds to attack before the peer is known).
"""

from collections.abc import Callable
from typing import Any

from aioquic import tls
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ed25519

REFUSED_ALERTS = frozenset(
    int(alert)
    for alert in (
        tls.AlertDescription.bad_certificate,
        tls.AlertDescription.unsupported_certificate,
        tls.AlertDescription.certificate_unknown,
        tls.AlertDescription.unknown_ca,
        tls.AlertDescription.access_denied,
        tls.AlertDescription.decrypt_error,
        tls.AlertDescription.certificate_required,
    )
)
"""TLS alerts (RFC 8446, section 6.2) that mean: your key, or your proof of it, is not good enough."""


class KeyNotAdmitted(tls.Alert):
    """The peer has a key that we do not want to speak to."""

    description = tls.AlertDescription.access_denied


class BadPeerCertificate(tls.Alert):
    """The peer sent something other than one Ed25519 certificate."""

    description = tls.AlertDescription.bad_certificate


class CertificateMissing(tls.Alert):
    """The client sent no certificate."""

    description = tls.AlertDescription.certificate_required


class ServerIsOpen(tls.Alert):
    """The server would speak to anyone: it is not the endpoint of a lease."""

    description = tls.AlertDescription.handshake_failure


class MutualContext(tls.Context):
    """A TLS context armed with the judgement of the peer's key."""

    peer_key: bytes | None
    """The peer's key, once it has proven it over the transcript."""

    def arm(self, admits: Callable[[bytes], bool]) -> None:
        """Demand and judge the peer's key with `admits`. Must be called before the first message."""
        self._admits = admits
        self._claimed_key: bytes | None = None
        self.peer_key = None
        self._request_client_certificate = not self._is_client
        self._signature_algorithms = [tls.SignatureAlgorithm.ED25519]
        self._supported_groups = [tls.Group.X25519]

    def _set_peer_certificate(self, certificate: Any) -> None:  # noqa: ANN401 - a type of aioquic's
        if len(certificate.certificates) != 1:
            raise BadPeerCertificate("exactly one certificate is expected")
        super()._set_peer_certificate(certificate)
        try:
            key = self._peer_certificate.public_key()
        except (UnsupportedAlgorithm, ValueError) as error:
            raise BadPeerCertificate("the certificate's key cannot be read") from error
        if not isinstance(key, ed25519.Ed25519PublicKey):
            raise BadPeerCertificate("the certificate's key is not Ed25519")
        claimed = key.public_bytes_raw()
        if not self._admits(claimed):
            raise KeyNotAdmitted("this key is not the one that the lease names")
        self._claimed_key = claimed

    def _check_certificate_verify_signature(self, verify: Any) -> None:  # noqa: ANN401 - a type of aioquic's
        super()._check_certificate_verify_signature(verify)
        self.peer_key = self._claimed_key

    def _server_handle_certificate(self, input_buf: Any) -> None:  # noqa: ANN401 - a type of aioquic's
        super()._server_handle_certificate(input_buf)
        # aioquic goes on without authentication when the certificate list is empty, as RFC 8446 lets it.
        if self.state != tls.State.SERVER_EXPECT_CERTIFICATE_VERIFY:
            raise CertificateMissing("a certificate is required")

    def _client_handle_finished(self, input_buf: Any, output_buf: Any) -> None:  # noqa: ANN401 - types of aioquic's
        request = self._certificate_request
        if request is None or tls.SignatureAlgorithm.ED25519 not in (request.signature_algorithms or ()):
            raise ServerIsOpen("the server did not ask for our Ed25519 certificate")
        super()._client_handle_finished(input_buf, output_buf)
