"""Mutual authentication of a socket with the job secret, and the keys of its connection.

Both sides send a nonce. The connector then sends its header and an HMAC over both nonces and the
header; the acceptor checks it before it looks at the header, and sends its answer and an HMAC over
nonces, header and answer. Nothing else of a peer is read before. Both sides then derive the keys of
the connection, one for each direction, of the job secret, both nonces, the header and the answer.

A nonce begins with `MAGIC`: another program in the acceptor's place is recognized.

A stranger who listens in the acceptor's place learns an HMAC, and can compare guesses of the secret
with it. Therefore the key is not the secret itself: scrypt derives it from the secret.
"""

import dataclasses
import functools
import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable

from jaxhet._errors import TransportError, UsageError

MAGIC = b"jaxhet 2\r\n\r\n"  # with an empty line, at which a server of HTTP answers
NONCE_BYTES = 32  # with the magic
MAC_BYTES = hashlib.sha256().digest_size
TIMEOUT_S = 10.0  # for a whole handshake, and for the first message after it
_SCRYPT_N, _SCRYPT_R = 1 << 14, 8  # 16 MiB of memory
_key_lock = threading.Lock()  # many connections at once compute a key once


@dataclasses.dataclass(frozen=True, repr=False)
class Keys:
    """Keys of one authenticated connection, 32 bytes each.

    Attributes:
      send: Key of the sending direction.
      receive: Key of the receiving direction.
    """

    send: bytes
    receive: bytes


class RefusedError(UsageError):
    """The other side does not hold the same job secret."""


class ForeignError(RefusedError):
    """The other side is not jaxhet."""


class NoAnswerError(RefusedError):
    """The other side did not answer in time."""


def receive_exactly(sock: socket.socket, num_bytes: int, deadline: float | None = None) -> bytes:
    """Reads `num_bytes` from a blocking socket, until `deadline` of `time.monotonic` if given.

    Raises:
      TransportError: the peer closed the connection, or the time is over.
    """
    parts = bytearray()
    while len(parts) < num_bytes:
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        try:
            part = sock.recv(num_bytes - len(parts))
        except OSError as error:
            raise TransportError(f"reading from a peer failed: {error}") from error
        if not part:
            raise TransportError("the peer closed the connection")
        parts += part
    return bytes(parts)


def connect(
    sock: socket.socket,
    secret: bytes,
    header: bytes,
    answer_bytes: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> tuple[bytes, Keys]:
    """Authenticates as the side that opened the connection, and presents `header`.

    The socket blocks without a timeout afterwards.

    Returns:
      The acceptor's answer, which has `answer_bytes` bytes, and the keys of the connection.

    Raises:
      NoAnswerError: the acceptor did not answer in `timeout_s`.
      ForeignError: the acceptor is not jaxhet.
      RefusedError: the acceptor holds another secret.
    """
    nonce = _new_nonce()
    theirs = b""
    deadline = time.monotonic() + timeout_s
    try:
        sock.settimeout(timeout_s)
        sock.sendall(nonce)
        theirs = _receive_nonce(sock, deadline)
        sock.sendall(header + _mac(secret, b"connect", nonce, theirs, header))
        answer = receive_exactly(sock, answer_bytes, deadline)
        proof = receive_exactly(sock, MAC_BYTES, deadline)
        sock.settimeout(None)
    except (TransportError, OSError) as error:
        if isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError):
            raise NoAnswerError(f"no answer within {timeout_s:g} s") from error
        if not theirs:
            raise ForeignError(f"no answer before the end ({error})") from error
        raise RefusedError(f"the other side did not accept our job secret ({error})") from error
    presented = header + answer
    if not hmac.compare_digest(proof, _mac(secret, b"accept", nonce, theirs, presented)):
        raise RefusedError("the other side does not hold our job secret")
    to_acceptor, to_connector = _derive(secret, nonce, theirs, presented)
    return answer, Keys(send=to_acceptor, receive=to_connector)


def accept(
    sock: socket.socket,
    secret: bytes,
    header_bytes: int,
    answer: Callable[[], bytes] = bytes,
    timeout_s: float = TIMEOUT_S,
) -> tuple[bytes, Keys]:
    """Authenticates as the side that accepted the connection, and presents what `answer` returns.

    `answer` is called when the connector has proved itself. The socket blocks without a timeout
    afterwards.

    Returns:
      The connector's header, and the keys of the connection.

    Raises:
      RefusedError: the connector holds another secret.
      TransportError: the connector closed the connection, or took more than `timeout_s`.
    """
    nonce = _new_nonce()
    deadline = time.monotonic() + timeout_s
    try:
        sock.settimeout(timeout_s)
        sock.sendall(nonce)
    except OSError as error:
        raise TransportError(f"writing to a peer failed: {error}") from error
    theirs = receive_exactly(sock, NONCE_BYTES, deadline)
    header = receive_exactly(sock, header_bytes, deadline)
    proof = receive_exactly(sock, MAC_BYTES, deadline)
    if not hmac.compare_digest(proof, _mac(secret, b"connect", theirs, nonce, header)):
        raise RefusedError("a connection with another job secret was refused")
    own = answer()
    presented = header + own
    sock.sendall(own + _mac(secret, b"accept", theirs, nonce, presented))
    sock.settimeout(None)
    to_acceptor, to_connector = _derive(secret, theirs, nonce, presented)
    return header, Keys(send=to_connector, receive=to_acceptor)


def _new_nonce() -> bytes:
    return MAGIC + secrets.token_bytes(NONCE_BYTES - len(MAGIC))


def _receive_nonce(sock: socket.socket, deadline: float) -> bytes:
    start = receive_exactly(sock, len(MAGIC), deadline)
    if start != MAGIC:
        raise ForeignError(f"the answer begins with {start!r}")
    return start + receive_exactly(sock, NONCE_BYTES - len(MAGIC), deadline)


def _mac(secret: bytes, role: bytes, connector: bytes, acceptor: bytes, presented: bytes) -> bytes:
    text = b"jaxhet 2 " + role + connector + acceptor + presented
    return hmac.digest(_key(secret), text, "sha256")


def _derive(
    secret: bytes, connector: bytes, acceptor: bytes, presented: bytes
) -> tuple[bytes, bytes]:
    """Keys of the connector's and of the acceptor's sending direction: HKDF (RFC 5869)."""
    root = hmac.digest(connector + acceptor, _key(secret), "sha256")
    labels = (b"jaxhet 2 key to acceptor ", b"jaxhet 2 key to connector ")
    to_acceptor, to_connector = (
        hmac.digest(root, label + presented + b"\x01", "sha256") for label in labels
    )
    return to_acceptor, to_connector


def _key(secret: bytes) -> bytes:
    with _key_lock:
        return _stretched(secret)


@functools.lru_cache(maxsize=4)
def _stretched(secret: bytes) -> bytes:
    return hashlib.scrypt(
        secret, salt=b"jaxhet job secret", n=_SCRYPT_N, r=_SCRYPT_R, p=1, maxmem=64 << 20, dklen=32
    )
