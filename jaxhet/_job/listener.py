"""The ports of a process to which its peers connect, and the handshake of these connections.

Each end tells the other in the handshake which process of which job it is: jobs may share a secret,
and a port may pass from one to another.
"""

import dataclasses
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from jaxhet._errors import TransportError
from jaxhet._job.process_info import JOB_BYTES, ProcessInfo
from jaxhet._net import handshake
from jaxhet._net.accept import Acceptor, refusals
from jaxhet._net.interfaces import Interface

# Magic, version, channel, round trip in µs, from process, to process, job.
_HEADER = struct.Struct(f"<8sHIIII{JOB_BYTES}s")
_ANSWER = struct.Struct(f"<I{JOB_BYTES}s")  # process, job
_TCP_INFO = struct.Struct("148xI")  # tcpi_min_rtt in linux/tcp.h
_MAGIC = b"jaxhet-p"
_VERSION = 5
_ANY = 2**32  # more than a header can say
_PORTS = "check JAXHET_SOCKET_PORT and JAXHET_SOCKET_ADVERTISE"


@dataclasses.dataclass(frozen=True)
class Link:
    """A connected and authenticated socket.

    Attributes:
      keys: Keys of the connection.
      round_trip_us: Round trip that the end which connects has measured: both ends know it.
    """

    socket: socket.socket
    keys: handshake.Keys
    round_trip_us: int = 0


class Listener:
    """Listens for the peers with higher ids.

    Each connection is authenticated on a thread of its own. A peer opens one again only after this
    end has refused the first.

    Args:
      host: Address to listen on.
      port: Port to listen on; 0: any free one.
      process: This process.
      secret: The job secret.
      job: The id of the job. Without it, nobody can connect before `assign`.
      interfaces: Network interfaces to listen on, too.

    Attributes:
      address: host:port to which peers connect.
      interfaces: Interfaces to which peers may connect for data, with their ports.
      num_processes: Number of processes of the job, or more.
    """

    def __init__(
        self,
        host: str,
        port: int,
        process: int,
        secret: bytes,
        job: bytes = b"",
        interfaces: Sequence[Interface] = (),
    ):
        self.process = process
        self.secret = secret
        self.job = job
        self.num_processes = _ANY
        self._assigned = threading.Event()
        if job:
            self._assigned.set()
        self._arrived = threading.Condition()
        self._links: dict[tuple[int, int], Link] = {}
        self._taken: set[tuple[int, int]] = set()
        addresses = [str(interface.address.ip) for interface in interfaces]
        servers = _listen(host, port, process, addresses)
        ports = dict(server.getsockname()[:2] for server in servers)
        main, bound = next(iter(ports.items()))
        self.address = f"{main}:{bound}"
        self.interfaces = tuple(
            dataclasses.replace(interface, port=ports.get(address, bound))
            for interface, address in zip(interfaces, addresses, strict=True)
        )
        self._acceptors = [
            Acceptor(server, self._authenticate, self._keep, "jaxhet-listener")
            for server in servers
        ]

    def assign(self, process: int, job: bytes, num_processes: int) -> None:
        """Sets the id of the process and of the job. Before that, no peer can connect.

        Args:
          process: This process.
          job: The id of the job.
          num_processes: Number of processes of the job.
        """
        self.process = process
        self.job = job
        self.num_processes = num_processes
        self._assigned.set()

    def introduce(
        self,
        sock: socket.socket,
        info: ProcessInfo,
        channel: int,
        address: str,
        timeout_s: float = handshake.TIMEOUT_S,
    ) -> Link:
        """Authenticates a socket that this process has opened to the process of `info`.

        Args:
          sock: A connected socket; it stays open if this fails.
          info: The peer.
          channel: The purpose of the socket.
          address: host:port to which the socket is connected, for errors.
          timeout_s: Time limit of the handshake.

        Raises:
          RefusedError: The other end holds another secret, is not jaxhet, or did not answer.
          TransportError: The other end is another process, or of another job.
        """
        round_trip_us = _round_trip_us(sock)
        ends = self.process, info.process, self.job
        header = _HEADER.pack(_MAGIC, _VERSION, channel, round_trip_us, *ends)
        answer, keys = handshake.connect(sock, self.secret, header, _ANSWER.size, timeout_s)
        _check_answer(answer, info, address, self.job)
        return Link(sock, keys, round_trip_us)

    def take(
        self,
        expected: set[tuple[int, int]],
        deadline: float,
        check: Callable[[], None],
    ) -> dict[tuple[int, int], Link]:
        """Waits for the sockets of `expected` (process, channel)."""
        while True:
            with self._arrived:
                if expected <= self._links.keys():
                    self._taken |= expected
                    return {key: self._links.pop(key) for key in expected}
                missing = sorted({process for process, _ in expected - self._links.keys()})
                self._arrived.wait(0.05)
            check()
            if time.monotonic() > deadline:
                raise TransportError(
                    f"process {', '.join(map(str, missing))} did not connect to process"
                    f" {self.process} at {self.address} in time ({refusals(self._acceptors)});"
                    " check that it can reach this address, or set JAXHET_SOCKET_ADDRESS here"
                )

    def close(self) -> None:
        """Stops listening, and closes sockets that were not taken."""
        for acceptor in self._acceptors:
            acceptor.close()
        with self._arrived:
            for link in self._links.values():
                link.socket.close()
            self._links.clear()

    def close_in_child(self) -> None:
        """Closes a forked child's copies of the sockets; the process goes on listening."""
        for acceptor in self._acceptors:
            acceptor.close_in_child()

    def _authenticate(self, sock: socket.socket) -> tuple[tuple[int, int], Link]:
        """Process and channel of a new connection."""
        header, keys = handshake.accept(sock, self.secret, _HEADER.size, self._identity)
        magic, version, channel, round_trip_us, source, target, job = _HEADER.unpack(header)
        if job != self.job:
            raise TransportError(_another_job(f"process {source}", job, self.job))
        if (magic, version, target) != (_MAGIC, _VERSION, self.process):
            raise TransportError("a connection that was meant for another process was refused")
        self._check_sender(source, channel)
        return (source, channel), Link(sock, keys, round_trip_us)

    def _check_sender(self, source: int, channel: int) -> None:
        """Checks that a peer of the job may open this connection.

        Raises:
          TransportError: No such process connects to this one, or the process has this connection
            already.
        """
        if not self.process < source < self.num_processes:
            last = "" if self.num_processes == _ANY else f" up to {self.num_processes - 1}"
            raise TransportError(
                f"a connection in the name of process {source} was refused: only processes with ids"
                f" above {self.process}{last} connect to process {self.process}"
            )
        with self._arrived:
            is_there = (source, channel) in self._taken or (source, channel) in self._links
        if is_there:
            raise TransportError(
                f"a second connection for channel {channel} of process {source} was refused"
            )

    def _identity(self) -> bytes:
        """The identity that this process presents, once it has joined.

        A peer may hear of the job's completion before this process does.
        """
        if not self._assigned.wait(handshake.TIMEOUT_S):
            raise TransportError("this process has not joined its job")
        return _ANSWER.pack(self.process, self.job)

    def _keep(self, sock: socket.socket, authenticated: tuple[tuple[int, int], Link]) -> None:
        key, link = authenticated
        with self._arrived:
            if key in self._taken or key in self._links:
                sock.close()
                return
            self._links[key] = link
            self._arrived.notify_all()


def _round_trip_us(sock: socket.socket) -> int:
    """The shortest round trip so far; 0 if it is unknown."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(info) < _TCP_INFO.size:
        return 0
    (found,) = _TCP_INFO.unpack(info)
    return 0 if found == 2**32 - 1 else found


def _check_answer(answer: bytes, info: ProcessInfo, address: str, job: bytes) -> None:
    """Checks that the process that answers is the process of `info` in this job. Pure.

    Raises:
      TransportError: It is another process, or one of another job; the text names it.
    """
    found, theirs = _ANSWER.unpack(answer)
    who = f"process {found}, which answers at {address} in place of {info},"
    if theirs != job:
        raise TransportError(_another_job(who, theirs, job))
    if found != info.process:
        raise TransportError(f"{who} is of this job; {_PORTS}")


def _another_job(who: str, theirs: bytes, ours: bytes) -> str:
    """Why a process with the same job secret is refused."""
    return (
        f"{who} is of another job with the same job secret (id {theirs.hex()}, here {ours.hex()});"
        f" give each job a secret of its own, or {_PORTS}"
    )


def _listen(host: str, port: int, process: int, others: Sequence[str] = ()) -> list[socket.socket]:
    """Listening sockets: one at `host`, and one at each other address that it does not cover."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        main = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise TransportError(
            f"process {process} can't listen on {host}:{port}: {error.strerror or error};"
            " set JAXHET_SOCKET_ADDRESS and JAXHET_SOCKET_PORT to an address of this machine and a"
            " free port"
        ) from error
    own = main.getsockname()[0]
    if ipaddress.ip_address(own).is_unspecified:
        return [main]
    servers = [main]
    try:
        for other in dict.fromkeys(others):
            if other != own:
                servers += _listen(other, port, process)
    except TransportError:
        for server in servers:
            server.close()
        raise
    return servers
