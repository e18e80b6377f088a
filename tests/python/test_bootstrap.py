"""Sockets between processes of which one goes away."""

import socket
import threading
import time

import pytest

from jaxhet import PeerError, _bootstrap, _config, _initialize
from jaxhet._errors import TransportError


def _leave(server: socket.socket) -> None:
    server.accept()[0].close()


def _connect_to_one_that_leaves(dies: bool) -> None:
    """Connects process 1 to process 0, which goes before it has said anything."""
    known_at = time.monotonic() + 0.3

    def check() -> None:
        if dies and time.monotonic() >= known_at:
            raise PeerError("process 0 has died")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_leave, args=(server,), daemon=True).start()
        listener = _bootstrap.Listener("127.0.0.1", 0, 1, b"secret")
        try:
            config = _config.resolve({"process_id": 0, "num_processes": 2}, {})
            claim = _initialize.make_claim(config, f"127.0.0.1:{server.getsockname()[1]}")
            _bootstrap.connect_peers(listener, [claim], 1, 5.0, check)
        finally:
            listener.close()


def test_death_in_the_handshake_is_the_reason() -> None:
    with pytest.raises(PeerError, match="process 0 has died"):
        _connect_to_one_that_leaves(dies=True)


def test_who_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bootstrap, "_DEATH_KNOWN_WITHIN_S", 0.1)
    with pytest.raises(
        TransportError, match=r"process 0 .* refused the connection: the other side"
    ):
        _connect_to_one_that_leaves(dies=False)
