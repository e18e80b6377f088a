"""Sends messages to a process that may have stopped, without waiting for it."""

import contextlib
import queue
import socket
import struct
import threading
from typing import Any

from jaxhet._errors import TransportError
from jaxhet._net.channel import Channel

SEND_TIMEOUT_S = 30
_MOST_QUEUED = 1024
_TIMEVAL = struct.Struct("@ll")


def limit_sends(sock: socket.socket) -> None:
    """Makes a send on a blocking socket an OSError if there is no room for `SEND_TIMEOUT_S`."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(SEND_TIMEOUT_S, 0))


class Outbox:
    """Queue and only writer of one authenticated connection; owns a thread, not the socket.

    A peer that accepts nothing for `SEND_TIMEOUT_S`, or has `_MOST_QUEUED` messages waiting, is
    cut off: the reader of the connection finds it ended.
    """

    def __init__(self, sock: socket.socket, channel: Channel):
        self._sock = sock
        self._channel = channel
        self._queue: queue.Queue[Any] = queue.Queue(_MOST_QUEUED)
        limit_sends(sock)
        self._thread = threading.Thread(target=self._send_all, name="jaxhet-outbox", daemon=True)
        self._thread.start()

    @property
    def local_host(self) -> str:
        """The address of this machine to which the peer has connected."""
        return self._sock.getsockname()[0].removeprefix("::ffff:")

    def send(self, message: Any) -> None:
        """Sends a message after those before it. Returns at once."""
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self._cut()

    def finish(self) -> None:
        """Ends the thread when all messages are sent or the peer is cut off."""
        self._queue.put(None)
        self._thread.join()

    def close(self) -> None:
        """Ends the connection and the thread. The socket can be closed then."""
        self._cut()
        self._thread.join()

    def _send_all(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._channel.send(message)
            except (OSError, TransportError):
                self._cut()
                return

    def _cut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(
            queue.Full
        ):  # a full queue: the thread is in a send that fails now
            self._queue.put_nowait(None)
