"""Which processes connect when, and the errors of connections that a program needs."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from jaxhet._errors import JaxhetError, PeerError, TransportError, UsageError
from jaxhet._job.connector import Connector, connects_all, partners
from jaxhet._job.process_info import ProcessInfo
from tests.support.members import described


def _members(islands: str, platform: str = "cpu") -> list[ProcessInfo]:
    """A process for each letter, on the island of this name."""
    return [described(process, island, platform=platform) for process, island in enumerate(islands)]


@pytest.mark.parametrize(
    ("islands", "expected"),
    [
        ("ab", [{1}, {0}]),
        ("aabb", [{2}, {3}, {0}, {1}]),
        ("abab", [{1}, {0}, {3}, {2}]),
        ("aaab", [{3}, {3}, {3}, {0, 1, 2}]),
        ("abc", [{1, 2}, {0, 2}, {0, 1}]),
        ("aabbc", [{2, 4}, {3}, {0, 4}, {1, 4}, {0, 2, 3}]),
    ],
)
def test_partners_have_the_same_place_on_neighbouring_islands(
    islands: str, expected: list[set[int]]
) -> None:
    members = _members(islands)
    found = [partners(process, members) for process in range(len(members))]
    assert found == expected
    assert all(process in found[other] for process in range(len(found)) for other in found[process])


def test_processes_with_gpus_also_connect_to_their_host() -> None:
    members = _members("aabb", "cuda")
    assert [partners(i, members) for i in range(4)] == [{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}]
    members = [dataclasses.replace(m, host_id=m.island) for m in members]
    assert [partners(i, members) for i in range(4)] == [{1, 2}, {0, 3}, {3, 0}, {2, 1}]


def test_small_jobs_connect_at_the_start() -> None:
    assert connects_all("auto", _members("ab" * 8))
    assert not connects_all("auto", _members("ab" * 9))
    assert connects_all("all", _members("ab" * 9))
    assert not connects_all("needed", _members("ab"))
    assert not connects_all("auto", _members("ab" * 9, "cuda"))


class _Double:
    """Stands for the listener and the membership of process 1 of 3."""

    process = 1
    address = "127.0.0.1:9"

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.is_closed = False
        self.is_absent: Callable[[int], None] = lambda _: None
        self.needed_by: Callable[[int], None] = lambda _: None
        self.failure: JaxhetError | None = None

    def ask_for(self, processes: list[int]) -> None:
        self.asked.append(processes)

    def listen_needs(self, on_need: Callable[[int], None], on_absent: Callable[[int], None]):
        self.needed_by, self.is_absent = on_need, on_absent

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self.is_closed = True


class _Case:
    """A connector, and what it opened and failed with."""

    def __init__(self, error: JaxhetError | None = None) -> None:
        self.double = _Double()
        self.opened: list[int] = []
        self.failures: list[JaxhetError] = []
        self.error = error
        double = cast(Any, self.double)
        self.connector = Connector(double, _members("aab"), [], self._open, double)
        self.connector.start(self.failures.append)

    def _open(self, info: ProcessInfo, check: Callable[[], None]) -> None:
        check()
        self.opened.append(info.process)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("process", [0, 2])
def test_peer_that_has_left_is_named(process: int) -> None:
    case = _Case()
    case.double.is_absent(process)
    with pytest.raises(
        PeerError, match=rf"process {process} .* has left the job.* All processes must run the same"
    ):
        case.connector.need([process])


def test_failure_of_the_job_is_the_error() -> None:
    case = _Case()
    case.double.failure = PeerError("gone")
    with pytest.raises(PeerError, match="gone"):
        case.connector.need([2])


def test_failed_connection_fails_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxhet._job.bootstrap._DEATH_KNOWN_WITHIN_S", 0.05)
    case = _Case(error=TransportError("no transport reaches it"))
    with pytest.raises(TransportError, match="no transport"):
        case.connector.need([0])
    assert [str(failure) for failure in case.failures] == ["no transport reaches it"]
    assert not case.connector.has(0)
    with pytest.raises(TransportError, match="no transport"):  # nothing is retried
        case.connector.need([0])
    assert case.opened == [0]


def test_error_that_nobody_expects_fails_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxhet._job.bootstrap._DEATH_KNOWN_WITHIN_S", 0.05)
    case = _Case(error=cast(Any, OSError("too many files")))
    with pytest.raises(TransportError, match=r"no connection to process 0 .*too many files"):
        case.connector.need([0])
    assert len(case.failures) == 1


def test_connector_that_is_closed_connects_nobody_and_fails_nothing() -> None:
    case = _Case()
    case.connector.close()
    with pytest.raises(UsageError, match="shut down"):
        case.connector.need([0])
    assert not case.opened
    assert not case.failures
    assert case.double.is_closed


def test_need_of_a_peer_is_no_error_where_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    case = _Case()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    case.double.needed_by(2)
    assert not case.failures
