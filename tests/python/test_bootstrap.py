"""Sockets between processes: over several interfaces, and when a process ends."""

import concurrent.futures
import contextlib
import dataclasses
import ipaddress
import pathlib
import socket
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from jaxhet import PeerError, _config, _ffi, _set_up
from jaxhet._errors import TransportError
from jaxhet._job import bootstrap
from jaxhet._job import listener as _listener_module
from jaxhet._job.listener import Link, Listener
from jaxhet._job.membership import Membership
from jaxhet._net import handshake
from jaxhet._net.addresses import split_address
from jaxhet._net.interfaces import Interface
from jaxhet.testing import free_port
from tests.support.members import described
from tests.support.waiting import wait_until

SECRET = b"secret"
JOB, OTHER_JOB = bytes.fromhex("0a" * 8), bytes.fromhex("0b" * 8)


def _listener(process: int, job: bytes = JOB) -> Listener:
    return Listener("127.0.0.1", 0, process, SECRET, job)


def _connect(
    listener: Listener,
    address: str,
    num_data: int = 1,
    timeout_s: float = 5.0,
    check: Callable[[], None] = lambda: None,
) -> bootstrap.PeerSockets:
    """Sockets to process 0, which listens at the address."""
    peers = [described(address=address)]
    return bootstrap.connect_peers(listener, peers, num_data, timeout_s, check)[0]


@pytest.mark.parametrize(("platform", "num_sockets"), [("cpu", 3), ("cuda", 1)])
def test_processes_with_gpus_connect_control_alone(platform: str, num_sockets: int) -> None:
    listeners = [_listener(process) for process in range(2)]
    members = [
        described(process, address=listener.address, platform=platform)
        for process, listener in enumerate(listeners)
    ]
    membership: Any = types.SimpleNamespace(members=members, check=lambda: None)

    def start(process: int) -> _ffi.Engine:
        options = {"process_id": process, "num_processes": 2, "transports": ("socket",)}
        config = _config.resolve(options, {}).placed(process, 2)
        return _set_up._start_engine(config, listeners[process], membership, [1 - process])

    sockets_before = _num_sockets()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        engines = list(pool.map(start, range(2)))
        assert _num_sockets() - sockets_before == 2 * num_sockets
        paths = [engine.transport_of(1 - process)[0] for process, engine in enumerate(engines)]
        assert paths == ["socket" if platform == "cpu" else ""] * 2
        list(pool.map(lambda engine: engine.close(5_000), engines))
    for listener in listeners:
        listener.close()


def _num_sockets() -> int:
    fds = pathlib.Path("/proc/self/fd")
    return sum(1 for fd in fds.iterdir() if fd.is_socket())


def _leave(server: socket.socket) -> None:
    server.accept()[0].close()


def _connect_to_one_that_leaves(dies: bool) -> None:
    """Connects process 1 to process 0, which ends before it sends anything."""
    known_at = time.monotonic() + 0.3

    def check() -> None:
        if dies and time.monotonic() >= known_at:
            raise PeerError("process 0 has died")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_leave, args=(server,), daemon=True).start()
        with contextlib.closing(_listener(1)) as listener:
            _connect(listener, f"127.0.0.1:{server.getsockname()[1]}", check=check)


def test_death_in_the_handshake_is_the_reason() -> None:
    with pytest.raises(PeerError, match="process 0 has died"):
        _connect_to_one_that_leaves(dies=True)


def test_who_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_DEATH_KNOWN_WITHIN_S", 0.1)
    with pytest.raises(TransportError, match=r"no connection to process 0 .*: no answer before"):
        _connect_to_one_that_leaves(dies=False)


@pytest.mark.parametrize(
    ("process", "job", "words"),
    [
        (
            0,
            OTHER_JOB,
            r"process 0, which answers at \S+ in place of process 0 \(.*\), is of another job with"
            rf" the same job secret \(id {OTHER_JOB.hex()}, here {JOB.hex()}\); give each job a"
            " secret of its own, or check JAXHET_SOCKET_PORT and JAXHET_SOCKET_ADVERTISE",
        ),
        (2, JOB, r"process 2, which answers at \S+ in place of process 0 \(.*\), is of this job;"),
    ],
    ids=["another job", "another process"],
)
def test_who_answers_in_a_peers_place_is_named(
    process: int, job: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "_DEATH_KNOWN_WITHIN_S", 0.1)
    with (
        contextlib.closing(_listener(1)) as ours,
        contextlib.closing(_listener(process, job)) as theirs,
        pytest.raises(TransportError, match=words),
    ):
        _connect(ours, theirs.address)


def test_connection_before_the_job_is_known_waits_for_it() -> None:
    with (
        contextlib.closing(_listener(0, b"")) as ours,
        contextlib.closing(_listener(1)) as theirs,
    ):
        late = threading.Timer(0.2, ours.assign, (0, JOB, 2))
        late.start()
        sockets = _connect(theirs, ours.address)
        late.join()
        taken = ours.take({(1, 0), (1, 1)}, time.monotonic() + 5, lambda: None)
        assert sockets.control.keys.send == taken[1, 0].keys.receive
        for link in (sockets.control, *sockets.data, *taken.values()):
            link.socket.close()


@pytest.mark.parametrize("is_late", [True, False])
def test_process_that_was_late_for_a_handshake_tries_again(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.2 if is_late else 10.0)
    monkeypatch.setattr(bootstrap, "_DEATH_KNOWN_WITHIN_S", 0.05)
    introduce, attempts = Listener.introduce, []

    def refused_once(self: Listener, *args: Any) -> Any:
        attempts.append(args)
        if len(attempts) > 1:
            return introduce(self, *args)
        time.sleep(0.15)
        raise handshake.RefusedError("the peer closed the connection")

    monkeypatch.setattr(Listener, "introduce", refused_once)
    with contextlib.closing(_listener(0)) as ours, contextlib.closing(_listener(1)) as theirs:
        if not is_late:
            with pytest.raises(TransportError, match=r"no connection to process 0 .*: the peer"):
                _connect(theirs, ours.address, 0)
            return
        sockets = _connect(theirs, ours.address, 0)
        taken = ours.take({(1, 0)}, time.monotonic() + 5, lambda: None)
        for link in (sockets.control, taken[1, 0]):
            link.socket.close()


def test_peer_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_DEATH_KNOWN_WITHIN_S", 0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        contextlib.closing(_listener(1)) as listener,
        pytest.raises(TransportError, match=r"no connection to process 0 .*: no answer in"),
    ):
        _connect(listener, f"127.0.0.1:{server.getsockname()[1]}", 0, 0.3)


def test_connections_that_nobody_takes_end_with_the_listener() -> None:
    with contextlib.closing(_listener(0)) as ours, contextlib.closing(_listener(1)) as theirs:
        sockets = _connect(theirs, ours.address)
        wait_until(lambda: ours._links.keys() == {(1, 0), (1, 1)}, 5)
        ours.close()
        for link in (sockets.control, *sockets.data):
            link.socket.settimeout(5)
            assert link.socket.recv(1) == b""
            link.socket.close()


@pytest.mark.parametrize(
    ("round_trip_ms", "fewest", "pairs", "processes", "sockets"),
    [
        (0, 2, 1, 2, 2),
        (15, 2, 1, 2, 3),
        (40, 2, 1, 2, 8),
        (40, 2, 3, 2, 9),
        (999, 2, 1, 2, 16),
        (999, 2, 1, 4, 8),
        (999, 2, 1, 64, 2),
        (80, 0, 1, 2, 0),
    ],
)
def test_long_round_trip_needs_more_sockets(
    round_trip_ms: int, fewest: int, pairs: int, processes: int, sockets: int
) -> None:
    with socket.socket() as sock:
        control = Link(sock, handshake.Keys(b"", b""), round_trip_ms * 1000)
        assert bootstrap._num_data(control, fewest, pairs, processes) == sockets


@pytest.mark.parametrize(("told", "round_trip_us"), [(7, 7), (2**32 - 1, 0), (None, 0)])
def test_round_trip_that_the_kernel_does_not_know_is_0(
    told: int | None, round_trip_us: int
) -> None:
    info = b"" if told is None else _listener_module._TCP_INFO.pack(told)
    sock: Any = types.SimpleNamespace(getsockopt=lambda *_: info)
    assert _listener_module._round_trip_us(sock) == round_trip_us


class _Ends:
    """Two processes of a job in this one, and their sockets to each other.

    Args:
      addresses: Addresses on the loopback, one for each interface of a process.
    """

    def __init__(self, *addresses: list[str]):
        self.listeners = [
            Listener(own[0], 0, process, SECRET, JOB, _loopback(own))
            for process, own in enumerate(addresses)
        ]
        self.infos = [
            described(
                listener.process,
                address=listener.address,
                interfaces=tuple(interface.announced() for interface in listener.interfaces),
            )
            for listener in self.listeners
        ]

    def connect(self, num_data: int) -> list[bootstrap.PeerSockets]:
        """The sockets of process 0 to 1, and of 1 to 0."""

        def one(process: int) -> bootstrap.PeerSockets:
            sockets = bootstrap.connect_peers(
                self.listeners[process], self.infos, num_data, 10.0, lambda: None
            )
            return sockets[1 - process]

        with concurrent.futures.ThreadPoolExecutor() as pool:
            return list(pool.map(one, (0, 1)))

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()


def _loopback(addresses: list[str]) -> list[Interface]:
    return [Interface("lo", ipaddress.ip_interface(f"{own}/24")) for own in addresses]


def _addresses(links: Sequence[Link]) -> list[tuple[str, str]]:
    """Own and peer's address of each socket. Closes the sockets."""
    found = []
    for link in links:
        with link.socket as sock:
            found.append((sock.getsockname()[0], sock.getpeername()[0]))
    return found


def test_data_sockets_take_pairs_of_interfaces_in_turns() -> None:
    ends = _Ends(["127.0.1.1", "127.0.2.1", "127.0.3.1"], ["127.0.2.2", "127.0.1.2"])
    with contextlib.closing(ends):
        first, second = ends.connect(3)
    ways = [("127.0.1.1", "127.0.1.2"), ("127.0.2.1", "127.0.2.2")] * 2  # 3, rounded up
    assert _addresses(first.data) == ways
    assert _addresses(second.data) == [(other, own) for own, other in ways]
    assert _addresses([first.control])[0][0] == "127.0.1.1"
    assert _addresses([second.control])[0][1] == "127.0.1.1"


def test_messages_of_device_channels_reach_the_main_address() -> None:
    ends = _Ends(["127.0.1.1", "127.0.2.1"], ["127.0.1.2", "127.0.2.2"])

    def connect(process: int) -> list[Link]:
        pairs = {(process, 1 - process): (ends.infos[1 - process], 5)}
        [sockets] = bootstrap.connect_device_channels(
            ends.listeners[process], pairs, 2, 10.0, lambda: None
        )
        assert sockets.num_lanes == 2
        return list(sockets.links)

    with contextlib.closing(ends), concurrent.futures.ThreadPoolExecutor() as pool:
        first, second = map(_addresses, pool.map(connect, (0, 1)))
    assert [own for own, _ in first] == [
        "127.0.1.1",
        "127.0.1.1",
        "127.0.2.1",
    ] * 2
    assert second == [(other, own) for own, other in first]


def test_interface_that_connects_to_nobody_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    ends = _Ends(["127.0.1.1", "127.0.2.1"], ["127.0.1.2", "127.0.2.2"])
    dead = dataclasses.replace(ends.listeners[0].interfaces[1], port=free_port())
    announced = (ends.listeners[0].interfaces[0].announced(), dead.announced())
    ends.infos[0] = dataclasses.replace(ends.infos[0], interfaces=announced)
    with contextlib.closing(ends):
        first, second = ends.connect(4)
    assert {own for own, _ in _addresses(first.data)} == {"127.0.1.1"}
    assert len(_addresses(second.data)) == 4
    _addresses([first.control, second.control])
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "jaxhet: [process 1] socket leaves lo (127.0.2.2/24): no connection to"
        f" 127.0.2.1:{dead.port}, lo of process 0 ("
    )
    assert "Connection refused" in line
    assert f"Its data connections go over {ends.infos[0].address}." in line
    assert line.endswith("name others with JAXHET_SOCKET_INTERFACES")


def _take(listener: Listener) -> Link:
    return listener.take({(1, 1)}, time.monotonic() + 5, lambda: None)[1, 1]


@pytest.mark.parametrize("is_taken", [True, False])
def test_second_connection_replaces_no_other(is_taken: bool) -> None:
    taken = None
    with contextlib.closing(_listener(0)) as ours, contextlib.closing(_listener(1)) as theirs:
        info = described(address=ours.address)
        address = split_address(ours.address)
        with socket.create_connection(address) as first, socket.create_connection(address) as again:
            link = theirs.introduce(first, info, 1, ours.address)
            wait_until(lambda: (1, 1) in ours._links, 5)
            if is_taken:
                taken = _take(ours)
            theirs.introduce(again, info, 1, ours.address)
            again.settimeout(5)
            assert again.recv(1) == b""
            taken = taken or _take(ours)
            assert taken.keys.send == link.keys.receive
            taken.socket.close()
        with pytest.raises(
            TransportError, match="second connection for channel 1 of process 1 was"
        ):
            ours.take({(1, 2)}, time.monotonic() + 0.1, lambda: None)


@pytest.mark.parametrize(
    ("process", "words"),
    [
        (0, r"in the name of process 0 was refused: only processes with ids above 0 up to 2"),
        (3, r"in the name of process 3 was refused: only processes with ids above 0 up to 2"),
    ],
    ids=["its own", "unknown"],
)
def test_connection_that_nobody_opens_is_refused(process: int, words: str) -> None:
    with contextlib.closing(_listener(0)) as ours, contextlib.closing(_listener(process)) as theirs:
        ours.assign(0, JOB, num_processes=3)
        with socket.create_connection(split_address(ours.address)) as sock:
            theirs.introduce(sock, described(address=ours.address), 0, ours.address)
            sock.settimeout(5)
            assert sock.recv(1) == b""
        with pytest.raises(TransportError, match=words):
            ours.take({(1, 0)}, time.monotonic() + 0.1, lambda: None)


def test_interface_whose_port_is_taken_is_named() -> None:
    with socket.create_server(("127.0.2.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = (
            rf"process 0 can't listen on 127\.0\.2\.1:{port}: Address already in use .*; set"
            " JAXHET_SOCKET_ADDRESS and JAXHET_SOCKET_PORT"
        )
        with pytest.raises(TransportError, match=words):
            Listener("127.0.1.1", port, 0, SECRET, JOB, _loopback(["127.0.2.1"]))


def test_forked_child_does_not_wait_for_a_lock_of_another_thread() -> None:
    ours, theirs = socket.socketpair()
    unused: Any = None
    membership = Membership(ours, unused)
    child = threading.Thread(target=membership.close_in_child, daemon=True)
    with theirs, membership._left._cond:  # pyright: ignore[reportAttributeAccessIssue]
        child.start()
        child.join(5)
        assert not child.is_alive()
