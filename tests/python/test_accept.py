"""Strangers at a listening socket: honest connections are served without a long wait."""

import errno
import queue
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from jaxhet._errors import TransportError
from jaxhet._net import accept as _accept
from jaxhet._net import handshake
from jaxhet._net import outbox as _outbox
from jaxhet._net.channel import Channel

SECRET, HEADER = b"a job secret", b"header"
KEYS = handshake.Keys(bytes(32), bytes(32))


class Server:
    """An acceptor that queues the headers of those that authenticated."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = self.listener.getsockname()
        self.served: queue.Queue[bytes] = queue.Queue()
        self.acceptor = _accept.Acceptor(
            self.listener, self._authenticate, self._serve, "acceptor", most=4
        )

    def _authenticate(self, sock: socket.socket) -> bytes:
        return handshake.accept(sock, SECRET, len(HEADER))[0]

    def _serve(self, sock: socket.socket, header: bytes) -> None:
        self.served.put(header)
        sock.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.acceptor.close()


def _connect(server: Server) -> None:
    """Does what an honest process does; raises what it would."""
    with socket.create_connection(server.address, timeout=5) as sock:
        handshake.connect(sock, SECRET, HEADER, timeout_s=5)


def test_acceptor_outlives_a_lack_of_descriptors(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = socket.socket.accept, [OSError(errno.EMFILE, "too many")] * 3

    def accept(sock: socket.socket) -> object:
        connection = real(sock)
        if failures:
            failure = failures.pop()
            connection[0].close()  # the client goes on now
            raise failure
        return connection

    monkeypatch.setattr(socket.socket, "accept", accept)
    for _ in range(4):  # the first is accepted by the call that waited before the change
        with socket.create_connection(server.address) as sock:
            sock.settimeout(2)
            sock.recv(1)
    assert not failures
    _connect(server)
    assert server.served.get(timeout=5) == HEADER


def test_handshake_has_one_deadline_however_slowly_bytes_come() -> None:
    ours, theirs = socket.socketpair()
    done = threading.Event()

    def trickle() -> None:
        while not done.wait(0.05):
            theirs.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    start = time.monotonic()
    with pytest.raises(TransportError, match="reading from a peer failed: timed out"):
        handshake.accept(ours, SECRET, 4096, timeout_s=0.5)
    assert time.monotonic() - start < 2
    done.set()
    thread.join()
    ours.close()
    theirs.close()


def test_outbox_of_two_threads_never_mixes_messages() -> None:
    ours, theirs = socket.socketpair()
    outbox = _outbox.Outbox(ours, Channel(ours, KEYS))
    padding = ("x" * 20_000, "y" * 3)  # long and short ones

    def send(sender: int) -> None:
        for number in range(300):
            outbox.send({"from": sender, "number": number, "padding": padding[sender]})

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(2)]
    for thread in threads:
        thread.start()
    channel = Channel(theirs, KEYS)
    received = [channel.receive(5) for _ in range(600)]
    for thread in threads:
        thread.join()
    for sender in range(2):
        mine = [message for message in received if message["from"] == sender]
        assert [message["number"] for message in mine] == list(range(300))
        assert all(message["padding"] == padding[sender] for message in mine)
    outbox.close()
    ours.close()
    theirs.close()


@pytest.mark.parametrize(("queued", "timeout_s"), [(8, 30), (1024, 1)])
def test_peer_that_takes_nothing_is_cut_off(
    queued: int, timeout_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_outbox, "_MOST_QUEUED", queued)
    monkeypatch.setattr(_outbox, "SEND_TIMEOUT_S", timeout_s)
    ours, theirs = socket.socketpair()
    outbox = _outbox.Outbox(ours, Channel(ours, KEYS))
    start = time.monotonic()
    for _ in range(100):
        outbox.send("x" * 100_000)
    assert time.monotonic() - start < 1  # who sends never waits
    assert select.select([ours], [], [], 5)[0]
    assert ours.recv(1) == b""  # the reader of this connection learns of it
    outbox.close()
    ours.close()
    theirs.close()


def test_connection_for_which_no_thread_is_left_is_closed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with socket.create_connection(server.address, timeout=5) as sock:
        assert sock.recv(1) == b""
    assert server.acceptor.last_refusal == "can't start new thread"
    monkeypatch.undo()
    _connect(server)
    assert server.served.get(timeout=5) == HEADER
