"""A small HTTP server for metrics, with limits for clients that connect and stay silent."""

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any
from wsgiref import simple_server

MOST_CONNECTIONS = 32  # each has a thread and a descriptor
SILENCE_S = 5.0  # after which a connection ends
LONGEST_S = 10.0  # after which a connection ends, whatever it sends or reads
_PAUSE_S = 0.05  # when the system has no descriptor left


class MetricsServer(socketserver.ThreadingMixIn, simple_server.WSGIServer):
    """Serves a WSGI application on a thread of its own until `shutdown`.

    There are at most `MOST_CONNECTIONS` connections: one more ends the oldest. Each has one
    request, and ends after `LONGEST_S` at the latest.

    Args:
      host: Name or address to listen on.
      port: Port to listen on.
      app: The WSGI application.

    Raises:
      OSError: the address can't be used.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, app: Callable[..., Any]):
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self.address_family = family
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # and their beginnings, oldest first
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(app)
        threading.Thread(target=self.serve_forever, name="jaxhet-metrics", daemon=True).start()

    def get_request(self) -> tuple[socket.socket, Any]:
        """A new connection; ends the oldest one if that makes room for it."""
        try:
            sock, address = super().get_request()
        except OSError:  # perhaps no descriptor is left
            self._drop_oldest()
            time.sleep(_PAUSE_S)
            raise
        with self._lock:
            self._open[sock] = time.monotonic()
            is_full = len(self._open) > MOST_CONNECTIONS
        if is_full:
            self._drop_oldest()
        return sock, address

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Ends the connections whose time is over; called every 0.5 s and after each request."""
        with self._lock:
            late = sum(time.monotonic() - begun > LONGEST_S for begun in self._open.values())
        for _ in range(late):
            self._drop_oldest()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a stranger would fill the log."""

    def _drop_oldest(self) -> None:
        """Ends the oldest connection; its own thread closes it."""
        with self._lock:
            oldest = next(iter(self._open), None)
            if oldest is None:
                return
            del self._open[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)


class _Handler(simple_server.WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""
