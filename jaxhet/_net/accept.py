"""Accepts connections on a listening socket, and limits what strangers can do there.

Anybody can connect. A connection that has not authenticated yet is *half-open*: it has a thread and
a descriptor for as long as a handshake may take, and there is a limit for their number.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

MOST_HALF_OPEN = 512  # more than honest processes open at a time: each has one
_PAUSE_S = 0.05  # when the system has no descriptor or thread left


class Acceptor[T]:
    """A thread that accepts connections, and one more for each connection.

    Args:
      server: The listening socket; closed by `close`.
      authenticate: Receives a new connection; returns what `serve` needs. An error means refusal.
      serve: Receives an authenticated connection, which it owns.
      name: Name of the accepting thread.
      most: Limit for half-open connections; one more ends the oldest.

    Attributes:
      refused: Number of connections refused.
      last_refusal: Reason of the last refusal; "" if there was none.
    """

    def __init__(
        self,
        server: socket.socket,
        authenticate: Callable[[socket.socket], T],
        serve: Callable[[socket.socket, T], None],
        name: str,
        most: int = MOST_HALF_OPEN,
    ):
        self._server = server
        self._authenticate = authenticate
        self._serve = serve
        self._most = most
        self._lock = threading.Lock()
        self._half_open: dict[socket.socket, None] = {}  # oldest first
        self._closing = False
        self.refused = 0
        self.last_refusal = ""
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def close(self) -> None:
        """Stops listening. Accepted connections are left as they are."""
        self.refuse_all()
        self._server.close()

    def close_in_child(self) -> None:
        """Closes a forked child's copy of the socket."""
        with contextlib.suppress(OSError):
            os.close(self._server.detach())

    def refuse_all(self) -> None:
        """Stops listening, and keeps the port: nobody else can listen there until `close`."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
            # Without this, another program could bind the port of a socket that does not listen.
            self._server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._server.accept()
            except OSError:  # closed, no descriptor is left (EMFILE), or the caller has hung up
                if self._closing:
                    return
                self._drop_oldest()
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                self._half_open[sock] = None
                is_full = len(self._half_open) > self._most
            if is_full:
                self._drop_oldest()
            try:
                threading.Thread(target=self._greet, args=(sock,), daemon=True).start()
            except RuntimeError as error:  # no thread is left
                self._refuse(sock, error)
                time.sleep(_PAUSE_S)

    def _greet(self, sock: socket.socket) -> None:
        try:
            result = self._authenticate(sock)
        except Exception as error:  # whatever a peer has sent, it does not stay half-open
            self._refuse(sock, error)
            return
        with self._lock:
            self._half_open.pop(sock, None)
        self._serve(sock, result)

    def _refuse(self, sock: socket.socket, why: Exception) -> None:
        with self._lock:
            self._half_open.pop(sock, None)
            self.refused += 1
            self.last_refusal = str(why)
        sock.close()

    def _drop_oldest(self) -> None:
        """Ends the oldest handshake; its own thread closes the connection."""
        with self._lock:
            oldest = next(iter(self._half_open), None)
            if oldest is None:
                return
            del self._half_open[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)


def refusals(acceptors: Collection[Acceptor[Any]]) -> str:
    """The number of connections refused, and the last reason of each acceptor."""
    refused = sum(acceptor.refused for acceptor in acceptors)
    reasons = [acceptor.last_refusal for acceptor in acceptors if acceptor.last_refusal]
    why = f", the last one because {'; another one because '.join(reasons)}" if reasons else ""
    return f"{refused} connections refused{why}"
