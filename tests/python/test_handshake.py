"""Nothing of a peer is parsed before it has proved that it holds the job secret."""

import concurrent.futures
import socket

import pytest

from jaxhet._errors import TransportError
from jaxhet._net import handshake

HEADER = b"header of 16 b.."
ANSWER = b"answer"


_POOL = concurrent.futures.ThreadPoolExecutor()


def _accept(sock: socket.socket) -> tuple[bytes, handshake.Keys]:
    with sock:
        return handshake.accept(sock, b"secret", len(HEADER), lambda: ANSWER)


def _pair() -> tuple[socket.socket, socket.socket]:
    a, b = socket.socketpair()
    a.settimeout(5)
    b.settimeout(5)
    return a, b


def test_equal_secrets_are_accepted() -> None:
    a, b = _pair()
    accepted = _POOL.submit(_accept, b)
    answer, ours = handshake.connect(a, b"secret", HEADER, len(ANSWER))
    header, theirs = accepted.result(5)
    assert (header, answer) == (HEADER, ANSWER)
    assert (ours.send, ours.receive) == (theirs.receive, theirs.send)
    assert len({ours.send, ours.receive}) == 2
    assert len(ours.send) == len(ours.receive) == 32
    assert ours.send.hex() not in repr(ours)
    a.close()


def test_keys_are_those_of_hkdf() -> None:
    """RFC 5869, by another implementation."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    nonces = bytes(range(32)), bytes(range(32, 64))
    keys = handshake._derive(b"secret", *nonces, HEADER)
    for key, end in zip(keys, (b"acceptor", b"connector"), strict=True):
        info = b"jaxhet 2 key to " + end + b" " + HEADER
        hkdf = HKDF(hashes.SHA256(), 32, salt=b"".join(nonces), info=info)
        assert key == hkdf.derive(handshake._key(b"secret"))


def test_wrong_secret_is_refused_on_both_sides() -> None:
    a, b = _pair()
    accepted = _POOL.submit(_accept, b)
    with pytest.raises(handshake.RefusedError, match="did not accept our job secret"):
        handshake.connect(a, b"another", HEADER, len(ANSWER))
    assert isinstance(accepted.exception(5), handshake.RefusedError)
    a.close()


def test_silent_connector_times_out() -> None:
    a, b = _pair()
    with pytest.raises(TransportError, match="timed out"):
        handshake.accept(b, b"secret", len(HEADER), timeout_s=0.1)
    a.close()
    b.close()
