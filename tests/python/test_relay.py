"""The relay between JAX's client and the coordination service: an HTTP proxy."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from jaxhet import _ffi

_REQUEST = b"CONNECT elsewhere:1 HTTP/1.1\r\nHost: elsewhere:1\r\n\r\n"
_ANSWER = b"HTTP/1.1 200 OK\r\n\r\n"


@contextlib.contextmanager
def _connected(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(_REQUEST)
        yield sock


def test_bytes_pass_both_ways_and_the_end_of_a_client_passes_too() -> None:
    sent = bytes(range(256)) * 4096
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = _ffi.Relay(f"127.0.0.1:{server.getsockname()[1]}")
        for _ in range(2):
            with _connected(relay.url) as client, server.accept()[0] as service:
                assert client.recv(len(_ANSWER), socket.MSG_WAITALL) == _ANSWER
                thread = threading.Thread(target=client.sendall, args=(sent,))
                thread.start()
                assert service.recv(len(sent), socket.MSG_WAITALL) == sent
                thread.join()
                service.sendall(b"answer")
                assert client.recv(100) == b"answer"
                client.close()
                assert service.recv(1) == b""
        relay.close()


@pytest.mark.parametrize("is_there", [True, False])
def test_client_is_not_told_that_the_service_is_gone(is_there: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = _ffi.Relay(f"127.0.0.1:{server.getsockname()[1]}")
        if not is_there:
            server.close()
        with _connected(relay.url) as client:
            if is_there:
                assert client.recv(len(_ANSWER), socket.MSG_WAITALL) == _ANSWER
                server.accept()[0].close()
            client.sendall(b"a heartbeat")
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(1)
            client.settimeout(10)
            relay.close()
            assert client.recv(1) == b""
    with pytest.raises(ConnectionRefusedError), _connected(relay.url):
        pass
