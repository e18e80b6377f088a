"""Credentials for TLS between JAX's coordination service and its clients.

The user names files by JAX's own settings; without them the job makes its certificates itself
(`_net/certificates.py`). There is no job without TLS.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxhet._errors import UsageError
from jaxhet._net.secret import check_is_file

_FILES = {
    "jax_mtls_cert_file": "the certificate",
    "jax_mtls_key_file": "its private key",
    "jax_mtls_ca_file": "the certificates of the authorities that peers are signed by",
}
_PREFIX = "jax_mtls_peer_uri_prefix"
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
