"""A process dies or stops in mid-step: the others raise PeerError in time and can end cleanly.

On two GPUs, over each transport; on CPU with small operands, which keeps the test itself working.
"""

import os
import pathlib
import signal
import time
from collections.abc import Iterator

import pytest

from benchmarks import gpus
from tests.faults.watched import WatchedJob, assert_others_report
from tools.programs import softverbs

VICTIM = str(pathlib.Path(__file__).with_name("victim.py"))
DTYPES = ("float32", "bfloat16", "float8_e4m3fn")  # types of the victim's operands
REPORT_WITHIN_S = 10.0
CLEAN_WITHIN_S = 20.0
STARTUP_S = 240
# Platform, transport, elements of each operand, exchanges of each in a step: so few that a program
# is launched as a whole (a stream takes about 1000 things), and is waited for as a whole then.
CASES = {
    "cuda-cuda_ipc": ("cuda", "cuda_ipc", 64 << 20, 8),
    "cuda-shm": ("cuda", "shm", 16 << 20, 8),
    "cuda-tcp": ("cuda", "tcp", 16 << 20, 8),
    "cuda-verbs": ("cuda", "verbs", 1 << 20, 4),
    "cpu-shm": ("cpu", "shm", 1 << 18, 10),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def job(case: str, victim: int) -> Iterator[WatchedJob]:
    platform, transport, elements, links = CASES[case]
    if platform == "cuda" and (reason := gpus.why_fewer_than(2)):
        pytest.skip(reason)
    env = softverbs("copy cuda") if transport == "verbs" else {}
    command = [VICTIM, "1000000", str(elements), str(links), str(victim)]
    job = WatchedJob(
        command,
        islands=2,
        grace_s=CLEAN_WITHIN_S + 10,
        env={"JAX_PLATFORMS": platform, "JAXHET_TRANSPORTS": transport, **env},
    )
    yield job
    if job.is_running:
        job.kill()


def pid_of_running(job: WatchedJob, process: int) -> int:
    """Waits until the others wait for the process, which is late, in their fourth step."""
    for _ in range(2):
        job.wait_for("@ run", process, STARTUP_S)
    pid = int(job.wait_for(r"@ run (\d+)", process, STARTUP_S)[1])
    time.sleep(0.5)
    return pid


def assert_poisoned(job: WatchedJob, process: int, since: float) -> None:
    """Checks that on a GPU what waited was NaN, of every dtype."""
    for dtype in DTYPES:
        assert job.first(process, f"poisoned {dtype}:", since), job.text()


def assert_ended_cleanly(job: WatchedJob, process: int, since: float) -> None:
    """Checks what the process said after its error, and that it reached its end."""
    assert job.first(process, "caught PeerError", since), job.text()
    assert job.first(process, "device works", since), job.text()
    end = job.first(process, "^clean$", since)
    assert end is not None, job.text()
    assert end.time - since < CLEAN_WITHIN_S, job.text()
    assert not any("WRONG" in line.text for line in job.lines), job.text()
    assert job.first(None, rf"process {process} .*: exit code 0$"), job.text()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_other_ends_cleanly_after_a_killed_process(victim: int, case: str, job: WatchedJob) -> None:
    pid = pid_of_running(job, victim)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    assert job.wait() == 128 + signal.SIGKILL, job.text()
    assert_others_report(job, victim, 2, killed - 0.1, REPORT_WITHIN_S)
    assert_ended_cleanly(job, 1 - victim, killed - 0.1)
    if case.startswith("cuda"):  # elsewhere there is no result after a failure
        assert_poisoned(job, 1 - victim, killed - 0.1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", [1])
def test_other_ends_cleanly_after_a_stopped_process(
    victim: int, case: str, job: WatchedJob
) -> None:
    pid = pid_of_running(job, victim)
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        while not job.first(1 - victim, "^clean$", stopped):
            assert time.monotonic() - stopped < CLEAN_WITHIN_S, job.text()
            time.sleep(0.05)
    finally:
        os.kill(pid, signal.SIGCONT)
    job.wait()
    assert_others_report(job, victim, 2, stopped, REPORT_WITHIN_S)
    if case.startswith("cuda"):
        assert_poisoned(job, 1 - victim, stopped)
    assert job.first(victim, "caught PeerError", stopped), job.text()
    assert not any("WRONG" in line.text for line in job.lines), job.text()
