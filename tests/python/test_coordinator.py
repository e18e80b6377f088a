"""What the coordinator tells the others when one process fails, whatever that process sends."""

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxhet import _config, _coordinator, _initialize
from jaxhet._errors import DeadlineError, JaxhetError, PeerError
from tests.support.ports import free_port

SECRET = b"a job secret"


class UnknownError(JaxhetError):
    """A class of which the coordinator knows nothing."""


class Pair:
    """Two members of a job, and the thread of its coordinator."""

    def __init__(self) -> None:
        address = f"127.0.0.1:{free_port()}"
        server = _coordinator.Coordinator(_coordinator.listen(address), SECRET, 2, 20)
        self.thread = threading.Thread(target=server.serve, daemon=True)
        self.thread.start()
        self.members = [_coordinator.connect(address, SECRET, 5) for _ in range(2)]
        joins = [
            threading.Thread(target=member.join, args=(_claim(i), 20))
            for i, member in enumerate(self.members)
        ]
        for thread in joins:
            thread.start()
        for thread in joins:
            thread.join()

    def failure_of_first(self) -> JaxhetError:
        """What process 0 is told, within 5 s."""
        deadline = time.monotonic() + 5
        while (failure := self.members[0].failure) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return failure


def _claim(process: int) -> _coordinator.Claim:
    given = {"process_id": process, "num_processes": 2, "island": f"island{process}"}
    return _initialize.make_claim(_config.resolve(given, {}), f"127.0.0.1:{9000 + process}")


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for member in pair.members:
        member.leave()
    pair.thread.join(10)
    assert not pair.thread.is_alive()  # the coordinator ends when everybody has left


@pytest.mark.parametrize("error", [DeadlineError("too late"), UnknownError("out of paper")])
def test_reported_error_is_told(error: JaxhetError, pair: Pair) -> None:
    pair.members[1].report(error)
    failure = pair.failure_of_first()
    assert str(failure) == str(error)
    assert type(failure) is (JaxhetError if type(error) is UnknownError else type(error))


@pytest.mark.parametrize(
    "message", [{"failed": 7}, {"failed": ["UsageError"]}, {"tuned": {"to": 3}}, 7, None]
)
def test_process_that_sends_nonsense_is_gone(message: Any, pair: Pair) -> None:
    pair.members[1]._channel.send(message)
    failure = pair.failure_of_first()
    assert type(failure) is PeerError
    assert "process 1 (island1" in str(failure)
    assert "is gone: the coordinator does not understand it" in str(failure)


def test_process_that_reads_nothing_holds_up_nobody(pair: Pair) -> None:
    stopped = pair.members[1]
    stopped._closing = True
    stopped._on_tuned = lambda message: time.sleep(60)  # its reader stops at the first message
    for _ in range(200):
        pair.members[0].tell_tuned({"to": [1], "padding": "x" * 100_000})
    pair.members[0].report(DeadlineError("too late"))
    assert type(pair.failure_of_first()) is DeadlineError


def test_encryption_that_differs_is_refused() -> None:
    off, other = _claim(0), _claim(1)
    full = dataclasses.replace(other, options={**other.options, "encryption": "full"})
    text = _coordinator.disagreement(off, full)
    assert text is not None
    assert "option encryption differs: process 0 (island0, pid " in text
    assert "has 'off', process 1 (island1, pid " in text
    assert "has 'full'; start every process of the job with the same value" in text
