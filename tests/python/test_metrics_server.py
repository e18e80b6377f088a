"""Strangers at the port of metrics."""

import contextlib
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
    server.close()


def _scrape(server: MetricsServer) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=5) as answer:
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
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    for sock in strangers[::2]:
        sock.sendall(b"GET / HT")
    start = time.monotonic()
    assert _scrape(server) == b"jaxhet_failed 0\n"
    assert time.monotonic() - start < metrics_server.LONGEST_S  # no client had to give up before
    ended = sum(_is_ended(sock, 0.05) for sock in strangers)
    assert ended >= len(strangers) - metrics_server.MOST_CONNECTIONS
    for sock in strangers:
        sock.close()


def test_connection_ends_in_time_although_bytes_come(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "LONGEST_S", 0.3)
    address, begun = ("127.0.0.1", server.port), time.monotonic()
    strangers = [socket.create_connection(address) for _ in range(3)]
    while strangers:
        assert time.monotonic() - begun < 5, "a byte now and then holds a connection"
        for sock in list(strangers):
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"G")
            if _is_ended(sock, 0.02):
                sock.close()
                strangers.remove(sock)


@pytest.mark.parametrize("request_", [b"no HTTP\r\n\r\n", b"x" * 100_000])
def test_what_is_no_request_ends_the_connection(server: MetricsServer, request_: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(request_)
        assert _is_ended(sock, 5)
    assert _scrape(server) == b"jaxhet_failed 0\n"
