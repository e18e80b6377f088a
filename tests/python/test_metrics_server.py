"""Strangers at the port of metrics."""

import contextlib
import errno
import socket
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from jaxhet._telemetry import metrics_server
from jaxhet._telemetry.metrics_server import MetricsServer


def _app(environ: dict[str, Any], start: Any) -> list[bytes]:
    start("200 OK", [("Content-Type", "text/plain")])
    return [b"jaxhet_failed 0\n"]


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0, _app)
    yield server
    server.shutdown()
    server.server_close()


def _scrape(server: MetricsServer) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=5) as answer:
        return answer.read()


def _is_ended(sock: socket.socket, timeout_s: float) -> bool:
    sock.settimeout(timeout_s)
    try:
        while sock.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_silent_connections_keep_nobody_out(server: MetricsServer) -> None:
    strangers = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(100)]
    for sock in strangers[::2]:
        sock.sendall(b"GET / HT")
    start = time.monotonic()
    assert _scrape(server) == b"jaxhet_failed 0\n"
    assert time.monotonic() - start < metrics_server.SILENCE_S  # nobody had to give up before
    ended = sum(_is_ended(sock, 0.05) for sock in strangers)
    assert ended >= len(strangers) - metrics_server.MOST_CONNECTIONS
    for sock in strangers:
        sock.close()


def test_silent_connection_ends(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", server.server_port)) as sock:
        assert _is_ended(sock, 5)


def test_connection_ends_in_time_although_bytes_come(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "LONGEST_S", 0.3)
    address, begun = ("127.0.0.1", server.server_port), time.monotonic()
    strangers = [socket.create_connection(address) for _ in range(3)]
    while strangers:
        assert time.monotonic() - begun < 5, "a byte now and then holds a connection"
        for sock in list(strangers):
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"G")
            if _is_ended(sock, 0.02):
                sock.close()
                strangers.remove(sock)


def test_server_outlives_a_lack_of_descriptors(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = socket.socket.accept, [OSError(errno.EMFILE, "too many")] * 3

    def accept(sock: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return real(sock)

    monkeypatch.setattr(socket.socket, "accept", accept)
    assert _scrape(server) == b"jaxhet_failed 0\n"
    assert not failures
