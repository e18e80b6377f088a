"""Credentials for TLS between JAX's coordination service and its clients.

The user names files by JAX's own settings; without them the job makes its certificates itself
(`_net/certificates.py`). There is no job without TLS.
"""

import contextlib
import dataclasses
import datetime
import pathlib
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxhet._errors import UsageError
from jaxhet._net.clocks import Clock, Validity, explanation
from jaxhet._net.secret import check_is_file

if TYPE_CHECKING:
    import ssl

_FILES = {
    "jax_mtls_cert_file": "the certificate",
    "jax_mtls_key_file": "its private key",
    "jax_mtls_ca_file": "the certificates of the authorities that peers are signed by",
}
_PREFIX = "jax_mtls_peer_uri_prefix"
_TIMEOUT_S = 10
_NOT_VALID_NOW = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_OWN = "this process"
_ADVICE = (
    "check that JAX_MTLS_CA_FILE of each is the authority of the other's JAX_MTLS_CERT_FILE, and"
    " that the coordinator's certificate names this address, or that JAX_MTLS_PEER_URI_PREFIX fits"
    " both"
)
SETTINGS = (*_FILES, _PREFIX)  # names in JAX's config; capitals in the environment


@dataclasses.dataclass(frozen=True)
class Credentials:
    """Names of PEM files, read again now and then as long as the process lives.

    Attributes:
      cert_file: Certificate of this end.
      key_file: Private key of the certificate.
      ca_file: Certificates of the authorities that sign the other end's certificate.
      peer_uri_prefix: Prefix of a URI in the other end's certificate; None: the host name
        is checked.
    """

    cert_file: str
    key_file: str
    ca_file: str
    peer_uri_prefix: str | None = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of jaxlib's service and client."""
        named = {f"mtls_{name}": value for name, value in dataclasses.asdict(self).items()}
        return {**named, "verify_secure_credentials": True}


def given(settings: Mapping[str, str | None]) -> Credentials | None:
    """The credentials that the user has given, or None.

    Args:
      settings: Values of `SETTINGS` by name.

    Raises:
      UsageError: Some are missing, or the files can't be used.
    """
    values = [settings.get(name) or None for name in _FILES]
    prefix = settings.get(_PREFIX) or None
    present = [name.upper() for name in SETTINGS if settings.get(name)]
    if not present:
        return None
    missing = [
        f"{name.upper()} ({what})"
        for (name, what), value in zip(_FILES.items(), values, strict=True)
        if value is None
    ]
    if missing:
        raise UsageError(
            f"{', '.join(present)} is set, and {', '.join(missing)} is not: set all of them, or"
            " none, and the job makes certificates of its own"
        )
    if prefix is not None and not prefix.endswith("/"):
        raise UsageError(
            f"{_PREFIX.upper()}={prefix!r} does not end with '/': it would fit the names of other"
            f" hosts, too; write {prefix + '/'!r}"
        )
    cert_file, key_file, ca_file = map(str, values)
    _check_files(cert_file, key_file, ca_file)
    return Credentials(cert_file, key_file, ca_file, prefix)


def given_by(environ: Mapping[str, str]) -> Credentials | None:
    """The same of an environment, for processes that do without JAX."""
    return given({name: environ.get(name.upper()) for name in SETTINGS})


def check_service(
    address: str,
    credentials: Credentials,
    own_name: str = _OWN,
    coordinator_time: datetime.datetime | None = None,
) -> None:
    """Tries whether JAX's service and this process accept each other's certificates.

    With a mismatch JAX's client would retry for ever, or abort the process.

    Args:
      address: Address of the service, which runs on the coordinator's machine.
      credentials: The user's certificates.
      own_name: Name of this process in errors; all processes of the job repeat them.
      coordinator_time: Time by the coordinator's clock, if it is known.

    Raises:
      UsageError: The two ends do not match.
    """
    clocks = [Clock(own_name, datetime.datetime.now(datetime.UTC))]
    if coordinator_time is not None:
        clocks.append(Clock(f"the coordinator at {address}", coordinator_time))
    try:
        with _connection(address, _context(credentials)) as tls:
            _check_uri(tls.getpeercert() or {}, credentials.peer_uri_prefix)
            if not tls.recv(1):  # HTTP/2 begins with the server's settings
                raise ConnectionAbortedError("the service closed the connection")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        may_be_time = (
            isinstance(error, ConnectionAbortedError | ConnectionResetError)  # says no reason
            or getattr(error, "verify_code", None) in _NOT_VALID_NOW
        )
        why = ""
        if may_be_time:
            why = explanation(clocks, _validities(address, credentials, own_name))
        raise UsageError(
            f"JAX's coordination service on {address} and {own_name} do not accept each other's"
            f" certificates: {error}; {why or _ADVICE}"
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


def _validities(address: str, credentials: Credentials, own_name: str) -> list[Validity]:
    """When the certificates of both ends are valid, as far as they can be read."""
    import ssl

    from jaxhet._net import certificates  # 0.1 s, after an error only

    found: list[Validity] = []
    for name, file in (
        (f"the certificate of {own_name} (JAX_MTLS_CERT_FILE)", credentials.cert_file),
        ("the certificate of an authority (JAX_MTLS_CA_FILE)", credentials.ca_file),
    ):
        with contextlib.suppress(OSError, ValueError):
            found += certificates.validities(name, pathlib.Path(file).read_bytes())
    with contextlib.suppress(OSError, ValueError):
        context = _context(credentials)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with _connection(address, context) as tls:
            shown = ssl.DER_cert_to_PEM_cert(tls.getpeercert(binary_form=True) or b"")
        name = "the coordinator's certificate (its JAX_MTLS_CERT_FILE)"
        found[:0] = certificates.validities(name, shown.encode())
    return found


def _check_uri(certificate: Mapping[str, Any], prefix: str | None) -> None:
    names = [name for kind, name in certificate.get("subjectAltName", ()) if kind == "URI"]
    if prefix is not None and not any(name.startswith(prefix) for name in names):
        raise ValueError(f"no URI of the service's certificate ({names}) begins with {prefix}")


def _check_files(cert_file: str, key_file: str, ca_file: str) -> None:
    """Checks files of which JAX would say nothing, and never get a connection."""
    import ssl  # 20 ms, for those who give certificates

    for setting, name in zip(_FILES, (cert_file, key_file, ca_file), strict=True):
        with contextlib.suppress(OSError):  # the next lines report it
            check_is_file(name, f"{setting.upper()}={name}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for what, load in (
        (
            f"JAX_MTLS_CERT_FILE={cert_file} with JAX_MTLS_KEY_FILE={key_file}",
            lambda: context.load_cert_chain(cert_file, key_file, lambda: ""),
        ),
        (f"JAX_MTLS_CA_FILE={ca_file}", lambda: context.load_verify_locations(ca_file)),
    ):
        try:
            load()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise UsageError(
                f"{what} can't be used: {error}; they are PEM files, the key is that of the"
                " certificate and has no password"
            ) from error
