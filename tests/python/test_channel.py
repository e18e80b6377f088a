"""Messages of the coordinator's connections, with somebody in between who changes them."""

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from jaxhet._errors import TransportError
from jaxhet._net import channel, handshake
from jaxhet._net.channel import Channel

SECRET, HEADER = b"a job secret", b"header of 16 b.."
KEYS = handshake.Keys(b"1" * 32, b"2" * 32)
REFUSAL = "is not what the peer sealed: it was changed, repeated, reordered or cut on its way"


class Pair:
    """A channel that sends into a socket, and one that receives what a test passes on."""

    def __init__(self) -> None:
        self.sockets = socket.socketpair(), socket.socketpair()
        (ours, self.tap), (self.source, theirs) = self.sockets
        self.sender = Channel(ours, KEYS)
        self.receiver = Channel(theirs, handshake.Keys(KEYS.receive, KEYS.send))

    def sealed(self, message: object) -> bytes:
        self.sender.send(message)
        return self.tap.recv(1 << 20)

    def receive(self, *sealed: bytes) -> list[object]:
        self.source.sendall(b"".join(sealed))
        return [self.receiver.receive(0.5) for _ in sealed]

    def close(self) -> None:
        for sock in (sock for both in self.sockets for sock in both):
            sock.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with contextlib.closing(Pair()) as pair:
        yield pair


def test_messages_round_trip_and_are_hidden(pair: Pair) -> None:
    messages: list[object] = [{"x": [1, "two"]}, "a secret " * 9, None, 7]
    sealed = [pair.sealed(message) for message in messages]
    assert b"secret" not in b"".join(sealed)
    assert pair.receive(*sealed) == messages
    assert pair.sockets[1][1].gettimeout() is None  # the limit was for one message


def test_length_is_bounded(pair: Pair) -> None:
    with pytest.raises(TransportError, match="announced a message of 4294967295 bytes"):
        pair.receive(b"\xff\xff\xff\xff")


@pytest.mark.parametrize(
    "attack",
    [
        lambda a, b: (b, a),
        lambda a, b: (a, a),
        lambda a, b: (b,),
        lambda a, b: (a, b"\x10\0\0\0" + bytes(16)),
    ],
    ids=["reordered", "repeated", "dropped", "forged"],
)
def test_repeated_reordered_and_dropped_messages_are_refused(
    attack: Callable[[bytes, bytes], tuple[bytes, ...]], pair: Pair
) -> None:
    with pytest.raises(TransportError, match=REFUSAL):
        pair.receive(*attack(pair.sealed("one"), pair.sealed("two")))


def test_what_a_peer_sent_is_not_taken_back_from_it(pair: Pair) -> None:
    sealed = pair.sealed("one")
    pair.tap.sendall(sealed)
    with pytest.raises(TransportError, match=REFUSAL):
        pair.sender.receive(0.5)


def test_key_is_not_used_too_often(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_MOST_MESSAGES", 2)
    pair.sender.send(1)
    pair.sender.send(2)
    with pytest.raises(TransportError, match="has sent 2 messages, as many as its key allows"):
        pair.sender.send(3)
