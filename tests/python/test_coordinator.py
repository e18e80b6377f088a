"""The coordinator tells all processes when one fails, whatever that process sends."""

import dataclasses
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxhet import _config, _set_up
from jaxhet._errors import DeadlineError, JaxhetError, TransportError, UsageError
from jaxhet._job import coordinator as _coordinator
from jaxhet._job import coordinator_process, membership
from jaxhet._job.coordinator import Terms
from jaxhet._job.process_info import ProcessInfo, disagreement
from jaxhet._net import handshake
from jaxhet._net.addresses import listen
from jaxhet.cli import coordinator
from jaxhet.testing import free_port
from tests.support.members import described
from tests.support.waiting import wait_until

SECRET = b"a job secret"


class Pair:
    """Two members of a job, and the thread of its coordinator."""

    def __init__(self) -> None:
        address = self.address = f"127.0.0.1:{free_port()}"
        self.server = _coordinator.Coordinator(listen(address), SECRET, Terms(2, 20))
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()
        self.members = [membership.connect(address, SECRET, 5) for _ in range(2)]
        self.stray = membership.connect(address, SECRET, 5)  # says nothing yet
        joins = [
            threading.Thread(target=member.join, args=(_info(i), 20))
            for i, member in enumerate(self.members)
        ]
        for thread in joins:
            thread.start()
        for thread in joins:
            thread.join()

    def failure_of_first(self) -> JaxhetError:
        """Failure that reaches process 0 within 5 s."""
        wait_until(lambda: self.members[0].failure is not None, 5)
        assert self.members[0].failure is not None
        return self.members[0].failure


def _info(process: int) -> ProcessInfo:
    return described(process, f"island{process}", f"127.0.0.1:{9000 + process}")


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for member in (*pair.members, pair.stray):
        member.leave()
    pair.thread.join(10)
    assert not pair.thread.is_alive()  # the coordinator ends when everybody has left


def test_process_that_reads_nothing_holds_up_nobody(pair: Pair) -> None:
    stopped = pair.members[1]
    stopped._left.set()
    end = threading.Event()

    def stop(_: Any) -> None:  # the reader, at the first message
        end.wait(60)

    stopped._on_need = stop
    for _ in range(200):
        pair.server._outboxes[1].send({"need": 0, "padding": "x" * 100_000})
    pair.members[0].report(DeadlineError("too late"))
    assert type(pair.failure_of_first()) is DeadlineError
    end.set()


def test_all_that_a_leaving_process_has_sent_arrives(pair: Pair) -> None:
    """The coordinator reads slowly, and still sends something to the process."""
    first, second = pair.members
    heard: list[int] = []
    second.listen_needs(heard.append, lambda _: None)
    first._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    leaving = threading.Thread(target=first.leave)
    with pair.server._lock:  # which the coordinator needs to tell the other process
        for num_bytes in (0, 250_000):
            first._send({"need": [1], "padding": "x" * num_bytes})
        leaving.start()
        time.sleep(0.2)
        pair.server._outboxes[0].send({"all_leave": True})
        time.sleep(0.2)
    leaving.join(10)
    wait_until(lambda: bool(heard == [0, 0] or second.failure), 5)
    assert heard == [0, 0]
    wait_until(lambda: 0 in pair.server._closed, 5)
    assert second.failure is None


@pytest.mark.parametrize("is_asked_before", [True, False])
def test_needed_peer_that_leaves_is_absent(pair: Pair, is_asked_before: bool) -> None:
    first, second = pair.members
    absent: list[int] = []
    first.listen_needs(lambda _: None, absent.append)
    if is_asked_before:
        heard: list[int] = []
        second.listen_needs(heard.append, lambda _: None)
        first.ask_for([1])
        wait_until(lambda: heard == [0], 5)
    leaving = threading.Thread(target=second.wait_for_all_to_leave, args=(20,))
    leaving.start()
    if not is_asked_before:
        wait_until(lambda: 1 in pair.server._leaving, 5)
        first.ask_for([1])
    wait_until(lambda: absent == [1], 5)
    assert leaving.is_alive()
    first.wait_for_all_to_leave(20)
    leaving.join(5)
    assert not leaving.is_alive()


def test_process_that_leaves_does_not_wait_for_one_that_died(pair: Pair) -> None:
    first, second = pair.members
    second._left.set()
    second._sock.shutdown(socket.SHUT_RDWR)
    begin = time.monotonic()
    first.wait_for_all_to_leave(20)
    assert time.monotonic() - begin < 5


def test_clock_of_the_coordinator_is_read_within_its_error(pair: Pair) -> None:
    for member in pair.members:
        reading = member.clock.read()
        assert reading is not None
        assert 0 < reading.error_us < 1e6
        assert abs(reading.offset_us) <= reading.error_us  # one host has one clock


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"options": {**_info(1).options, "encryption": "full"}},
            r"option encryption differs: process 0 \(island0, .* has 'off', process 1 \(island1,"
            r" pid .* has 'full'; start every process of the job with the same value",
        ),
        ({"islands": ("a", "b")}, r"the set of islands differs: .* has \[\], .* has \['a', 'b'\]"),
        (
            {"island": "cpu", "is_declared": False},
            r"process 0 \(island0, .* declares its island and process 1 \(cpu, pid .* does not: "
            ".*set JAXHET_ISLAND of every process, or of none",
        ),
    ],
)
def test_processes_that_differ_are_refused(changes: dict[str, Any], words: str) -> None:
    text = disagreement(_info(0), dataclasses.replace(_info(1), **changes))
    assert re.match(words, text or "")


# Process ids.


def _join(terms: Terms, *options: dict[str, Any], address: str = "") -> list[Any]:
    """Id or error that each process of a job receives; `options` are those of each."""
    bind = address or f"127.0.0.1:{free_port()}"
    address = f"127.0.0.1:{bind.rpartition(':')[2]}"
    server = _coordinator.Coordinator(listen(bind), SECRET, terms)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    answers: list[Any] = [None] * len(options)

    def join(i: int) -> None:
        member = membership.connect(address, SECRET, 5)
        config = _config.resolve(options[i], {})
        try:
            member.join(_set_up.make_process_info(config, "127.0.0.1:9000"), 10)
            answers[i] = member.process, member.service_address.rpartition(":")[0]
        except JaxhetError as error:
            answers[i] = str(error)
        member.leave()

    threads = [threading.Thread(target=join, args=(i,)) for i in range(len(options))]
    for one in threads:
        one.start()
    for one in (*threads, thread):
        one.join(20)
    assert not thread.is_alive()
    return answers


def _at(island: str, index: int, **more: Any) -> dict[str, Any]:
    return {"island": island, "island_process_id": index, **more}


def test_process_ids_are_given_out_by_island_and_index() -> None:
    terms = Terms(3, 10, {"nvidia": 1, "amd": 2})
    answers = _join(terms, _at("amd", 1), _at("nvidia", 0), _at("amd", 0))
    assert answers == [(2, "127.0.0.1"), (0, "127.0.0.1"), (1, "127.0.0.1")]


def test_given_ids_and_those_given_out_may_be_mixed() -> None:
    terms = Terms(2, 10, {"nvidia": 1, "amd": 1})
    given = {"island": "nvidia", "process_id": 0, "num_processes": 2}
    assert [answer[0] for answer in _join(terms, _at("amd", 0), given)] == [1, 0]


def test_advertised_host_is_where_processes_look_for_jax() -> None:
    terms = Terms(1, 10, {"amd": 1}, "localhost")
    assert _join(terms, _at("amd", 0)) == [(0, "localhost")]


@pytest.mark.parametrize(
    ("sizes", "processes", "words"),
    [
        ({}, [_at("amd", 0)], "has no process_id, and the coordinator does not know how many"),
        ({"amd": 2}, [_at("amd", 2)], "process 2 of island 'amd' is one too many: amd=2 were"),
        ({"amd": 2}, [_at("nvidia", 0)], "island 'nvidia' is not one of those that were announced"),
        (
            {"amd": 2},
            [_at("amd", 0, num_processes=3)],
            r"num_processes differs: process 0 \(amd, pid \d+ on .*\) has 3, the coordinator 2",
        ),
        (
            {"amd": 2},
            [_at("amd", 0, islands=("amd=1", "nvidia=1"))],
            "announces amd=1,nvidia=1, the coordinator amd=2; give both the same sizes",
        ),
        (
            {"nvidia": 1, "amd": 1},
            [{"island": "amd", "process_id": i, "num_processes": 2} for i in range(2)],
            "not those that were announced, nvidia=1,amd=1: 'nvidia' has 0, not 1; 'amd' has 2",
        ),
        ({"amd": 2}, [_at("amd", 1), _at("amd", 1)], "process id 1 is taken: .* was first"),
    ],
)
def test_process_that_does_not_fit_is_told_why(
    sizes: dict[str, int],
    processes: list[dict[str, Any]],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_coordinator, "_LINGER_S", 0.1)
    answers = _join(Terms(2, 1, sizes), *processes)
    assert any(re.search(words, str(answer)) for answer in answers), answers


def test_stray_process_does_not_end_a_job_that_runs(pair: Pair) -> None:
    config = _config.resolve({"island": "amd", "island_process_id": 0}, {})
    with pytest.raises(UsageError, match="the coordinator does not know how many processes"):
        pair.stray.join(_set_up.make_process_info(config, "127.0.0.1:9000"), 5)
    time.sleep(0.2)
    assert [m.failure for m in pair.members] == [None, None]


@pytest.mark.parametrize(
    ("sent", "error", "words"),
    [
        (None, TransportError, "accepts connections, but gives no answer within 0.2 s"),
        (b"", UsageError, "does not answer as a coordinator of jaxhet: no answer before the end"),
        (b"HTTP/1.0 400 Bad request", UsageError, r"the answer begins with b'HTTP/1.0 400'; give"),
    ],
    ids=["silent", "closes", "http"],
)
def test_other_program_on_the_port_is_told_from_a_wrong_secret(
    sent: bytes | None, error: type[JaxhetError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake.connect, "__defaults__", (0, 0.2 if sent is None else 10.0))

    def answer(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock:
            if sent is not None:
                sock.recv(handshake.NONCE_BYTES)
                sock.sendall(sent)
            else:
                is_over.wait(10)

    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        with pytest.raises(error, match=words) as raised:
            membership.connect(f"127.0.0.1:{server.getsockname()[1]}", SECRET, 1)
        is_over.set()
    assert "JAXHET_JOB_SECRET" not in str(raised.value)


# The coordinator as a service.


def test_service_without_a_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXHET_JOB_SECRET", raising=False)
    with pytest.raises(UsageError, match="no job secret: give all processes of the job the same"):
        coordinator.coordinator("127.0.0.1:1", "a=1")


@pytest.mark.parametrize("islands", [(), ("a", "b")])
def test_service_without_a_size_is_refused(islands: tuple[str, ...]) -> None:
    words = f"--islands {','.join(islands)} has no numbers of processes: write NAME=PROCESSES"
    with pytest.raises(UsageError, match=words):
        coordinator.terms(islands, None, 1)


@pytest.mark.parametrize(("bind", "host"), [("0.0.0.0", "127.0.0.1"), ("[::]", "127.0.0.1")])
def test_service_on_all_addresses_names_the_one_that_a_process_used(bind: str, host: str) -> None:
    if bind == "[::]" and not socket.has_dualstack_ipv6():
        pytest.skip("no socket here listens on IPv4 and IPv6")
    address = f"{bind}:{free_port()}"
    answers = _join(Terms(1, 10, {"amd": 1}), _at("amd", 0), address=address)
    assert answers == [(0, host)]


def test_reason_why_the_coordinator_cannot_start_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'cryptography'")

    monkeypatch.setattr(coordinator_process, "listen", fail)
    monkeypatch.setenv("JAXHET_JOB_SECRET", "a secret of tests")
    words = ["coordinator", f"127.0.0.1:{free_port()}", "1", "60"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(ModuleNotFoundError):
        coordinator_process.main()
    assert capsys.readouterr().out == (
        "error the coordinator of the job could not start: ModuleNotFoundError:"
        " No module named 'cryptography'\n"
    )
