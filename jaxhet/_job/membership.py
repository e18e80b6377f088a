"""Connection of a process to the job's coordinator (messages: `_job/coordinator.py`)."""

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxhet import _errors
from jaxhet._errors import JaxhetError, TransportError, UsageError
from jaxhet._job import clock
from jaxhet._job.place import UNASSIGNED
from jaxhet._job.process_info import JOB_BYTES, ProcessInfo
from jaxhet._net import handshake
from jaxhet._net.addresses import split_address
from jaxhet._net.channel import Channel
from jaxhet._net.outbox import limit_sends

if TYPE_CHECKING:
    from jaxhet._net.certificates import Identity

HEADER = b"jaxhet-coordinator"
_CLOSE_TIMEOUT_S = 5.0  # for a coordinator that reads slowly
MOST_SILENCE_S = 40.0  # less than half of JAX's time for heartbeats, after which it aborts
_QUESTIONS = 4  # without an answer, after which the coordinator is lost
_NO_CLOCK = -1  # number of a question whose answer is no reading of the clock


class Membership:
    """A process's connection to the coordinator, and the facts received from it.

    Attributes:
      failure: The first failure that the coordinator has reported, or None.
      loss: The error if the coordinator has exited or is silent, or None.
    """

    def __init__(self, sock: socket.socket, channel: Channel):
        self._sock = sock
        self._coordinator = ":".join(map(str, sock.getpeername()[:2]))
        self._channel = channel
        self._send_lock = threading.Lock()  # a frame may be longer than a socket takes at once
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self.failure: JaxhetError | None = None
        self.loss: TransportError | None = None
        self._on_loss: Callable[[], None] = lambda: None
        self._left = threading.Event()
        self._unanswered = 0  # questions since the coordinator's last message
        self._needed_by: list[int] = []  # not passed on yet
        self._on_need: Callable[[int], None] = self._needed_by.append
        self._on_absent: Callable[[int], None] = lambda process: None
        self._all_leave = threading.Event()
        self.members: list[ProcessInfo] = []
        self.process = UNASSIGNED
        self.job = b""
        self.service_address = ""
        self.credentials: dict[str, Any] = {}
        self.clock = clock.CoordinatorClock(lambda number: self._send({"clock": number}))

    def join(self, info: ProcessInfo, timeout_s: float, silence_s: float = MOST_SILENCE_S) -> None:
        """Presents `info` and waits until all processes have joined.

        From then on a coordinator that is silent for `silence_s` has failed. Afterwards
        `credentials` are those for JAX's coordination service.

        Raises:
          UsageError: the job is not complete or does not agree; the text is the coordinator's.
        """
        identity = _new_identity()
        request = identity.request.decode()
        message = {"process_info": dataclasses.asdict(info), "request": request}
        self._channel.send(message)
        self._sock.settimeout(timeout_s)
        while not self.members:
            try:
                self._begin(self._channel.receive(), identity)
            except (LookupError, TypeError, AttributeError, RecursionError, ValueError) as error:
                raise TransportError(_not_understood(error)) from error
            except TransportError as error:
                if isinstance(error.__cause__, TimeoutError):
                    raise self._silent(timeout_s) from error.__cause__
                raise self._lost(f"is gone ({error})") from error
        self._sock.settimeout(None)
        self._reader = threading.Thread(target=self._follow, name="jaxhet-coordinator", daemon=True)
        self._reader.start()
        period_s = min(silence_s, MOST_SILENCE_S) / _QUESTIONS
        threading.Thread(target=self._ask, args=(period_s,), name="jaxhet-ask", daemon=True).start()

    def _begin(self, message: dict[str, Any], identity: "Identity") -> None:
        """Reads the coordinator's answer to the process's description."""
        self._hear(message)
        self.check()
        members = [ProcessInfo.from_json(fields) for fields in message["members"]]
        if sorted(info.process for info in members) != list(range(len(members))):
            raise TransportError("the coordinator names other processes than the job's")
        self.process = int(message["process"])
        self.job = bytes.fromhex(message["job"])
        if len(self.job) != JOB_BYTES:
            raise TransportError(f"the id of the job has not {JOB_BYTES} bytes")
        self.service_address = message["service"]
        split_address(self.service_address, "the coordinator's service")
        answer = message["certificate"]
        pems = answer["pem"].encode(), answer["authority"].encode()
        self.credentials = identity.process_credentials(*pems)
        self.members = members

    def _silent(self, timeout_s: float) -> TransportError:
        """Error of a job that was not complete in time, if no other cause is known."""
        return TransportError(
            f"the coordinator at {self._coordinator} has not started the job within {timeout_s:g}"
            " s; other processes may have another JAXHET_COORDINATOR_ADDRESS, or the coordinator a"
            " longer JAXHET_CONNECT_TIMEOUT_S than this process"
        )

    @property
    def local_address(self) -> str:
        """This machine's address on the way to the coordinator."""
        return self._sock.getsockname()[0]

    @property
    def coordinator_host(self) -> str:
        """Address of the coordinator's host; "" if that is this machine."""
        host = self._sock.getpeername()[0]
        return "" if host == self.local_address else host

    def when_lost(self, action: Callable[[], None]) -> None:
        """Calls a function once when the coordinator is lost, or now if it is lost already."""
        with self._lock:
            self._on_loss = action
            is_lost = self.loss is not None
        if is_lost:
            action()

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if failure := self.failure:
            raise failure

    def report(self, error: JaxhetError) -> None:
        """Tells the others that this process could not start."""
        self._send({"failed": _errors.to_json(error)})

    def ask_for(self, processes: Sequence[int]) -> None:
        """Tells these processes to connect, and asks which have left the job."""
        self._send({"need": list(processes)})

    def listen_needs(
        self, on_need: Callable[[int], None], on_absent: Callable[[int], None]
    ) -> None:
        """Sets functions that are called with the number of a process. They must not block.

        Args:
          on_need: Called with a process that needs this one.
          on_absent: Called with a process that this one needs and that has left.
        """
        with self._lock:
            self._on_need, self._on_absent = on_need, on_absent
            for process in self._needed_by:
                on_need(process)
            self._needed_by.clear()

    def wait_for_all_to_leave(self, timeout_s: float) -> None:
        """Says that this process leaves, and waits for all others to say so, or for a failure."""
        self._send({"leaving": True})
        deadline = time.monotonic() + timeout_s
        while not self._all_leave.wait(0.05) and time.monotonic() < deadline:
            if self.failure is not None:
                return

    def leave(self, *, close: bool = True) -> None:
        """Says goodbye and closes the connection, or leaves it open until the process ends."""
        self._left.set()
        self._send({"bye": True})
        if not close:
            self._sock.detach()
            return
        # The coordinator closes its end in answer. A socket that is closed earlier, and still
        # receives bytes, drops its unsent ones.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        if self._reader is not None and self.loss is None:
            self._reader.join(_CLOSE_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def close_in_child(self) -> None:
        """Closes a forked child's copy of the connection; says nothing."""
        self._left = threading.Event()  # a thread that is not here may hold the old one's lock
        self._left.set()
        os.close(self._sock.detach())

    def _follow(self) -> None:
        try:
            while True:
                self._hear(self._channel.receive())
        except (TransportError, OSError) as error:
            self._lose(f"is gone ({error})")
        except Exception as error:  # this thread must not end without an error
            self._set(TransportError(_not_understood(error)))

    def _ask(self, period_s: float) -> None:
        """Asks the coordinator for a sign of life at intervals.

        Counts questions, not seconds: this process may have been stopped itself.
        """
        while not self._left.wait(period_s):
            if self._unanswered >= _QUESTIONS:
                self._lose(f"has not answered for {period_s * _QUESTIONS:g} s")
                return
            self._unanswered += 1
            self._send({"clock": _NO_CLOCK})

    def _lost(self, what: str) -> TransportError:
        return TransportError(
            f"the job's coordinator at {self._coordinator} {what}; its process or host has failed"
            " or was stopped. Start the job anew"
        )

    def _lose(self, what: str) -> None:
        """Records that the coordinator can't be reached any more."""
        if self._left.is_set():
            return
        loss = self._lost(what)
        self._set(loss)
        with self._lock:
            is_first, self.loss = self.loss is None, self.loss or loss
            action = self._on_loss
        if is_first:
            action()

    def _send(self, message: dict[str, Any]) -> None:
        # The thread that reads finds out that the connection has ended.
        with self._send_lock, contextlib.suppress(OSError, TransportError):
            self._channel.send(message)

    def _hear(self, message: dict[str, Any]) -> None:
        self._unanswered = 0
        if "error" in message:
            self._set(_errors.from_json(message["error"]))
        elif "clock" in message:
            self.clock.hear(*message["clock"])
        elif "need" in message:
            with self._lock:
                self._on_need(int(message["need"]))
        elif "absent" in message:
            for process in message["absent"]:
                self._on_absent(int(process))
        elif "all_leave" in message:
            self._all_leave.set()

    def _set(self, failure: JaxhetError) -> None:
        with self._lock:
            self.failure = self.failure or failure


def connect(address: str, secret: bytes, timeout_s: float) -> Membership:
    """Connects to the coordinator at `address` (host:port), trying until `timeout_s` have passed.

    Raises:
      ConnectionRefusedError: no process listens there.
      UsageError: another program than this job's coordinator listens there.
      TransportError: the listener does not answer.
    """
    host, port = split_address(address)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=max(1.0, timeout_s))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionRefusedError(str(error)) from error
            time.sleep(0.05)
    try:
        _, keys = handshake.connect(sock, secret, HEADER)
    except handshake.RefusedError as error:
        sock.close()
        raise _refusal(address, error) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit_sends(sock)
    return Membership(sock, Channel(sock, keys))


def _refusal(address: str, error: handshake.RefusedError) -> JaxhetError:
    """Error of a failed handshake with the listener at `address`, with the next step."""
    match error:
        case handshake.NoAnswerError():
            return TransportError(
                f"the coordinator on {address} accepts connections, but gives {error}; it may be"
                " stopped or overloaded, or another program listens there: look at its process, or"
                " choose another port"
            )
        case handshake.ForeignError():
            return UsageError(
                f"what listens on {address} does not answer as a coordinator of jaxhet: {error};"
                " give the coordinator's address, or another port if the port is in use"
            )
    return UsageError(
        f"what listens on {address} is not this job's coordinator: {error}; give every process"
        " of the job the same JAXHET_JOB_SECRET, or JAXHET_JOB_SECRET_FILE with the same"
        " content (not one of an earlier job), or another port if the port is in use"
    )


def _new_identity() -> "Identity":
    from jaxhet._net.certificates import Identity  # 0.1 s, that programs without a job do not need

    return Identity()


def _not_understood(error: Exception) -> str:
    return (
        f"the job's coordinator sent a message that this process does not understand ({error!r});"
        " use one version of jaxhet in the whole job"
    )
