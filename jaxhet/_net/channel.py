"""JSON messages over an authenticated connection: nobody else reads, changes or repeats them.

    4 bytes  length of what follows, little-endian
    n bytes  the message as JSON, encrypted with AES-256-GCM, and a tag of 16 bytes

Message i of a direction has the nonce i, so that it is valid only in its place. The length is
authenticated too.
"""

import json
import socket
import struct
import time
from typing import Any

from jaxhet._errors import TransportError
from jaxhet._net import handshake

MAX_MESSAGE_BYTES = 16 << 20
_MOST_MESSAGES = 1 << 32  # limit for one key; NIST SP 800-38D, part 8.3
_LENGTH = struct.Struct("<I")


class Channel:
    """Our end. One thread sends, and one receives.

    Args:
      sock: An authenticated socket that blocks; stays the caller's.
      keys: Session keys that the handshake on `sock` agreed on.
    """

    def __init__(self, sock: socket.socket, keys: handshake.Keys):
        # Takes a while to import, and programs without a job do not need it.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._sock = sock
        self._seal = AESGCM(keys.send)
        self._open = AESGCM(keys.receive)
        self._sent = 0
        self._received = 0

    def send(self, message: Any) -> None:
        """Sends one message.

        Raises:
          OSError: The connection has ended, or accepts no bytes for too long.
          TransportError: The key is used up.
        """
        body = json.dumps(message).encode()
        length = _LENGTH.pack(len(body) + 16)
        self._sock.sendall(length + self._seal.encrypt(_nonce(self._sent), body, length))
        self._sent += 1

    def receive(self, timeout_s: float | None = None) -> Any:
        """Receives one message, within `timeout_s` if given.

        Raises:
          TransportError: The connection has ended, the time is over, or this is not the message
            that the peer sent next.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        head = handshake.receive_exactly(self._sock, _LENGTH.size, deadline)
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise TransportError(f"a peer announced a message of {length} bytes")
        sealed = handshake.receive_exactly(self._sock, length, deadline)
        try:
            message = json.loads(self._opened(sealed, head))
        except (ValueError, RecursionError) as error:
            raise TransportError(f"a peer sent a message that is no JSON: {error}") from error
        if timeout_s is not None:
            self._sock.settimeout(None)
        return message

    def _opened(self, sealed: bytes, head: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            body = self._open.decrypt(_nonce(self._received), sealed, head)
        except InvalidTag:
            raise TransportError(
                f"message {self._received} is not what the peer sealed: it was changed, repeated,"
                " reordered or cut on its way. Somebody between the hosts changes packets, or a"
                " device there is faulty"
            ) from None
        self._received += 1
        return body


def _nonce(number: int) -> bytes:
    if number >= _MOST_MESSAGES:
        raise TransportError(f"a connection has sent {number} messages, as many as its key allows")
    return number.to_bytes(12, "little")
