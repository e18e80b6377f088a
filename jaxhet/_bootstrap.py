"""Opens the sockets between every two processes: one for control, several for data.

Ranks that have no better path get some of their own, too. All are authenticated with the job
secret. Of two processes the higher id connects to the lower one. A socket is handed to the engine
only after the handshake, with the keys that it made.
"""

import dataclasses
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxhet import _handshake
from jaxhet._accept import Acceptor
from jaxhet._addresses import split_address
from jaxhet._claim import Claim
from jaxhet._errors import JaxhetError, TransportError
from jaxhet._place import UNASSIGNED

_HEADER = struct.Struct("<8sHIII")  # magic, version, channel, from process, to process
_MAGIC = b"jaxhet-p"
_VERSION = 2
_FIRST_RING_CHANNEL = 1000
_DEATH_KNOWN_WITHIN_S = 2.0  # by the coordinator


@dataclasses.dataclass(frozen=True)
class Link:
    """A connected and authenticated socket, and its keys."""

    socket: socket.socket
    keys: _handshake.Keys


@dataclasses.dataclass(frozen=True)
class PeerSockets:
    """The connected sockets to one peer process."""

    control: Link
    data: tuple[Link, ...]


class Listener:
    """Listens for the peers with higher ids.

    Each connection is authenticated on a thread of its own.

    Attributes:
      address: host:port to which peers connect.
    """

    def __init__(self, host: str, port: int, process: int, secret: bytes):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            server = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise TransportError(
                f"process {process} can't listen on {host}:{port}: {error.strerror or error};"
                " set JAXHET_TCP_ADDRESS and JAXHET_TCP_PORT to an address of this machine and a"
                " free port"
            ) from error
        self.process = process
        self.secret = secret
        self._assigned = threading.Event()
        if process != UNASSIGNED:
            self._assigned.set()
        self._arrived = threading.Condition()
        self._links: dict[tuple[int, int], Link] = {}
        host, port = server.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._acceptor = Acceptor(server, self._authenticate, self._keep, "jaxhet-listener")

    def assign(self, process: int) -> None:
        """Says which process this is; until then nobody can connect."""
        self.process = process
        self._assigned.set()

    def take(
        self, expected: set[tuple[int, int]], deadline: float, check: Callable[[], None]
    ) -> dict[tuple[int, int], Link]:
        """Waits for the sockets of `expected` (process, channel)."""
        while True:
            with self._arrived:
                if expected <= self._links.keys():
                    return {key: self._links.pop(key) for key in expected}
                missing = sorted({process for process, _ in expected - self._links.keys()})
                self._arrived.wait(0.05)
            check()
            if time.monotonic() > deadline:
                raise TransportError(
                    f"process {', '.join(map(str, missing))} did not connect to process"
                    f" {self.process} at {self.address} in time ({self._acceptor.refused}"
                    " connections refused); check that it can reach this address, or set"
                    " JAXHET_TCP_ADDRESS here"
                )

    def close(self) -> None:
        """Stops listening; sockets that nobody took are closed."""
        self._acceptor.close()
        with self._arrived:
            for link in self._links.values():
                link.socket.close()
            self._links.clear()

    def _authenticate(self, sock: socket.socket) -> tuple[tuple[int, int], _handshake.Keys]:
        """Process and channel of a new connection, and its keys."""
        header, keys = _handshake.accept(sock, self.secret, _HEADER.size)
        magic, version, channel, source, target = _HEADER.unpack(header)
        self._assigned.wait(_handshake.TIMEOUT_S)  # a peer may hear of this process before itself
        if (magic, version, target) != (_MAGIC, _VERSION, self.process):
            raise TransportError("a connection that was meant for another process was refused")
        return (source, channel), keys

    def _keep(
        self, sock: socket.socket, authenticated: tuple[tuple[int, int], _handshake.Keys]
    ) -> None:
        key, keys = authenticated
        with self._arrived:
            self._links[key] = Link(sock, keys)
            self._arrived.notify_all()


def connect_peers(
    listener: Listener,
    members: Iterable[Claim],
    data_sockets: int,
    timeout_s: float,
    check: Callable[[], None],
) -> dict[int, PeerSockets]:
    """Connects the listener's process to every other one.

    Raises:
      TransportError: a peer could not be reached, or did not come, within `timeout_s`.
    """
    channels = range(1 + data_sockets)
    peers = [claim for claim in members if claim.process != listener.process]
    sockets = _connect_channels(
        listener, [(claim, channel) for claim in peers for channel in channels], timeout_s, check
    )
    return {
        c.process: PeerSockets(
            sockets[c.process, 0], tuple(sockets[c.process, k] for k in channels if k)
        )
        for c in peers
    }


def connect_rings(
    listener: Listener,
    pairs: Mapping[tuple[int, int], Claim],
    num_ranks: int,
    sockets_per_pair: int,
    timeout_s: float,
    check: Callable[[], None],
) -> list[tuple[int, int, list[Link]]]:
    """Connects ranks of the listener's process to ranks of others.

    Args:
      listener: That of this process.
      pairs: Own rank and other rank, and the other one's process.
      num_ranks: Of the job.
      sockets_per_pair: For both directions together.
      timeout_s: The longest wait for the peers.
      check: Called while it waits; what it raises is raised.

    Returns:
      Own rank, other rank and their sockets, in the order of their channels.

    Raises:
      TransportError: a peer could not be reached, or did not come, within `timeout_s`.
    """

    def channels(pair: tuple[int, int]) -> Sequence[int]:
        first = min(pair) * num_ranks + max(pair)
        start = _FIRST_RING_CHANNEL + first * sockets_per_pair
        return range(start, start + sockets_per_pair)

    wanted = [(claim, channel) for pair, claim in pairs.items() for channel in channels(pair)]
    sockets = _connect_channels(listener, wanted, timeout_s, check)
    return [
        (*pair, [sockets[claim.process, channel] for channel in channels(pair)])
        for pair, claim in pairs.items()
    ]


def _connect_channels(
    listener: Listener,
    wanted: Sequence[tuple[Claim, int]],
    timeout_s: float,
    check: Callable[[], None],
) -> dict[tuple[int, int], Link]:
    """The sockets of each channel to each peer, by process and channel."""
    process = listener.process
    deadline = time.monotonic() + timeout_s
    links: dict[tuple[int, int], Link] = {}
    for claim, channel in wanted:
        if claim.process < process:
            header = _HEADER.pack(_MAGIC, _VERSION, channel, process, claim.process)
            links[claim.process, channel] = _connect(
                claim, listener.secret, header, deadline, check
            )
    expected = {(claim.process, channel) for claim, channel in wanted if claim.process > process}
    links |= listener.take(expected, deadline, check)
    for link in links.values():
        link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.socket.setblocking(False)
    return links


def _connect(
    claim: Claim, secret: bytes, header: bytes, deadline: float, check: Callable[[], None]
) -> Link:
    host, port = split_address(claim.address)
    while True:
        check()
        try:
            sock = socket.create_connection((host, port), timeout=_handshake.TIMEOUT_S)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise TransportError(
                    f"can't connect to {claim} at {claim.address}: {error}; check the firewall, or"
                    " set JAXHET_TCP_ADDRESS or JAXHET_TCP_ADVERTISE there"
                ) from error
            time.sleep(0.05)
    try:
        keys = _handshake.connect(sock, secret, header)
    except JaxhetError as error:
        sock.close()
        _wait_for_reason(check)
        raise TransportError(
            f"{claim} at {claim.address} refused the connection: {error}"
        ) from error
    return Link(sock, keys)


def _wait_for_reason(check: Callable[[], None]) -> None:
    """Lets `check` say that a peer has died, if that is why it went away."""
    deadline = time.monotonic() + _DEATH_KNOWN_WITHIN_S
    while time.monotonic() < deadline:
        check()
        time.sleep(0.02)
