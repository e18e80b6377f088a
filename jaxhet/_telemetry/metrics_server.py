"""A small HTTP server for metrics; `Acceptor` has the limits for clients that stay silent."""

import io
import socket
import time
from collections.abc import Callable
from typing import Any
from wsgiref import handlers

from jaxhet._net.accept import Acceptor

MOST_CONNECTIONS = 32  # each has a thread and a descriptor
LONGEST_S = 10.0  # after which a connection ends, whatever it sends or reads
_MOST_BYTES = 1 << 16  # limit for a request
_END = b"\r\n\r\n"


class MetricsServer(Acceptor[None]):
    """Serves a WSGI application until `close`, one request for each connection.

    Args:
      host: Name or address to listen on.
      port: Port to listen on.
      app: The WSGI application.

    Raises:
      OSError: the address can't be used.
    """

    def __init__(self, host: str, port: int, app: Callable[..., Any]):
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._app = app
        listener = socket.create_server(
            (str(address[0]), port),
            family=family,
            backlog=128,
            dualstack_ipv6=family == socket.AF_INET6,
        )
        self.port: int = listener.getsockname()[1]
        super().__init__(
            listener, self._answer, lambda sock, _: sock.close(), "jaxhet-metrics", MOST_CONNECTIONS
        )

    def _answer(self, sock: socket.socket) -> None:
        """Reads a request without a body, and answers it."""
        deadline = time.monotonic() + LONGEST_S
        request = b""
        while _END not in request and len(request) < _MOST_BYTES:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            part = sock.recv(4096)
            if not part:
                return
            request += part
        first, *lines = request.partition(_END)[0].decode("latin-1").split("\r\n")
        method, target, protocol = first.split(" ")
        path, _, query = target.partition("?")
        given = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
        given["SERVER_PROTOCOL"] = protocol
        for line in lines:
            name, _, value = line.partition(":")
            given[f"HTTP_{name.upper().replace('-', '_')}"] = value.strip()
        answer = io.BytesIO()
        handler = handlers.SimpleHandler(io.BytesIO(), answer, io.StringIO(), given)
        handler.os_environ = {}  # the application needs nothing of this process
        handler.run(self._app)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.sendall(answer.getvalue())
