"""Credentials for TLS between JAX's coordination service and its clients."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Credentials:
    """Names of PEM files, which gRPC reads again while the process lives.

    Attributes:
      cert_file: Certificate of this end.
      key_file: Private key of the certificate.
      ca_file: Certificate of the authority that signs the other end's certificate.
      peer_uri_prefix: Prefix of a URI in the other end's certificate.
    """

    cert_file: str
    key_file: str
    ca_file: str
    peer_uri_prefix: str

    def arguments(self) -> dict[str, Any]:
        """The arguments of jaxlib's service and client."""
        named = {f"mtls_{name}": value for name, value in dataclasses.asdict(self).items()}
        return {**named, "verify_secure_credentials": True}
