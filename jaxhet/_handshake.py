"""Mutual authentication of a socket with the job secret, and JSON frames on authenticated sockets.

Both sides send a nonce. The connector then sends its header and an HMAC over both nonces and the
header; the acceptor checks it before it looks at the header, and answers with an HMAC of its own.
Nothing else of a peer is read before.
"""

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from typing import Any

from jaxhet._errors import TransportError, UsageError

NONCE_BYTES = 32
MAC_BYTES = hashlib.sha256().digest_size
MAX_FRAME_BYTES = 16 << 20
TIMEOUT_S = 10.0  # for a whole handshake, and for the first message after it
_LENGTH = struct.Struct("<I")


class RefusedError(UsageError):
    """The other side does not hold the same job secret."""


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
    sock: socket.socket, secret: bytes, header: bytes, timeout_s: float = TIMEOUT_S
) -> None:
    """Authenticates as the side that opened the connection, and presents `header`.

    The socket blocks without a timeout afterwards.

    Raises:
      RefusedError: the acceptor holds another secret, is not one of ours, or did not answer in
        `timeout_s`.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    deadline = time.monotonic() + timeout_s
    try:
        sock.settimeout(timeout_s)
        sock.sendall(nonce)
        theirs = receive_exactly(sock, NONCE_BYTES, deadline)
        sock.sendall(header + _mac(secret, b"connect", nonce, theirs, header))
        answer = receive_exactly(sock, MAC_BYTES, deadline)
        sock.settimeout(None)
    except (TransportError, OSError) as error:
        raise RefusedError(f"the other side did not accept our job secret ({error})") from error
    if not hmac.compare_digest(answer, _mac(secret, b"accept", nonce, theirs, header)):
        raise RefusedError("the other side does not hold our job secret")


def accept(
    sock: socket.socket, secret: bytes, header_bytes: int, timeout_s: float = TIMEOUT_S
) -> bytes:
    """Authenticates as the side that accepted the connection; returns the connector's header.

    The socket blocks without a timeout afterwards.

    Raises:
      RefusedError: the connector holds another secret.
      TransportError: the connector closed the connection, or took more than `timeout_s`.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
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
    sock.sendall(_mac(secret, b"accept", theirs, nonce, header))
    sock.settimeout(None)
    return header


def send_frame(sock: socket.socket, message: Any) -> None:
    """Sends one JSON message."""
    body = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(sock: socket.socket, timeout_s: float | None = None) -> Any:
    """Receives one JSON message from an authenticated socket, within `timeout_s` if given."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size, deadline))
    if length > MAX_FRAME_BYTES:
        raise TransportError(f"a peer announced a message of {length} bytes")
    message = json.loads(receive_exactly(sock, length, deadline))
    if timeout_s is not None:
        sock.settimeout(None)
    return message


def _mac(secret: bytes, role: bytes, connector: bytes, acceptor: bytes, header: bytes) -> bytes:
    return hmac.digest(secret, b"jaxhet 1 " + role + connector + acceptor + header, "sha256")
