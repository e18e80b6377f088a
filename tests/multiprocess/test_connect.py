"""Jobs that connect two processes when a program needs them (JAXHET__CONNECT=needed)."""

from collections.abc import Iterator, Sequence
from typing import Any

import connect_worker
import pytest

from jaxhet.testing import FAST_COMPILE, Job, Shape, island_job

_SHAPE = Shape(2, 3)
_RAILS = {0: [3], 1: [4], 2: [5], 3: [0], 4: [1], 5: [2]}
_OTHERS = {process: [p for p in range(6) if p != process] for process in range(6)}
# Sockets to the coordinator, and to JAX's service by way of the relay, which has two more.
_SERVICES = 4


def _ask(job: Job, action: str, process: int = -1) -> dict[int, Any]:
    """The answers of all processes; `process` alone acts if it is given."""
    return dict(job.ask((connect_worker.answer, (action, process)), 60))


def _by_process(values: Sequence[Any]) -> dict[int, Any]:
    return dict(enumerate(values))


@pytest.fixture
def job() -> Iterator[Job]:
    env = {**FAST_COMPILE, "JAXHET__CONNECT": "needed", "JAXHET_TRANSPORTS": "socket"}
    with island_job(_SHAPE, env=env) as job:
        yield job


def test_processes_connect_when_a_program_needs_it(job: Job) -> None:
    per_peer = 1 + 2  # control and data
    for _ in range(2):
        counts = _ask(job, "count")
        assert {p: peers for p, (_, peers) in counts.items()} == _RAILS
        assert {sockets for sockets, _ in counts.values()} == {_SERVICES + per_peer}
        assert _ask(job, "sum rails") == _by_process([[3.0], [5.0], [7.0]] * 2)
    assert _ask(job, "sum all") == _by_process([[15.0]] * 6)
    counts = _ask(job, "count")
    assert {p: peers for p, (_, peers) in counts.items()} == _OTHERS
    assert {sockets for sockets, _ in counts.values()} == {_SERVICES + 5 * per_peer}


def test_compilation_does_not_wait_for_other_programs(job: Job) -> None:
    """The others wait for their next request, on a socket, and connect meanwhile."""
    for process in (2, 4, 0):
        assert _ask(job, "compile all", process)[process] == _OTHERS[process]
    assert _ask(job, "sum islands") == _by_process([[3.0]] * 3 + [[12.0]] * 3)
    assert _ask(job, "sum all") == _by_process([[15.0]] * 6)
