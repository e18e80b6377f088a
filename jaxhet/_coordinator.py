"""The coordinator of a job: who is in it, do they agree, and who has gone.

It runs in a process of its own, so that it outlives any JAX process: `jaxhet launch` or process 0
starts it, or it is a service (`jaxhet coordinator`). It owns JAX's coordination service and keeps
one authenticated connection to every process of the job:

    process → coordinator  {"claim": Claim, "request": …}
                                                once, with its request for a certificate
    coordinator → process  {"error": Failure}   the claim, or the job, is refused
                           {"members": [Claim], "process": i, "service": "host:port",
                            "certificate": …}   everybody has come and agrees
                           {"event": {"kind": "gone", "process": i, "text": …}}
                                                process i went without goodbye
    process → coordinator  {"tuned": {"to": [process], …}}
                                                for these processes, as it is (`_tuning.py`)
    process → coordinator  {"failed": Failure}  the process could not start; everyone else is told
                           {"bye": true}        before it closes the connection

A Failure is [class name, text]. A job makes the certificates for JAX's service itself, unless the
user gives some (`_credentials.py`): then "request" and "certificate" are null. Both are sealed with
the job secret. All messages are encrypted (`_channel.py`).
"""

import contextlib
import dataclasses
import os
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from jaxhet import _announced, _compiler_settings, _credentials, _handshake, _jaxlib
from jaxhet._accept import Acceptor
from jaxhet._channel import Channel
from jaxhet._credentials import Credentials
from jaxhet._errors import BY_NAME, JaxhetError, PeerError, TransportError, UsageError
from jaxhet._outbox import Outbox, limit_sends
from jaxhet._place import UNASSIGNED
from jaxhet._terms import Terms

if TYPE_CHECKING:
    from jaxhet._certificates import Authority, Identity

HEADER = b"jaxhet-coordinator"
# JAX's coordination service warns that it is recoverable, which is what we want of it.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}
_LINGER_S = 5.0
_REQUEST, _CERTIFICATE = "a request for a certificate", "a certificate"  # names of sealed parts
_EFFECT_OF_FLAGS = "results of equal computations may differ in their last bits"
_EFFECT_OF_JAX_CONFIG = (
    "equal functions may become different programs, with different results or a PlanMismatchError"
)


def command(address: str, num_processes: int, timeout_s: float) -> list[str]:
    """The command of a coordinator process.

    Its environment needs JAXHET_JOB_SECRET, and `QUIET`.
    """
    return [
        *(sys.executable, "-m", "jaxhet._coordinator_process", "--address", address),
        *("--num-processes", str(num_processes), "--timeout-s", str(timeout_s)),
    ]


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a process says of itself when it comes."""

    process: int  # UNASSIGNED: the coordinator gives it out
    num_processes: int  # UNASSIGNED: the coordinator knows it
    island: str
    is_declared: bool  # the island, rather than taken from the platform
    islands: tuple[str, ...]
    platform: str
    topology: tuple[str, str]  # the plugin's names in keys, as `_jax_compat.local_topology_key` has
    has_cpu: bool  # JAX creates a CPU backend, be it beside that of the platform
    host: str
    host_id: str
    pid: int
    address: str  # host:port that peers connect to
    versions: dict[str, str]
    options: dict[str, Any]  # those that must be equal in the whole job
    settings: dict[str, str]  # `_compiler_settings.settings()`: they must be equal in an island
    island_process: int | None = None  # index in the island, of a process without an id

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Claim":
        """The claim in a message; lists become tuples again.

        Raises:
          TransportError: A field is missing, unknown or of another type.
        """
        hints = get_type_hints(cls)
        if not isinstance(fields, dict) or fields.keys() != hints.keys():
            raise TransportError(f"the fields of a claim are not {', '.join(hints)}")
        for name, hint in hints.items():
            if not _is_of(fields[name], hint):
                raise TransportError(f"{name} of a claim is {fields[name]!r}, which is no {hint}")
        tuples = {name: tuple(fields[name]) for name in ("islands", "topology")}
        return cls(**{**fields, **tuples})

    def __str__(self) -> str:
        number = f"{self.island_process} of its island" if self.process < 0 else self.process
        return f"process {number} ({self.island}, pid {self.pid} on {self.host})"


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value out of JSON has the type of a claim's field. Pure."""
    parts = get_args(hint)
    if isinstance(hint, types.UnionType):
        return any(_is_of(value, part) for part in parts)
    if get_origin(hint) is tuple:
        is_long = len(parts) == 2 and parts[1] is not Ellipsis
        return (
            isinstance(value, list | tuple)
            and all(isinstance(part, str) for part in value)
            and (not is_long or len(value) == len(parts))
        )
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(
            parts[1] is Any or isinstance(part, parts[1]) for part in value.values()
        )
    return type(value) is hint


def disagreement(ours: Claim, theirs: Claim) -> str | None:
    """Says why two processes can't be in one job, or None. Pure."""
    pairs = [
        ("num_processes", ours.num_processes, theirs.num_processes),
        ("the set of islands", sorted(ours.islands), sorted(theirs.islands)),
        *((f"the version of {k}", v, theirs.versions.get(k)) for k, v in ours.versions.items()),
        *((f"option {k}", v, theirs.options.get(k)) for k, v in ours.options.items()),
    ]
    for what, mine, other in pairs:
        if mine != other:
            return (
                f"{what} differs: {ours} has {mine!r}, {theirs} has {other!r}; start every process"
                " of the job with the same value"
            )
    if ours.is_declared != theirs.is_declared:
        declared, other = (ours, theirs) if ours.is_declared else (theirs, ours)
        return (
            f"{declared} declares its island and {other} does not: its island would be its"
            " platform's; set JAXHET_ISLAND of every process, or of none"
        )
    if ours.island == theirs.island and ours.platform != theirs.platform:
        return (
            f"island {ours.island!r} holds two platforms: {ours} is {ours.platform}, {theirs} is"
            f" {theirs.platform}; give each platform an island of its own"
        )
    return _settings_disagree(ours, theirs) or _backends_disagree(ours, theirs)


def differences_between_islands(members: Sequence[Claim]) -> list[str]:
    """Returns a line for each island whose settings differ from those of the first island. Pure.

    The first island is the one of the smallest process id. Settings are equal within an island.
    """
    of_island: dict[str, Claim] = {}
    for claim in sorted(members, key=lambda claim: claim.process):
        of_island.setdefault(claim.island, claim)
    first, *others = of_island.values()
    return [line for other in others if (line := _difference_between(first, other))]


def _difference_between(first: Claim, other: Claim) -> str:
    """Returns the line for the island of `other`, or "" if its settings are equal. Pure."""
    found = _compiler_settings.differences(first.settings, other.settings)
    if not found:
        return ""
    each = (f"in {name}: {theirs}, {ours} in {first.island}" for name, ours, theirs in found)
    only_flags = all(name.startswith(_compiler_settings.XLA_FLAGS) for name, _, _ in found)
    effect = _EFFECT_OF_FLAGS if only_flags else _EFFECT_OF_JAX_CONFIG
    return f"island {other.island} differs from {first.island} {'; '.join(each)}; {effect}"


def _settings_disagree(ours: Claim, theirs: Claim) -> str | None:
    """Says why two processes of one island would compile different programs, or None. Pure."""
    found = _compiler_settings.differences(ours.settings, theirs.settings)
    if ours.island != theirs.island or not found:
        return None
    name, mine, other = found[0]
    return (
        f"{name} differs within island {ours.island!r}: {mine} in {ours}, {other} in {theirs};"
        " start all processes of an island with the same value"
    )


def _backends_disagree(ours: Claim, theirs: Claim) -> str | None:
    """Says why the backends of two processes would wait for each other for ever, or None. Pure."""
    if (ours.platform == "cpu") != (theirs.platform == "cpu"):
        return (
            f"{ours} is on {ours.platform} and {theirs} on {theirs.platform}: a job has CPUs or"
            " GPUs; set JAX_PLATFORMS of every process to its platform"
        )
    if ours.has_cpu != theirs.has_cpu:
        has, has_not = (ours, theirs) if ours.has_cpu else (theirs, ours)
        return (
            f"{has} has a CPU backend beside its GPUs, and {has_not} has none; set JAX_PLATFORMS of"
            " every process to its GPUs' platform, or of none"
        )
    return None


class Coordinator:
    """The server. Two threads per process of the job, to read and to send; state under one lock.

    Args:
      listener: The listening socket; closed at the end of `serve`.
      secret: The job secret.
      terms: What the job is held to.
      given: The user's certificates for JAX's coordination service; None: the job makes its own.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        terms: Terms,
        given: Credentials | None = None,
    ):
        self._listener = listener
        self._secret = secret
        self._terms = terms
        self._num_processes = terms.num_processes
        self._timeout_s = terms.timeout_s
        self._lock = threading.Condition(threading.RLock())
        self._claims: dict[int, Claim] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._left: set[int] = set()
        self._closed: set[int] = set()  # processes without a connection any more
        self._events: list[dict[str, Any]] = []
        self._error: JaxhetError | None = None
        self._complete = False
        self._stop = False
        self._requests: dict[int, bytes | None] = {}
        self._authority = None if given else _new_authority()
        credentials = self._authority.service_credentials() if self._authority else given
        address, self._service = _jaxlib.start_coordination_service(
            listener.getsockname()[0], terms.num_processes, credentials
        )
        self._service_port = address.rpartition(":")[2]
        self._hosts: dict[int, str] = {}  # by which each process reaches this one

    def serve(self) -> None:
        """Accepts processes until all have left; then ends the coordination service."""
        acceptor = Acceptor(
            self._listener, self._receive_claim, self._serve_one, "jaxhet-coordinator"
        )
        self._wait_for_all()
        with self._lock:
            while not self._stop and self._has_work():
                self._lock.wait(0.5)
            if (
                self._error
            ):  # processes that start late hear of it; the others end before the service
                self._lock.wait_for(
                    lambda: len(self._closed) == self._num_processes, timeout=_LINGER_S
                )
        acceptor.close()
        self._service.shutdown()

    @property
    def failure(self) -> str:
        """Why the job was refused, or which process went first without goodbye; or ""."""
        with self._lock:
            return str(self._error or next((event["text"] for event in self._events), ""))

    def _has_work(self) -> bool:
        """Whether processes are there, or may come."""
        return bool(set(self._claims) - self._left) or not (self._claims or self._error)

    def stop(self) -> None:
        """Ends `serve` although processes are left."""
        with self._lock:
            self._stop = True
            self._lock.notify_all()

    def owner_is_gone(self) -> None:
        """Ends `serve` unless there are processes to serve."""
        with self._lock:
            if not self._claims:
                self.stop()

    def announce_exit(self, process: int, text: str) -> None:
        """Tells everybody that a process has ended (its owner saw it)."""
        self._gone(process, text)

    def _wait_for_all(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._claims or self._error or self._stop)
            self._lock.wait_for(
                lambda: self._complete or self._error or self._stop, self._timeout_s
            )
            if self._complete or self._error or self._stop:
                return
            missing = [str(i) for i in range(self._num_processes) if i not in self._claims]
        self._fail(
            UsageError(
                f"process {', '.join(missing)} of {self._num_processes} has not come within"
                f" {self._timeout_s:g} s; start it, or raise JAXHET_CONNECT_TIMEOUT_S"
            )
        )

    def _receive_claim(self, sock: socket.socket) -> tuple[Channel, Claim, bytes | None]:
        """A new connection's channel, claim, and request for a certificate."""
        _, keys = _handshake.accept(sock, self._secret, len(HEADER))
        channel = Channel(sock, keys)
        message = channel.receive(_handshake.TIMEOUT_S)
        request = message["request"]
        if request is not None:
            pem = request["pem"].encode()
            _handshake.check_seal(request["seal"], self._secret, _REQUEST, pem)
            request = pem
        return channel, Claim.from_json(message["claim"]), request

    def _serve_one(self, sock: socket.socket, come: tuple[Channel, Claim, bytes | None]) -> None:
        channel, claim, request = come
        with sock:
            outbox = Outbox(sock, channel)
            try:
                claim = self._terms.place(claim)
                refusal = self._admit(claim, request, outbox)
            except UsageError as error:
                refusal = error
                if not self._complete:  # nor does a stray process end a job that runs
                    self._fail(error)
            if refusal:
                outbox.send({"error": _to_json(refusal)})
                outbox.finish()
                return
            try:
                self._follow(claim, sock, channel)
            finally:
                outbox.close()

    def _admit(self, claim: Claim, request: bytes | None, outbox: Outbox) -> JaxhetError | None:
        with self._lock:
            if self._error:
                return self._error
            if not 0 <= claim.process < self._num_processes:
                return UsageError(
                    f"{claim} is not one of the job's {self._num_processes} processes;"
                    f" process_id is 0 to {self._num_processes - 1}"
                )
            taken = self._claims.get(claim.process)
            if taken:
                return UsageError(
                    f"process id {claim.process} is taken: {taken} came first, and now {claim};"
                    " give every process an id of its own"
                )
            problem = (
                self._certificates_disagree(claim, request)
                or next(filter(None, (disagreement(c, claim) for c in self._claims.values())), None)
                or self._terms.disagreement(claim)
            )
            self._claims[claim.process] = claim
            self._hosts[claim.process] = self._terms.advertise or outbox.local_host
            self._requests[claim.process] = request
            self._outboxes[claim.process] = outbox
            complete = len(self._claims) == self._num_processes
            for event in self._events:
                outbox.send({"event": event})
            self._lock.notify_all()
        if problem:
            self._fail(UsageError(problem))
        elif complete:
            self._go()
        return None

    def _certificates_disagree(self, claim: Claim, request: bytes | None) -> str | None:
        """Says why the service and a client of it would refuse each other's certificates."""
        if (self._authority is None) == (request is None):
            return None
        has, has_not = ("the coordinator", claim) if request else (claim, "the coordinator")
        return (
            f"{has} has the user's certificates (JAX_MTLS_CERT_FILE) and {has_not} has none: set"
            " the JAX_MTLS_* files in the environment of every process, and of `jaxhet launch`, or"
            " nowhere"
        )

    def _certificate(self, process: int) -> dict[str, str] | None:
        """The answer to a process's request."""
        request = self._requests[process]
        if self._authority is None or request is None:
            return None
        pems = self._authority.sign(request, process), self._authority.certificate
        return {
            "pem": pems[0].decode(),
            "authority": pems[1].decode(),
            "seal": _handshake.seal(self._secret, _CERTIFICATE, request, *pems),
        }

    def _go(self) -> None:
        with self._lock:
            islands = [claim.island for claim in self._claims.values()]
            announced = self._claims[0].islands
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
            members = [dataclasses.asdict(self._claims[i]) for i in range(self._num_processes)]
            for process, outbox in self._outboxes.items():
                outbox.send(
                    {
                        "members": members,
                        "process": process,
                        "service": join_address(self._hosts[process], self._service_port),
                        "certificate": certificates[process],
                    }
                )
            self._lock.notify_all()

    def _follow(self, claim: Claim, sock: socket.socket, channel: Channel) -> None:
        try:
            while True:
                message = channel.receive()
                if "failed" in message:
                    self._fail(_from_json(message["failed"]))
                if "tuned" in message:
                    self._pass_on(message)
                if "bye" in message:
                    break
        except (TransportError, OSError) as error:
            self._gone(claim.process, f"it ended without goodbye ({error})")
        except Exception as error:  # whatever it was, everybody hears of it
            self._gone(claim.process, f"the coordinator does not understand it ({error!r})")
        with self._lock:
            self._left.add(claim.process)
            self._outboxes.pop(claim.process, None)
            self._lock.notify_all()
        with contextlib.suppress(OSError):
            sock.recv(1)  # returns when the connection ends
        with self._lock:
            self._closed.add(claim.process)
            self._lock.notify_all()

    def _pass_on(self, message: dict[str, Any]) -> None:
        with self._lock:
            for process in message["tuned"]["to"]:
                if process in self._outboxes:
                    self._outboxes[process].send(message)

    def _fail(self, error: JaxhetError) -> None:
        """Refuses the job while it is being set up.

        The first reason is the one that everybody hears.
        """
        with self._lock:
            self._error = self._error or error
            for outbox in self._outboxes.values():
                outbox.send({"error": _to_json(self._error)})
            self._lock.notify_all()

    def _gone(self, process: int, text: str) -> None:
        with self._lock:
            claim = self._claims.get(process)
            if process in self._left:
                return
            self._left.add(process)
            name = f"process {process}" if claim is None else str(claim)
            event = {"kind": "gone", "process": process, "text": f"{name} is gone: {text}"}
            self._events.append(event)
            for i, outbox in self._outboxes.items():
                if i != process:
                    outbox.send({"event": event})
            self._lock.notify_all()


class Membership:
    """A process's connection to the coordinator, and what it learnt there."""

    def __init__(self, sock: socket.socket, channel: Channel, secret: bytes):
        self._sock = sock
        self._channel = channel
        self._secret = secret
        self._send_lock = threading.Lock()  # a frame may be longer than a socket takes at once
        self._lock = threading.Lock()
        self._failure: JaxhetError | None = None
        self._closing = False
        self._unheard: list[dict[str, Any]] = []
        self._on_tuned: Callable[[dict[str, Any]], None] | None = None
        self.members: list[Claim] = []
        self.process = UNASSIGNED
        self.service_address = ""
        self.credentials: Credentials | None = None

    def join(self, claim: Claim, timeout_s: float, given: Credentials | None = None) -> None:
        """Presents `claim` and waits until everybody has come.

        Afterwards `credentials` are those for JAX's coordination service: `given`, by the user, or
        the job's.

        Raises:
          UsageError: the job is not complete or does not agree; the text is the coordinator's. Or
            JAX's service does not accept `given`.
        """
        self.credentials = given
        identity = None if given else _new_identity()
        sealed = None
        if identity is not None:
            seal = _handshake.seal(self._secret, _REQUEST, identity.request)
            sealed = {"pem": identity.request.decode(), "seal": seal}
        message = {"claim": dataclasses.asdict(claim), "request": sealed}
        self._channel.send(message)
        self._sock.settimeout(timeout_s)
        while not self.members:
            try:
                self._begin(self._channel.receive(), identity)
            except (LookupError, TypeError, AttributeError, RecursionError, ValueError) as error:
                raise TransportError(_not_understood(error)) from error
        if given is not None:
            _credentials.check_service(self.service_address, given)
        self._sock.settimeout(None)
        threading.Thread(target=self._follow, name="jaxhet-coordinator", daemon=True).start()

    def _begin(self, message: dict[str, Any], identity: "Identity | None") -> None:
        """Takes the coordinator's answer to the claim."""
        self._hear(message)
        self.check()
        members = [Claim.from_json(fields) for fields in message["members"]]
        if sorted(claim.process for claim in members) != list(range(len(members))):
            raise TransportError("the coordinator names other processes than the job's")
        self.process = int(message["process"])
        self.service_address = message["service"]
        split_address(self.service_address, "the coordinator's service")
        if identity is not None:
            self.credentials = self._certified(identity, message["certificate"])
        self.members = members

    def _certified(self, identity: "Identity", answer: dict[str, str]) -> Credentials:
        pems = answer["pem"].encode(), answer["authority"].encode()
        _handshake.check_seal(answer["seal"], self._secret, _CERTIFICATE, identity.request, *pems)
        return identity.process_credentials(*pems)

    @property
    def local_address(self) -> str:
        """This machine's address on the way to the coordinator."""
        return self._sock.getsockname()[0]

    @property
    def failure(self) -> JaxhetError | None:
        """The first thing that the coordinator said went wrong."""
        with self._lock:
            return self._failure

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if failure := self.failure:
            raise failure

    def report(self, error: JaxhetError) -> None:
        """Tells the others that this process could not start."""
        self._send({"failed": _to_json(error)})

    def tell_tuned(self, message: dict[str, Any]) -> None:
        """Sends a message about tuned kernels to the processes that it names."""
        self._send({"tuned": message})

    def listen_tuned(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Has a function hear the messages about tuned kernels, earlier ones too."""
        with self._lock:
            self._on_tuned = listener
            for message in self._unheard:
                listener(message)
            self._unheard.clear()

    def leave(self, *, close: bool = True) -> None:
        """Says goodbye and closes the connection, or leaves it open until the process ends."""
        self._closing = True
        self._send({"bye": True})
        if not close:
            self._sock.detach()
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def close_in_child(self) -> None:
        """Closes a forked child's copy of the connection; says nothing."""
        self._closing = True
        os.close(self._sock.detach())

    def _follow(self) -> None:
        try:
            while True:
                self._hear(self._channel.receive())
        except (TransportError, OSError) as error:
            if not self._closing:
                self._set(
                    TransportError(f"the job's coordinator is gone ({error}); start the job anew")
                )
        except Exception as error:  # this thread must not end without a word
            self._set(TransportError(_not_understood(error)))

    def _send(self, message: dict[str, Any]) -> None:
        # The thread that reads finds out that the connection has ended.
        with self._send_lock, contextlib.suppress(OSError, TransportError):
            self._channel.send(message)

    def _hear(self, message: dict[str, Any]) -> None:
        if "event" in message:
            self._set(PeerError(message["event"]["text"]))
        elif "error" in message:
            self._set(_from_json(message["error"]))
        elif "tuned" in message:
            with self._lock:
                if self._on_tuned is None:
                    self._unheard.append(message["tuned"])
                else:
                    self._on_tuned(message["tuned"])

    def _set(self, failure: JaxhetError) -> None:
        with self._lock:
            self._failure = self._failure or failure


def connect(address: str, secret: bytes, timeout_s: float) -> Membership:
    """Connects to the coordinator at `address` (host:port), trying until `timeout_s` have passed.

    Raises:
      ConnectionRefusedError: nobody listens there.
      UsageError: what listens there is not this job's coordinator.
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
        keys = _handshake.connect(sock, secret, HEADER)
    except JaxhetError as error:
        sock.close()
        raise UsageError(
            f"what listens on {address} is not this job's coordinator: {error}; give every process"
            " of the job the same JAXHET_JOB_SECRET, or another port if the port is in use"
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit_sends(sock)
    return Membership(sock, Channel(sock, keys), secret)


def _new_identity() -> "Identity":
    from jaxhet._certificates import Identity  # 0.1 s, that programs without a job do not need

    return Identity()


def _new_authority() -> "Authority":
    from jaxhet._certificates import Authority

    return Authority()


def split_address(address: str, what: str = "coordinator_address") -> tuple[str, int]:
    """Host and port of "host:port"; `what` names it in the error.

    Raises:
      UsageError: the text has another form.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{what} {address!r} is not host:port")
    return host.strip("[]") or "127.0.0.1", int(port)


def join_address(host: str, port: str | int) -> str:
    """host:port of a host name or address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: str) -> socket.socket:
    """Binds the coordinator's port.

    Raises:
      UsageError: the port is in use or the address is not one of this machine.
    """
    host, port = split_address(address)
    try:
        every = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(
            (host, port), family=_family(host), backlog=1024, dualstack_ipv6=every
        )
    except OSError as error:
        raise UsageError(
            f"the coordinator can't listen on {address}: {error.strerror or error}; choose another"
            " port or address (JAXHET_COORDINATOR_ADDRESS, or where another one is listened on,"
            " JAXHET_COORDINATOR_BIND_ADDRESS)"
        ) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _not_understood(error: Exception) -> str:
    return (
        f"the job's coordinator sent a message that this process does not understand ({error!r});"
        " use one version of jaxhet in the whole job"
    )


def _to_json(error: JaxhetError) -> list[str]:
    return [type(error).__name__, str(error)]


def _from_json(failure: list[str]) -> JaxhetError:
    name, text = failure
    return BY_NAME.get(name, JaxhetError)(text)
