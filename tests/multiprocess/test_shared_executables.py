"""Islands that load each other's executables have the results of islands that compile their own.

Jobs on CPUs share nothing by default. Here they share as jobs on equal GPUs do.
"""

import pathlib
import re
import shutil
import time
from typing import Any

import pytest
from shared_executables_worker import answer

from jaxhet.testing import Shape, island_job

_ENV = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": ""}
_NUM_PROGRAMS = 6  # all that processes share
_NUM_PARTITIONED = 3  # programs with `custom_partitioning` among them
_WITHIN_S = 20.0  # the limit for an executable is 600 s


def _train(**request: Any) -> tuple[list[dict[str, Any]], str]:
    """Trains in a job of two islands; the answers by process, and the log."""
    with island_job(Shape(2), env=_ENV) as job:
        answers = job.ask((answer, (request,)), 100)
        return sorted(answers, key=lambda answer: answer["process"]), job.log.read_text()


@pytest.fixture(scope="module")
def own() -> list[tuple[Any, ...]]:
    """Results of islands that compile their own programs."""
    return _results(_train()[0])


def _log_of_failure(**request: Any) -> str:
    """Trains in a job that fails; what it said."""
    with pytest.raises(AssertionError) as failed:
        _train(**request)
    return str(failed.value)


def _counts(answers: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(answer["compiled"], answer["loaded"]) for answer in answers]


def _results(answers: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    names = ("loss", "weights", "total", "plans")
    return [tuple(answer[name] for name in names) for answer in answers]


def test_second_process_loads_all_programs_and_has_the_same_results(
    own: list[tuple[Any, ...]],
) -> None:
    shared, log = _train(share=True)
    assert _counts(shared) == [(_NUM_PROGRAMS, 0), (0, _NUM_PROGRAMS)]
    assert _results(shared) == own
    assert shared[0]["weights"] == shared[1]["weights"]
    assert [answer["scaled"] for answer in shared] == [[2, 3, 4], [2, 3, 4]]
    assert shared[1]["plans"] == _NUM_PROGRAMS
    assert "did not give" not in log


def test_executable_that_cannot_be_loaded_is_compiled(own: list[tuple[Any, ...]]) -> None:
    answers, log = _train(share=True, spoils=0)
    assert _counts(answers) == [(_NUM_PROGRAMS, 0), (_NUM_PROGRAMS, 0)]
    assert _results(answers) == own
    assert log.count("process 0 did not give the executable of a program") == _NUM_PROGRAMS
    assert log.count("replicas may differ in their last bits") == _NUM_PROGRAMS


def test_other_program_is_an_error_though_its_process_waits_for_the_executable() -> None:
    log = _log_of_failure(share=True, process_with_a_constant=1)
    assert "process 0 did not give the executable of a program: it has compiled another one" in log
    assert "PlanMismatchError" in log
    assert "add e0 1.0:f32[]" in log


def test_wait_ends_when_its_process_leaves() -> None:
    with island_job(Shape(2), env=_ENV) as job:
        answers = job.ask((answer, ({"share": True, "leaves": True},)), 100)
        log = job.log.read_text()
    told = next(answer for answer in answers if "leaves" in answer)
    assert max(seconds for seconds, _ in told.values()) < _WITHIN_S
    assert told["equal"][1] == "6.0"
    assert told["leaves"][1] == "[7.0, 8.0]"
    assert re.search(r"process 0 \(island0, .*\) has left the job", told["has left"][1])
    reasons = re.findall(r"executable of a program: (.*?)(?:\. This process|$)", log, re.MULTILINE)
    assert reasons == ["it has left the job"] * 2


@pytest.mark.parametrize(
    "how",
    [
        "raise",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("os._exit", "SIGKILL", "SIGSTOP")),
    ],
)
def test_wait_for_a_process_that_ends_ends_with_the_cause(how: str) -> None:
    start = time.monotonic()
    log = _log_of_failure(share=True, ends=how)
    assert time.monotonic() - start < 60  # the limit for an executable is 600 s
    assert "PeerError" in log
    assert "process 0 (island0" in log
    assert "did not give" not in log


@pytest.mark.slow
def test_process_that_lost_its_cache_gets_what_the_first_has_in_its_own(
    tmp_path: pathlib.Path,
) -> None:
    counts = []
    for lost in (None, "1"):
        if lost is not None:
            shutil.rmtree(tmp_path / lost)
        counts.append(_counts(_train(share=True, cache=str(tmp_path))[0]))
    # JAX's key of a program with `custom_partitioning` is another one in each job.
    assert counts[0] == [(_NUM_PROGRAMS, 0), (0, _NUM_PROGRAMS)]
    assert counts[1] == [(_NUM_PARTITIONED, 0), (0, _NUM_PROGRAMS)]
