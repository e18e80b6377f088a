"""Certificates as a user makes them, with an authority of the user's own."""

import datetime
import ipaddress
import pathlib

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


def make_files(folder: pathlib.Path, clock_ahead_days: int = 0) -> dict[str, str]:
    """An authority, and one certificate for coordinator and processes on 127.0.0.1.

    Both are valid from a day before to a day after the time on the clock of the maker.

    Args:
      folder: Folder of the files.
      clock_ahead_days: Days by which the maker's clock is ahead of this machine's.

    Returns:
      The environment that gives them to JAX.
    """
    folder.mkdir(exist_ok=True)
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    now = datetime.datetime.now(datetime.UTC) + clock_ahead_days * _DAY
    authority = _certificate("authority", authority_key, authority_key, now, is_authority=True)
    own = _certificate("host", key, authority_key, now, is_authority=False)
    pem = serialization.Encoding.PEM
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files = {
        "CERT": own.public_bytes(pem),
        "KEY": key.private_bytes(pem, *private),
        "CA": authority.public_bytes(pem),
    }
    for name, data in files.items():
        (folder / f"{name}.pem").write_bytes(data)
    return {f"JAX_MTLS_{name}_FILE": str(folder / f"{name}.pem") for name in files}


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    *,
    is_authority: bool,
) -> x509.Certificate:
    hosts = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(hosts, critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
