"""Jobs over tcp with somebody in between who reads and changes what the processes exchange."""

import contextlib
import socket
import threading

import pytest
from two_islands import SET_UP

from jaxhet._net import handshake
from jaxhet.testing import free_port
from tests.support.scripts import Ended, job, run

MARKER = b"MARKERS."  # finite as two floats
_HANDSHAKE_BYTES = 2 * handshake.NONCE_BYTES + 2 * handshake.MAC_BYTES  # at least, both ways
_LONG = 4096  # a piece of data, not a message
SUM = (
    SET_UP
    + f"""
rows = np.frombuffer({MARKER!r} * 16384, np.float32)[None].repeat(mesh.size, 0)
x = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P("x")), lambda i: rows[i])
total = np.asarray(over_islands(psum)(x).addressable_shards[0].data)[0]
print("right" if (total == rows.sum(0)).all() else "WRONG", flush=True)
"""
)


class Relay:
    """Passes on connections to a port, changes long pieces, and keeps what it has seen.

    Attributes:
      port: Where it listens.
      seen: All bytes, of both directions of all connections.
    """

    def __init__(self, target_port: int):
        self._target = ("127.0.0.1", target_port)
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self.seen = bytearray()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Ends when the connections have ended."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += (near, far)
            for pair in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pass_on, args=pair, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while piece := source.recv(1 << 16):
                self.seen += piece
                if len(piece) > _LONG:
                    piece = piece[:-1] + bytes([piece[-1] ^ 1])
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one end has gone: the other learns of it
            for sock in (source, target):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


def _run_through_relay(encryption: str) -> tuple[list[Ended], Relay]:
    first, second = job(2, JAXHET_TRANSPORTS="tcp", JAXHET_ENCRYPTION=encryption)
    port = free_port()
    relay = Relay(port)
    first |= {
        "JAXHET_TCP_PORT": str(port),
        "JAXHET_TCP_ADVERTISE": f"127.0.0.1:{relay.port}",
    }
    try:
        return run(SUM, first, second), relay
    finally:
        relay.close()


def test_changed_data_is_a_wrong_result_without_encryption() -> None:
    both, relay = _run_through_relay("off")
    assert [ended.code for ended in both] == [0, 0], both
    assert any("WRONG" in ended.text for ended in both), both
    assert MARKER * 8 in relay.seen


@pytest.mark.parametrize(
    ("encryption", "is_visible"),
    [pytest.param("auth", True, marks=pytest.mark.slow), ("full", False)],
)
def test_changed_data_is_an_error_by_name(encryption: str, is_visible: bool) -> None:
    both, relay = _run_through_relay(encryption)
    assert len(relay.seen) > _HANDSHAKE_BYTES + len(MARKER) * 16384
    assert (MARKER * 8 in relay.seen) == is_visible
    for ended in both:
        assert ended.code != 0
        assert "right" not in ended.text
        assert "WRONG" not in ended.text
        assert "TransportError: [" in ended.text
        assert "process " in ended.text
        assert f"is not what it sealed (JAXHET_ENCRYPTION={encryption})" in ended.text
        assert "it was changed, repeated, reordered or cut on its way" in ended.text
