"""A process fails in each way at each moment of a job: the other process says so in time.

    pytest -s tests/faults/test_matrix.py -k on_gpus

runs the whole matrix on two GPUs, `-m slow -k on_cpus` on CPUs, with several jobs at a time. Both
print a row for each job. Process 0 fails: where GPUs are equal, it compiles for both processes.
"""

import dataclasses
import os
import pathlib
import re
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import gpus
from tests.faults.victim import EXIT_CODE, KINDS, MOMENTS
from tests.faults.watched import Line, WatchedJob

pytestmark = pytest.mark.early

VICTIM = str(pathlib.Path(__file__).with_name("victim.py"))
FAILED, OTHER = 0, 1  # processes
START_WITHIN_S = 150.0
END_WITHIN_S = 60.0
# Seconds from the fault to the error of the other process. A process that compiles or saves reports
# after that, and a stopped one is silent for JAXHET_PEER_TIMEOUT_S first.
REPORT_WITHIN_S = 5.0
BUSY_S = {"compile": 10.0, "tune": 10.0, "save": 2.0}
SILENT_S = 8.0
CODES = {"raise": 1, "exit": 0, "_exit": EXIT_CODE, "kill": -signal.SIGKILL}
SHM = pathlib.Path("/dev/shm")

Case = tuple[str, str]  # moment and kind
ALL = [(moment, kind) for moment in MOMENTS for kind in KINDS]
ON_CPUS = [case for case in ALL if case[0] != "tune"]  # kernels of CPUs are not tuned
FEW = [
    ("setup", "raise"),
    ("compile", "exit"),
    ("between", "raise"),
    ("exchange", "kill"),
    ("exchange", "stop"),
    ("save", "_exit"),
]


@dataclasses.dataclass(frozen=True)
class Row:
    """How a job ended.

    Attributes:
      case: Moment and kind of the fault.
      seconds: Time from the fault to the other process's error.
      error: The other process's error, class and start.
      codes: Exit codes of both processes.
      problem: First thing that is not as it must be; empty: none.
      text: All lines of the job.
    """

    case: Case
    seconds: float
    error: str
    codes: tuple[str, str]
    problem: str
    text: str

    def __str__(self) -> str:
        moment, kind = self.case
        codes = ", ".join(self.codes)
        return (
            f"{moment:8} {kind:6} {self.seconds:6.2f} s  {codes:8}  {self.problem or 'ok':24}"
            f"  {self.error[:100]}"
        )


def _limit_s(case: Case) -> float:
    moment, kind = case
    return REPORT_WITHIN_S + BUSY_S.get(moment, 0) + SILENT_S * (kind == "stop")


def _code(job: WatchedJob, process: int) -> str:
    """How a process ended, in the launcher's words."""
    line = job.first(None, rf"process {process} \(.*?\): (exit code \d+|killed by \w+)")
    found = line and re.search(r"(?:exit code|killed by) (\w+)", line.text)
    return found[1] if found else "0"


def _problem(job: WatchedJob, case: Case, fault: Line, error: Line | None, pids: set[int]) -> str:
    """Names the first thing that is wrong about a job that has ended; empty: none."""
    moment, kind = case
    if error is None:
        return "no error"
    if not re.search(rf"process {FAILED}\b", error.text):
        return "not named"
    if error.time - fault.time > _limit_s(case):
        return "late"
    if any("WRONG" in line.text or line.text == "finished" for line in job.lines):
        return "wrong numbers"
    if moment == "save" and not job.first(OTHER, "@ saved"):
        return "save was cut"
    if kind == "stop" and not job.first(FAILED, "caught PeerError"):
        return "stopped process went on"
    if any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
        return "processes left"
    return ""


def _run(case: Case, folder: pathlib.Path, env: dict[str, str]) -> Row:
    """Runs a job until its fault, and until it has ended."""
    moment, kind = case
    folder.mkdir()
    command = [VICTIM, "1000000", "--fault", moment, kind, str(FAILED), "--folder", str(folder)]
    job = WatchedJob(command, islands=2, grace_s=END_WITHIN_S, env=env)
    try:
        pid = int(job.wait_for(rf"@ fault {moment} (\d+)", FAILED, START_WITHIN_S)[1])
        fault = job.first(FAILED, "@ fault")
        assert fault is not None
        deadline = fault.time + _limit_s(case)
        while not (error := job.first(OTHER, "caught ", fault.time - 0.1)):
            if time.monotonic() > deadline or not job.is_running:
                break
            time.sleep(0.02)
        if kind == "stop":
            os.kill(pid, signal.SIGCONT)
        job.wait(END_WITHIN_S)
    except AssertionError as failed:
        return Row(case, 0, "", ("?", "?"), str(failed).splitlines()[0], job.text())
    finally:
        if job.is_running:
            job.kill()
    error = job.first(OTHER, "caught ", fault.time - 0.1)
    pids = {int(found[1]) for x in job.lines if (found := re.match(r"@ \w+.* (\d+)$", x.text))}
    problem = _problem(job, case, fault, error, pids)
    codes = (_code(job, FAILED), _code(job, OTHER))
    words = error.text.removeprefix("caught ") if error else ""
    seconds = error.time - fault.time if error else 0.0
    return Row(case, seconds, words, codes, problem, job.text())


def _run_all(cases: Sequence[Case], jobs: int, folder: pathlib.Path, env: dict[str, str]) -> None:
    """Runs jobs, several at a time; prints their rows, and fails if one is not as it must be."""
    shared = set(SHM.iterdir())
    with ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(lambda case: _run(case, folder / f"{case[0]}-{case[1]}", env), cases))
    print("", "moment   kind    error in codes     result", *rows, sep="\n")
    for row in rows:
        assert not row.problem, f"{row}\n{row.text}"
    assert set(SHM.iterdir()) <= shared


@pytest.mark.timeout(900)
def test_other_process_reports_each_fault_on_gpus(tmp_path: pathlib.Path) -> None:
    if reason := gpus.why_fewer_than(2):
        pytest.skip(reason)
    jobs = max(1, min(8, (os.cpu_count() or 1) // 4))
    env = {"JAX_PLATFORMS": "", "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.75 / jobs:.3f}"}
    _run_all(ALL, jobs, tmp_path, env)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", [FEW, pytest.param(ON_CPUS, marks=pytest.mark.slow)])
def test_other_process_reports_each_fault_on_cpus(
    cases: list[Case], tmp_path: pathlib.Path
) -> None:
    _run_all(cases, max(1, (os.cpu_count() or 1) // 2), tmp_path, {})
