"""Somebody in between: passes on connections to a port, and reads, changes or swallows bytes."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from jaxhet.testing import free_port


class Relay:
    """Passes on connections to a port of this machine.

    Attributes:
      port: Where it listens.
      seen: All bytes, of both directions of all connections.
    """

    def __init__(self, target_port: int, change: Callable[[bytes], bytes] = bytes) -> None:
        """`change` returns the bytes to send in place of a chunk that arrived."""
        self._target = ("127.0.0.1", target_port)
        self._change = change
        self._frozen = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._sockets = [self._listener]
        self.port = self._listener.getsockname()[1]
        self.seen = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        """From now on nothing comes through, and nothing is closed."""
        self._frozen.set()

    def close(self) -> None:
        """Closes everything."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += (near, far)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while piece := source.recv(1 << 16):
                if self._frozen.is_set():
                    continue
                self.seen += piece
                target.sendall(self._change(piece))
            if not self._frozen.is_set():
                target.shutdown(socket.SHUT_WR)
        except OSError:  # one end is closed: the other end is closed, too
            for sock in (source, target) if not self._frozen.is_set() else ():
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def in_between(env: dict[str, str], change: Callable[[bytes], bytes] = bytes) -> Iterator[Relay]:
    """A relay through which peers reach the process that starts with `env`, which gets options."""
    port = free_port()
    relay = Relay(port, change)
    env["JAXHET_SOCKET_PORT"] = str(port)
    env["JAXHET_SOCKET_ADVERTISE"] = f"127.0.0.1:{relay.port}"
    try:
        yield relay
    finally:
        relay.close()
