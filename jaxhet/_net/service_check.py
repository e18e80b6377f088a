"""Trial of TLS between JAX's coordination service and this process, with given certificates."""

import contextlib
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxhet._errors import UsageError
from jaxhet._net.credentials import Credentials

if TYPE_CHECKING:
    import ssl

_TIMEOUT_S = 10
_OWN = "this process"
_ADVICE = (
    "check that JAX_MTLS_CA_FILE of each is the authority of the other's JAX_MTLS_CERT_FILE, that"
    " the coordinator's certificate names this address, or that JAX_MTLS_PEER_URI_PREFIX fits both,"
    " and that all certificates are valid now by the clocks of both machines (`date -u`)"
)


def check_service(address: str, credentials: Credentials, own_name: str = _OWN) -> None:
    """Tries whether JAX's service and this process accept each other's certificates.

    With a mismatch JAX's client would retry for ever, or abort the process.

    Args:
      address: Address of the service, which runs on the coordinator's machine.
      credentials: The user's certificates.
      own_name: Name of this process in errors; all processes of the job repeat them.

    Raises:
      UsageError: The two ends do not match.
    """
    try:
        with _connection(address, _context(credentials)) as tls:
            _check_uri(tls.getpeercert() or {}, credentials.peer_uri_prefix)
            if not tls.recv(1):  # HTTP/2 begins with the server's settings
                raise ConnectionAbortedError("the service closed the connection")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise UsageError(
            f"JAX's coordination service on {address} and {own_name} do not accept each other's"
            f" certificates: {error}; {_ADVICE}"
        ) from error


def _context(credentials: Credentials) -> "ssl.SSLContext":
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = credentials.peer_uri_prefix is None
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(credentials.cert_file, credentials.key_file)
    context.load_verify_locations(credentials.ca_file)
    return context


@contextlib.contextmanager
def _connection(address: str, context: "ssl.SSLContext") -> Iterator["ssl.SSLSocket"]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with (
        socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as sock,
        context.wrap_socket(sock, server_hostname=host) as tls,
    ):
        yield tls


def _check_uri(certificate: Mapping[str, Any], prefix: str | None) -> None:
    names = [name for kind, name in certificate.get("subjectAltName", ()) if kind == "URI"]
    if prefix is not None and not any(name.startswith(prefix) for name in names):
        raise ValueError(f"no URI of the service's certificate ({names}) begins with {prefix}")
