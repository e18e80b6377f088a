"""Certificates of one job, for JAX's coordination service and its clients.

The coordinator is the authority. A process makes its private key itself and asks for a certificate
(`Identity`), so that no private key leaves the process that it was made in. Files are in memory:
nothing is left on a disk, however the process ends.

Costs 0.1 s of processor time to import.
"""

import datetime
import os
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_PEM = serialization.Encoding.PEM
# Names in place of host names. Processes accept only a service at the other end, and the service
# accepts only processes.
_SERVICE = "jaxhet://service/"
_PROCESS = "jaxhet://process/"
# The authority ends with the job. Until then its certificates are valid at any time of a clock.
_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


class Identity:
    """A new private key, and a request for a certificate for it (PEM)."""

    def __init__(self):
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = x509.CertificateSigningRequestBuilder().subject_name(_name("process"))
        self.request = builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM)

    def process_credentials(self, certificate: bytes, authority: bytes) -> dict[str, Any]:
        """Arguments of jaxlib's client of the service, with the authority's certificate."""
        return self._credentials(certificate, authority, _SERVICE)

    def _credentials(self, certificate: bytes, authority: bytes, peers: str) -> dict[str, Any]:
        key = self._key.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return {
            "mtls_cert_file": _in_memory(certificate),
            "mtls_key_file": _in_memory(key),
            "mtls_ca_file": _in_memory(authority),
            "mtls_peer_uri_prefix": peers,
            "verify_secure_credentials": True,
        }


class Authority:
    """Certificate authority of one job. The private key never leaves this object.

    Attributes:
      certificate: Certificate of the authority (PEM).
    """

    def __init__(self):
        self._key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(  # RFC 5280, 4.2.1.3: an authority must have it
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=False,
            encipher_only=False,
            decipher_only=False,
        )
        own = _builder("job", self._key.public_key())
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        own = own.add_extension(usage, critical=True)
        self.certificate = own.sign(self._key, hashes.SHA256()).public_bytes(_PEM)

    def sign(self, request: bytes, process: int) -> bytes:
        """The certificate (PEM) of a process that has made `request`.

        Raises:
          ValueError: The bytes are not a request, or its signature is not by its private key.
        """
        return self._sign(request, f"{_PROCESS}{process}/", ExtendedKeyUsageOID.CLIENT_AUTH)

    def service_credentials(self) -> dict[str, Any]:
        """Arguments of jaxlib's service."""
        identity = Identity()
        signed = self._sign(
            identity.request, _SERVICE + "coordination/", ExtendedKeyUsageOID.SERVER_AUTH
        )
        return identity._credentials(signed, self.certificate, _PROCESS)

    def _sign(self, request: bytes, uri: str, usage: x509.ObjectIdentifier) -> bytes:
        try:
            asked = x509.load_pem_x509_csr(request)
            key, is_made_by_owner = asked.public_key(), asked.is_signature_valid
        except (UnsupportedAlgorithm, x509.InvalidVersion) as error:
            raise ValueError(f"not a request for a certificate of this job: {error}") from error
        if not is_made_by_owner or not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("not a request for a certificate of this job")
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
        builder = _builder(uri, key).add_extension(names, critical=False)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=False, path_length=None), critical=True
        )
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name("job"))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
    )


def _in_memory(data: bytes) -> str:
    """Name of a new file in memory that no other user can open.

    It exists until this process ends: gRPC reads it again later, and after a close its descriptor's
    number could belong to another file.
    """
    fd = os.memfd_create("jaxhet-certificate", os.MFD_CLOEXEC)
    os.write(fd, data)
    return f"/proc/self/fd/{fd}"
