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
from typing import Any

from jaxhet._errors import TransportError, UsageError

NONCE_BYTES = 32
MAC_BYTES = hashlib.sha256().digest_size
MAX_FRAME_BYTES = 16 << 20
_LENGTH = struct.Struct("<I")


class RefusedError(UsageError):
    """The other side does not hold the same job secret."""


def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Reads `num_bytes` from a blocking socket.

    Raises:
      TransportError: the peer closed the connection, or the socket's timeout passed.
    """
    parts = bytearray()
    while len(parts) < num_bytes:
        try:
            part = sock.recv(num_bytes - len(parts))
        except OSError as error:
            raise TransportError(f"reading from a peer failed: {error}") from error
        if not part:
            raise TransportError("the peer closed the connection")
        parts += part
    return bytes(parts)


def connect(sock: socket.socket, secret: bytes, header: bytes) -> None:
    """Authenticates as the side that opened the connection, and presents `header`.

    Raises:
      RefusedError: the acceptor holds another secret, or is not one of ours.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        sock.sendall(nonce)
        theirs = receive_exactly(sock, NONCE_BYTES)
        sock.sendall(header + _mac(secret, b"connect", nonce, theirs, header))
        answer = receive_exactly(sock, MAC_BYTES)
    except (TransportError, OSError) as error:
        raise RefusedError(f"the other side did not accept our job secret ({error})") from error
    if not hmac.compare_digest(answer, _mac(secret, b"accept", nonce, theirs, header)):
        raise RefusedError("the other side does not hold our job secret")


def accept(sock: socket.socket, secret: bytes, header_bytes: int) -> bytes:
    """Authenticates as the side that accepted the connection; returns the connector's header.

    Raises:
      RefusedError: the connector holds another secret.
      TransportError: it went away or sent too little in time.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        sock.sendall(nonce)
    except OSError as error:
        raise TransportError(f"writing to a peer failed: {error}") from error
    theirs = receive_exactly(sock, NONCE_BYTES)
    header = receive_exactly(sock, header_bytes)
    proof = receive_exactly(sock, MAC_BYTES)
    if not hmac.compare_digest(proof, _mac(secret, b"connect", theirs, nonce, header)):
        raise RefusedError("a connection with another job secret was refused")
    sock.sendall(_mac(secret, b"accept", theirs, nonce, header))
    return header


def send_frame(sock: socket.socket, message: Any) -> None:
    """Sends one JSON message."""
    body = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(sock: socket.socket) -> Any:
    """Receives one JSON message from an authenticated socket."""
    (length,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise TransportError(f"a peer announced a message of {length} bytes")
    return json.loads(receive_exactly(sock, length))


def _mac(secret: bytes, role: bytes, connector: bytes, acceptor: bytes, header: bytes) -> bytes:
    return hmac.digest(secret, b"jaxhet 1 " + role + connector + acceptor + header, "sha256")
