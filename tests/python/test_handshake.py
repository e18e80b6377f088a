"""Nothing of a peer is parsed before it has proved that it holds the job secret."""

import socket
import threading

import pytest

from jaxhet import _handshake
from jaxhet._errors import TransportError

HEADER = b"header of 16 b.."


def _accept_on_thread(sock: socket.socket, secret: bytes) -> list[object]:
    result: list[object] = []

    def body() -> None:
        try:
            result.append(_handshake.accept(sock, secret, len(HEADER)))
        except Exception as error:
            result.append(error)
        finally:
            sock.close()

    thread = threading.Thread(target=body)
    thread.start()
    result.append(thread)
    return result


def _pair() -> tuple[socket.socket, socket.socket]:
    a, b = socket.socketpair()
    a.settimeout(5)
    b.settimeout(5)
    return a, b


def test_equal_secrets_are_accepted() -> None:
    a, b = _pair()
    result = _accept_on_thread(b, b"secret")
    _handshake.connect(a, b"secret", HEADER)
    result[0].join()  # type: ignore[attr-defined]
    assert result[1] == HEADER
    a.close()


def test_wrong_secret_is_refused_on_both_sides() -> None:
    a, b = _pair()
    result = _accept_on_thread(b, b"secret")
    with pytest.raises(_handshake.RefusedError, match="did not accept our job secret"):
        _handshake.connect(a, b"another", HEADER)
    result[0].join()  # type: ignore[attr-defined]
    assert isinstance(result[1], _handshake.RefusedError)
    a.close()


def test_changed_header_is_refused() -> None:
    a, b = _pair()
    result = _accept_on_thread(b, b"secret")
    nonce = bytes(_handshake.NONCE_BYTES)
    a.sendall(nonce)
    theirs = _handshake.receive_exactly(a, _handshake.NONCE_BYTES)
    proof = _handshake._mac(b"secret", b"connect", nonce, theirs, HEADER)
    a.sendall(HEADER[::-1] + proof)
    result[0].join()  # type: ignore[attr-defined]
    assert isinstance(result[1], _handshake.RefusedError)
    a.close()


def test_acceptor_without_the_secret_is_refused() -> None:
    a, b = _pair()
    b.sendall(bytes(_handshake.NONCE_BYTES + _handshake.MAC_BYTES))
    with pytest.raises(_handshake.RefusedError, match="does not hold our job secret"):
        _handshake.connect(a, b"secret", HEADER)
    a.close()
    b.close()


def test_silent_connector_times_out() -> None:
    a, b = _pair()
    b.settimeout(0.1)
    with pytest.raises(TransportError, match="timed out"):
        _handshake.accept(b, b"secret", len(HEADER))
    a.close()
    b.close()


def test_frames_round_trip_and_are_bounded() -> None:
    a, b = _pair()
    _handshake.send_frame(a, {"x": [1, "two"]})
    assert _handshake.receive_frame(b) == {"x": [1, "two"]}
    a.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(TransportError, match="announced a message of 4294967295 bytes"):
        _handshake.receive_frame(b)
    a.close()
    b.close()
