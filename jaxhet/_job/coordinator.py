"""The coordinator of a job: which processes are in it, whether they agree, and which have left.

It runs in a process of its own, so that it outlives any JAX process: `jaxhet launch` or process 0
starts it, or it is a service (`jaxhet coordinator`). It owns JAX's coordination service and keeps
one authenticated connection to every process of the job:

    process → coordinator  {"process_info": ProcessInfo, "request": …}
                                                once, with its request for a certificate
    coordinator → process  {"error": Failure}   the process or the job is refused, or a process
                                                exited without goodbye
                           {"members": [ProcessInfo], "process": i, "job": id,
                            "service": "host:port", "certificate": …}
                                                all processes have joined and agree
    process → coordinator  {"clock": number}    asks for the time (`_job/clock.py`)
    coordinator → process  {"clock": [number, microseconds]}
    process → coordinator  {"need": [process]}  a program of this process exchanges with these
    coordinator → process  {"need": process}    which needs this one: both connect
                           {"absent": [process]}
                                                of the needed ones, those that leave or have left,
                                                also later
    process → coordinator  {"leaving": true}    the process needs nobody any more
    coordinator → process  {"all_leave": true}  all processes have said so
    process → coordinator  {"failed": Failure}  the process could not start, or has failed and is
                                                not connected to all; everyone else is told
                           {"bye": true}        before it closes the connection

The id of a job is random, in hexadecimal digits: jobs may share a secret. A Failure is [class name,
text]. A job makes the certificates for JAX's service itself. All messages are encrypted
(`_net/channel.py`).
"""

import contextlib
import dataclasses
import secrets
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxhet import _errors
from jaxhet._errors import JaxhetError, PeerError, TransportError, UsageError
from jaxhet._jax import jaxlib
from jaxhet._job import announced as _announced
from jaxhet._job import clock
from jaxhet._job.membership import HEADER
from jaxhet._job.place import UNASSIGNED
from jaxhet._job.process_info import JOB_BYTES, ProcessInfo, disagreement
from jaxhet._net import handshake
from jaxhet._net.accept import Acceptor, refusals
from jaxhet._net.addresses import join_address
from jaxhet._net.channel import Channel
from jaxhet._net.outbox import Outbox

if TYPE_CHECKING:
    from jaxhet._net.certificates import Authority

# Hides a warning of JAX's coordination service that it is recoverable, which is intended.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}
_LINGER_S = 5.0


def command(address: str, num_processes: int, timeout_s: float) -> list[str]:
    """The command of a coordinator process.

    Its environment needs JAXHET_JOB_SECRET, and `QUIET`.
    """
    module = "jaxhet._job.coordinator_process"
    return [sys.executable, "-m", module, address, str(num_processes), str(timeout_s)]


@dataclasses.dataclass(frozen=True)
class Terms:
    """Size and islands that a coordinator requires of a job.

    Attributes:
      num_processes: Size of the job.
      timeout_s: Longest wait for all processes, from the first one on.
      sizes: Processes of each island, in the order of process ids; empty: not announced.
      advertise: Host under which processes reach this one; None: the address to which each process
        has connected.
    """

    num_processes: int
    timeout_s: float
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    advertise: str | None = None

    def place(self, info: ProcessInfo) -> ProcessInfo:
        """`info`, completed by the coordinator's values. Pure.

        Raises:
          UsageError: The sizes of the islands do not determine the process id.
        """
        num_processes, process = info.num_processes, info.process
        islands = info.islands or tuple(filter(None, _announced.text(self.sizes).split(",")))
        if num_processes == UNASSIGNED:
            num_processes = self.num_processes
        if process == UNASSIGNED:
            if not self.sizes or info.island_process is None:
                raise UsageError(
                    f"{info} has no process_id, and the coordinator does not know how many"
                    " processes the islands have: start `jaxhet coordinator` with --islands"
                    " NAME=PROCESSES,…, or set JAXHET_PROCESS_ID"
                )
            process = _announced.process_id(self.sizes, info.island, info.island_process)
        return dataclasses.replace(
            info, process=process, num_processes=num_processes, islands=islands
        )

    def disagreement(self, info: ProcessInfo) -> str | None:
        """Says why a process does not belong to this job, or None. Pure."""
        if info.num_processes != self.num_processes:
            return (
                f"num_processes differs: {info} has {info.num_processes}, the coordinator"
                f" {self.num_processes}; start every process of the job with the same value"
            )
        theirs = _announced.sizes(info.islands)
        if self.sizes and theirs and theirs != self.sizes:
            return (
                f"the islands differ: {info} announces {_announced.text(theirs)}, the coordinator"
                f" {_announced.text(self.sizes)}; give both the same sizes, or only one of them"
            )
        return None


class Coordinator:
    """The server. Two threads per process of the job, to read and to send; state under one lock.

    Args:
      listener: The listening socket; closed at the end of `serve`.
      secret: The job secret.
      terms: Size, islands and options that the processes must agree with.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        terms: Terms,
    ):
        self._listener = listener
        self._secret = secret
        self._terms = terms
        self._num_processes = terms.num_processes
        self._timeout_s = terms.timeout_s
        self._lock = threading.Condition(threading.RLock())
        self._infos: dict[int, ProcessInfo] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._left: set[int] = set()
        self._leaving: set[int] = set()
        # Processes that need another one, by the process that they need and that has not left.
        self._needed_by: dict[int, set[int]] = {}
        self._closed: set[int] = set()  # processes without a connection any more
        self._gone_errors: list[PeerError] = []
        self._error: JaxhetError | None = None
        self._complete = False
        self._stop = False
        self._job = secrets.token_hex(JOB_BYTES)
        self._requests: dict[int, bytes] = {}
        self._authority = _new_authority()
        address, self._service = jaxlib.start_coordination_service(
            listener.getsockname()[0], terms.num_processes, self._authority.service_credentials()
        )
        self._service_port = address.rpartition(":")[2]
        self._hosts: dict[int, str] = {}  # by which each process reaches this one

    def serve(self) -> None:
        """Serves processes until all have left; then ends the coordination service.

        Listens until the job is complete. After a refusal it still listens, to tell late processes
        the reason.
        """
        acceptor = Acceptor(
            self._listener, self._receive_info, self._serve_one, "jaxhet-coordinator"
        )
        self._wait_for_all(acceptor)
        if not self._error:
            acceptor.refuse_all()
        with self._lock:
            while not self._stop and self._has_work():
                self._lock.wait(0.5)
            # Late processes must hear the error; the others must end before the service.
            if self._error:
                self._lock.wait_for(
                    lambda: len(self._closed) == self._num_processes, timeout=_LINGER_S
                )
        acceptor.close()
        self._service.shutdown()

    @property
    def failure(self) -> str:
        """Why the job was refused, or which process left first without a goodbye; or ""."""
        with self._lock:
            return str(self._error or next(iter(self._gone_errors), ""))

    def _has_work(self) -> bool:
        """Whether processes have joined, or may still join."""
        return bool(set(self._infos) - self._left) or not (self._infos or self._error)

    def stop(self) -> None:
        """Ends `serve`, even if processes are still in the job."""
        with self._lock:
            self._stop = True
            self._lock.notify_all()

    def owner_is_gone(self) -> None:
        """Ends `serve` unless there are processes to serve."""
        with self._lock:
            if not self._infos:
                self.stop()

    def announce_exit(self, process: int, text: str) -> None:
        """Tells everybody that a process has ended (its owner saw it)."""
        self._gone(process, text)

    def _wait_for_all(self, acceptor: Acceptor[tuple[Channel, ProcessInfo, bytes]]) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._infos or self._error or self._stop)
            self._lock.wait_for(
                lambda: self._complete or self._error or self._stop, self._timeout_s
            )
            if self._complete or self._error or self._stop:
                return
            missing = [str(i) for i in range(self._num_processes) if i not in self._infos]
        self._fail(
            UsageError(
                f"process {', '.join(missing)} of {self._num_processes} has not joined within"
                f" {self._timeout_s:g} s; start it, or continue it if it is stopped, give all"
                " processes the same JAXHET_COORDINATOR_ADDRESS, or raise JAXHET_CONNECT_TIMEOUT_S"
                f" ({refusals([acceptor])})"
            )
        )

    def _receive_info(self, sock: socket.socket) -> tuple[Channel, ProcessInfo, bytes]:
        """A new connection's channel, description, and request for a certificate."""
        _, keys = handshake.accept(sock, self._secret, len(HEADER))
        channel = Channel(sock, keys)
        message = channel.receive(handshake.TIMEOUT_S)
        request = message["request"].encode()
        return channel, ProcessInfo.from_json(message["process_info"]), request

    def _serve_one(self, sock: socket.socket, received: tuple[Channel, ProcessInfo, bytes]) -> None:
        channel, info, request = received
        with sock:
            outbox = Outbox(sock, channel)
            try:
                info = self._terms.place(info)
                refusal = self._admit(info, request, outbox)
            except Exception as error:  # all processes are told of any error
                refusal = error if isinstance(error, UsageError) else _not_understood(info, error)
                if not self._complete:  # a stray process does not end a running job
                    self._fail(refusal)
            if refusal:
                outbox.send({"error": _errors.to_json(refusal)})
                outbox.finish()
                return
            try:
                self._follow(info, sock, channel)
            finally:
                outbox.close()

    def _admit(self, info: ProcessInfo, request: bytes, outbox: Outbox) -> JaxhetError | None:
        with self._lock:
            if self._error:
                return self._error
            if not 0 <= info.process < self._num_processes:
                return UsageError(
                    f"{info} is not one of the job's {self._num_processes} processes;"
                    f" process_id is 0 to {self._num_processes - 1}"
                )
            taken = self._infos.get(info.process)
            if taken:
                return UsageError(
                    f"process id {info.process} is taken: {taken} was first, and now {info};"
                    " give every process an id of its own"
                )
            differences = (disagreement(c, info) for c in self._infos.values())
            problem = next(filter(None, differences), None) or self._terms.disagreement(info)
            self._infos[info.process] = info
            self._hosts[info.process] = self._terms.advertise or outbox.local_host
            self._requests[info.process] = request
            self._outboxes[info.process] = outbox
            complete = len(self._infos) == self._num_processes
            for error in self._gone_errors:
                outbox.send({"error": _errors.to_json(error)})
            self._lock.notify_all()
        if problem:
            self._fail(UsageError(problem))
        elif complete:
            self._go()
        return None

    def _certificate(self, process: int) -> dict[str, str]:
        """The answer to a process's request."""
        pem = self._authority.sign(self._requests[process], process)
        return {"pem": pem.decode(), "authority": self._authority.certificate.decode()}

    def _go(self) -> None:
        with self._lock:
            islands = [info.island for info in self._infos.values()]
            announced = self._infos[0].islands
        sizes = self._terms.sizes or _announced.sizes(announced)
        if sizes and (difference := _announced.difference(sizes, islands)):
            self._fail(UsageError(difference))
            return
        names, expected = set(islands), set(announced)
        if not sizes and expected and names != expected:
            self._fail(
                UsageError(
                    f"the islands should be {sorted(expected)}, but the processes declare"
                    f" {sorted(names)}; set JAXHET_ISLAND of each process to one of the former"
                )
            )
            return
        try:
            certificates = {process: self._certificate(process) for process in self._requests}
        except ValueError as error:
            self._fail(UsageError(f"a process asked for a certificate that can't be: {error}"))
            return
        with self._lock:
            self._complete = True
            members = [dataclasses.asdict(self._infos[i]) for i in range(self._num_processes)]
            for process, outbox in self._outboxes.items():
                outbox.send(
                    {
                        "members": members,
                        "process": process,
                        "job": self._job,
                        "service": join_address(self._hosts[process], self._service_port),
                        "certificate": certificates[process],
                    }
                )
            self._lock.notify_all()

    def _follow(self, info: ProcessInfo, sock: socket.socket, channel: Channel) -> None:
        try:
            while True:
                message = channel.receive()
                if "failed" in message:
                    self._fail(_errors.from_json(message["failed"]))
                if "clock" in message:
                    self._tell_time(info.process, message["clock"])
                if "need" in message:
                    self._introduce(info.process, message["need"])
                if "leaving" in message:
                    self._set_leaving(info.process)
                if "bye" in message:
                    break
        except (TransportError, OSError) as error:
            self._gone(info.process, f"it ended without goodbye ({error})")
        except Exception as error:  # all processes are told of any error
            self._gone(info.process, f"the coordinator does not understand it ({error!r})")
        with self._lock:
            self._left.add(info.process)
            self._outboxes.pop(info.process, None)
            self._tell_if_all_leave()
            self._lock.notify_all()
        with contextlib.suppress(OSError):
            sock.recv(1)  # returns when the connection ends
        with self._lock:
            self._closed.add(info.process)
            self._lock.notify_all()

    def _introduce(self, process: int, needed: Sequence[int]) -> None:
        """Tells peers that a process needs them; tells the process which of them are leaving."""
        with self._lock:
            absent = [p for p in needed if p in self._leaving or p in self._left]
            if absent and process in self._outboxes:
                self._outboxes[process].send({"absent": absent})
            for other in (self._outboxes.keys() & needed) - {*absent}:
                self._needed_by.setdefault(other, set()).add(process)
                self._outboxes[other].send({"need": process})

    def _set_leaving(self, process: int) -> None:
        with self._lock:
            self._leaving.add(process)
            for other in self._needed_by.pop(process, ()):
                if other in self._outboxes:
                    self._outboxes[other].send({"absent": [process]})
            self._tell_if_all_leave()

    def _tell_if_all_leave(self) -> None:
        if len(self._leaving | self._left) == self._num_processes:
            for outbox in self._outboxes.values():
                outbox.send({"all_leave": True})

    def _tell_time(self, process: int, number: int) -> None:
        with self._lock:
            if process in self._outboxes:
                self._outboxes[process].send({"clock": [number, clock.now_us()]})

    def _fail(self, error: JaxhetError) -> None:
        """Refuses the job while it is being set up.

        All processes are told the first reason.
        """
        with self._lock:
            self._error = self._error or error
            for outbox in self._outboxes.values():
                outbox.send({"error": _errors.to_json(self._error)})
            self._lock.notify_all()

    def _gone(self, process: int, text: str) -> None:
        with self._lock:
            info = self._infos.get(process)
            if process in self._left:
                return
            self._left.add(process)
            name = f"process {process}" if info is None else str(info)
            error = PeerError(f"{name} is gone: {text}")
            self._gone_errors.append(error)
            for i, outbox in self._outboxes.items():
                if i != process:
                    outbox.send({"error": _errors.to_json(error)})
            self._lock.notify_all()


def _not_understood(info: ProcessInfo, error: Exception) -> TransportError:
    return TransportError(
        f"the coordinator does not understand the description of {info} ({error!r});"
        " use one version of jaxhet in the whole job"
    )


def _new_authority() -> "Authority":
    from jaxhet._net.certificates import Authority

    return Authority()
