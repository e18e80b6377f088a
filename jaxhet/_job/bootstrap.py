"""Opens the sockets between processes: one for control, several for data.

Pairs of ranks without a better path get their own sockets too. All are authenticated with the job
secret. The process with the higher id connects to the lower one. A socket is handed to the engine
only after the handshake, with the keys that it made (`_job/listener.py`).

Both ends know from their `ProcessInfo` which of their network interfaces are joined
(`interfaces.pairs`). Data sockets use these pairs in turns. Where a pair can't connect, the address
for control takes its place.
"""

import concurrent.futures
import dataclasses
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxhet._errors import JaxhetError, TransportError
from jaxhet._job.listener import Link, Listener
from jaxhet._job.process_info import ProcessInfo
from jaxhet._log import LOGGER
from jaxhet._net import handshake, interfaces
from jaxhet._net.accept import MOST_HALF_OPEN
from jaxhet._net.addresses import join_address, split_address
from jaxhet._net.interfaces import Interface

# Sockets for data of a rank to its partners on rails; as many connect it with all other ranks.
DEVICE_SOCKETS = 8
_FIRST_DEVICE_SOCKET = 1000
_DEATH_KNOWN_WITHIN_S = 2.0  # time in which the coordinator reports a dead process
_POLL_MS = 50
# One data socket for each 5 ms of the round trip, at most 16 in a job of two processes. A socket
# that loses a packet slows down, and the others fill the line meanwhile. Measured by
# tests/support/thin_link.py over 1 Gbit/s: 24 sockets are slower than 16. Larger jobs have fewer
# for each pair: pairs share the line, and a process has few descriptors (ulimit -n).
_SOCKET_US = 5000
_MOST_FOR_ROUND_TRIP = 32  # divided by the number of processes
_MOST_AT_ONCE = 8
_PATH_TIMEOUT_S = 3.0  # for a connection between two interfaces that may not reach each other

_Pair = tuple[Interface, Interface]  # ours and the peer's


@dataclasses.dataclass(frozen=True)
class PeerSockets:
    """The connected sockets to one peer process."""

    control: Link
    data: tuple[Link, ...]


def connect_peers(
    listener: Listener,
    members: Iterable[ProcessInfo],
    data_sockets: int,
    timeout_s: float,
    check: Callable[[], None],
) -> dict[int, PeerSockets]:
    """Connects the listener's process to all other processes in `members`.

    Args:
      listener: Listener of this process.
      members: Processes to connect to.
      data_sockets: Smallest number for each of them. 0: only the control socket is connected. Peers
        with a long round trip have more.
      timeout_s: The longest wait for the peers.
      check: Called while it waits; what it raises is raised.

    Raises:
      TransportError: a peer could not be reached, or did not connect, within `timeout_s`.
    """
    peers = [info for info in members if info.process != listener.process]
    wanted = [_Wanted(info, 0, None) for info in peers]
    deadline = time.monotonic() + timeout_s
    control = _connect_channels(listener, wanted, timeout_s, check)
    wanted = []
    for info in peers:
        pairs = _pairs(listener, info)
        num_data = _num_data(
            control[info.process, 0], data_sockets, len(pairs), listener.num_processes
        )
        wanted += [_Wanted(info, 1 + i, pairs[i % len(pairs)]) for i in range(num_data)]
    rest_s = max(deadline - time.monotonic(), 0)
    links = _connect_channels(listener, wanted, rest_s, check)
    data: dict[int, list[Link]] = {info.process: [] for info in peers}
    for way in wanted:
        data[way.info.process].append(links[way.info.process, way.channel])
    return {p: PeerSockets(control[p, 0], tuple(found)) for p, found in data.items()}


def _num_data(control: Link, fewest: int, num_pairs: int, num_processes: int) -> int:
    """Number of data sockets to a peer, the same at both ends. Pure."""
    if fewest:
        most = _MOST_FOR_ROUND_TRIP // num_processes
        fewest = max(fewest, min(control.round_trip_us // _SOCKET_US, most))
    return -(-fewest // num_pairs) * num_pairs  # equally many for each pair of interfaces


@dataclasses.dataclass(frozen=True)
class RankSockets:
    """The connected sockets between a rank of this process and another one.

    Attributes:
      rank: Own rank.
      peer: Other rank.
      num_lanes: Number of lanes.
      links: Sockets of one lane after the other; the first of each is for messages.
    """

    rank: int
    peer: int
    num_lanes: int
    links: Sequence[Link]


def connect_device_channels(
    listener: Listener,
    pairs: Mapping[tuple[int, int], tuple[ProcessInfo, int]],
    num_ranks: int,
    timeout_s: float,
    check: Callable[[], None],
) -> list[RankSockets]:
    """Connects ranks of the listener's process to ranks of others.

    Both directions of a pair share its sockets. They form lanes, at least one: a lane has a socket
    for each pair of interfaces, and one for messages, which uses the address for control.

    Args:
      listener: Listener of this process.
      pairs: Own rank and other rank; the other one's process, and the number of sockets for data.
      num_ranks: Number of ranks of the job.
      timeout_s: The longest wait for the peers.
      check: Called while it waits; what it raises is raised.

    Raises:
      TransportError: a peer could not be reached, or did not connect, within `timeout_s`.
    """
    wanted: dict[tuple[int, int], list[_Wanted]] = {}
    lanes: dict[tuple[int, int], int] = {}
    for pair, (info, num_data) in pairs.items():
        ways = _pairs(listener, info)[:DEVICE_SOCKETS]
        lanes[pair] = max(1, num_data // len(ways))
        first = min(pair) * num_ranks + max(pair)
        channels = enumerate([None, *ways] * lanes[pair], first * 2 * DEVICE_SOCKETS)
        wanted[pair] = [_Wanted(info, _FIRST_DEVICE_SOCKET + i, way) for i, way in channels]
    every = [way for ways in wanted.values() for way in ways]
    links = _connect_channels(listener, every, timeout_s, check)
    return [
        RankSockets(*pair, lanes[pair], [links[way.info.process, way.channel] for way in ways])
        for pair, ways in wanted.items()
    ]


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """A socket to a process, and the interfaces that it joins; None: the address for control."""

    info: ProcessInfo
    channel: int
    pair: _Pair | None


def _pairs(listener: Listener, info: ProcessInfo) -> Sequence[_Pair | None]:
    """The pairs of interfaces between this process and another one; (None,) if there are none."""
    theirs = [Interface.parse(text) for text in info.interfaces]
    if listener.process < info.process:
        return interfaces.pairs(listener.interfaces, theirs) or (None,)
    found = interfaces.pairs(theirs, listener.interfaces)
    return [(own, other) for other, own in found] or (None,)


def _connect_channels(
    listener: Listener,
    wanted: Sequence[_Wanted],
    timeout_s: float,
    check: Callable[[], None],
) -> dict[tuple[int, int], Link]:
    """The sockets of each channel to each peer, by process and channel."""
    deadline = time.monotonic() + timeout_s
    left: set[Interface] = set()  # this process's interfaces that could not reach a peer
    errors: list[BaseException] = []

    def connect(way: _Wanted) -> Link:
        if errors:
            raise errors[0]
        try:
            link = (
                _connect_pair(listener, way.pair, way, deadline, check, left) if way.pair else None
            )
            return link or _connect(listener, way, deadline, check)
        except BaseException as error:
            errors.append(error)
            raise

    lower = [way for way in wanted if way.info.process < listener.process]
    with concurrent.futures.ThreadPoolExecutor(_at_once(listener)) as pool:
        connected = list(pool.map(connect, lower))
    links = {(w.info.process, w.channel): link for w, link in zip(lower, connected, strict=True)}
    expected = {(w.info.process, w.channel) for w in wanted if w.info.process > listener.process}
    links |= listener.take(expected, deadline, check)
    for link in links.values():
        link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.socket.setblocking(False)
    return links


def _at_once(listener: Listener) -> int:
    """Number of sockets that a process opens at a time; all of them may reach one listener."""
    return max(1, min(_MOST_AT_ONCE, MOST_HALF_OPEN // 2 // listener.num_processes))


def _connect_pair(
    listener: Listener,
    pair: _Pair,
    way: _Wanted,
    deadline: float,
    check: Callable[[], None],
    left: set[Interface],
) -> Link | None:
    """A socket between two interfaces; None if our interface is in `left`, or is added to it."""
    own, other = pair
    if own in left:
        return None
    host = str(other.address.ip)
    address = join_address(host, other.port)
    try:
        sock = socket.create_connection(
            (host, other.port), _PATH_TIMEOUT_S, source_address=(str(own.address.ip), 0)
        )
        return _introduce(listener, sock, way, address, deadline, check)
    except (OSError, JaxhetError) as error:
        if own in left:  # another thread has logged it
            return None
        left.add(own)
        LOGGER.warning(
            "[process %d] socket leaves %s: no connection to %s, %s of %s: %s. Its data connections"
            " go over %s. Check that interface, or name others with JAXHET_SOCKET_INTERFACES",
            listener.process,
            own,
            address,
            other.name,
            way.info,
            error,
            way.info.address,
        )
        return None


def _connect(listener: Listener, way: _Wanted, deadline: float, check: Callable[[], None]) -> Link:
    info = way.info
    while True:
        sock = _open(info, deadline, check)
        opened = time.monotonic()
        try:
            return _introduce(listener, sock, way, info.address, deadline, check)
        except JaxhetError as error:
            # This process was late, for example while it compiled, and the peer has refused it.
            if opened + handshake.TIMEOUT_S / 2 < time.monotonic() < deadline:
                continue
            wait_for_reason(check)
            if isinstance(error, handshake.RefusedError):
                raise TransportError(
                    f"no connection to {info} at {info.address}: {error}"
                ) from error
            raise


def _introduce(
    listener: Listener,
    sock: socket.socket,
    way: _Wanted,
    address: str,
    deadline: float,
    check: Callable[[], None],
) -> Link:
    """Authenticates a socket to a peer, which may be late while it compiles; else closes it."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    try:
        while not poll.poll(_POLL_MS):  # the peer sends first
            check()
            if time.monotonic() > deadline:
                raise handshake.NoAnswerError("no answer in time")
        rest_s = max(deadline - time.monotonic(), _POLL_MS / 1000)
        return listener.introduce(sock, way.info, way.channel, address, rest_s)
    except BaseException:
        sock.close()
        raise


def _open(info: ProcessInfo, deadline: float, check: Callable[[], None]) -> socket.socket:
    """A connection to an address at which a process listens."""
    host, port = split_address(info.address)
    while True:
        check()
        try:
            return socket.create_connection((host, port), timeout=handshake.TIMEOUT_S)
        except OSError as error:
            if time.monotonic() > deadline:
                raise TransportError(
                    f"can't connect to {info} at {info.address}: {error}; check the firewall, or"
                    " set JAXHET_SOCKET_ADDRESS or JAXHET_SOCKET_ADVERTISE there"
                ) from error
            time.sleep(0.05)


def wait_for_reason(check: Callable[[], None]) -> None:
    """Calls `check` for 2 s: it raises the reason of a lost connection if the peer has died."""
    deadline = time.monotonic() + _DEATH_KNOWN_WITHIN_S
    while time.monotonic() < deadline:
        check()
        time.sleep(0.02)
