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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import gpus
from tests.faults.victim import DTYPES, EXIT_CODE, KINDS, MOMENTS
from tests.faults.watched import Line, WatchedJob
from tools.programs import softverbs

pytestmark = pytest.mark.early

VICTIM = str(pathlib.Path(__file__).with_name("victim.py"))
FAILED, OTHER = 0, 1  # processes
START_WITHIN_S = 150.0
END_WITHIN_S = 60.0
# Seconds from the fault to the first line of the other process that names the failed one. A stopped
# process is silent for JAXHET_PEER_TIMEOUT_S, 8 s, first. One that leaves by sys.exit(0) is missed
# by the other's next exchange: time counts from the call of its program, which may compile it, or
# from sys.exit(0), after which a process ends its threads and its client of the coordinator.
NAME_WITHIN_S = {"stop": 9.0, "exit": 1.5}
NAME_WITHIN_DEFAULT_S = 1.1
# Seconds from there to the error that the program gets. XLA's compiler, and a save, end before it.
RAISE_WITHIN_S = {"compile": 10.0, "tune": 10.0, "save": 2.0}
# For a machine that has more to do than it has cores, where the other process may still start.
SLACK_S = 10.0
# How each process and the launcher end: an exit code, or the signal.
CODES = {
    "raise": ("1", "1", 1),
    "exit": ("0", "1", 1),
    "_exit": (str(EXIT_CODE), "1", EXIT_CODE),
    "kill": ("SIGKILL", "1", 128 + signal.SIGKILL),
    "stop": ("1", "1", 1),
}
SHM = pathlib.Path("/dev/shm")


@dataclasses.dataclass(frozen=True)
class Case:
    """A job.

    Attributes:
      moment: Moment of the fault.
      kind: Way to fail.
      transport: Transport of the exchanges; empty: the default.
      elements: Elements of each operand of the step that faults.
    """

    moment: str
    kind: str
    transport: str = ""
    elements: int = 1 << 21

    def __str__(self) -> str:
        return f"{self.moment:8} {self.kind:6} {self.transport:5}"


ALL = [Case(moment, kind) for moment in MOMENTS for kind in KINDS]
ON_CPUS = [case for case in ALL if case.moment != "tune"]  # kernels of CPUs are not tuned
FEW = [
    Case("setup", "stop"),
    Case("compile", "exit"),
    Case("between", "raise"),
    Case("exchange", "kill"),
    Case("save", "_exit"),
]
# The default between GPUs of one host is cuda_ipc.
ELEMENTS_ON_GPUS = {"": 64 << 20, "host": 16 << 20, "socket": 16 << 20, "verbs": 1 << 20}
ON_GPUS = [dataclasses.replace(case, elements=ELEMENTS_ON_GPUS[""]) for case in ALL] + [
    Case("between", kind, transport, elements)
    for transport, elements in ELEMENTS_ON_GPUS.items()
    for kind in ("kill", "stop")
    if transport
]


@dataclasses.dataclass(frozen=True)
class Row:
    """How a job ended.

    Attributes:
      case: The job.
      named_s: Time from the fault to the first line of the other process that names it. After
        sys.exit(0): from the other's last call of a program, if that was later.
      raised_s: The same time to the other process's error.
      error: The other process's error, class and start.
      codes: How both processes and the launcher ended.
      problem: First thing that is not as it must be; empty: none.
      text: All lines of the job.
    """

    case: Case
    named_s: float
    raised_s: float
    error: str
    codes: tuple[str, str, int]
    problem: str
    text: str

    def __str__(self) -> str:
        codes = " ".join(map(str, self.codes))
        return (
            f"{self.case} {self.named_s:6.2f} s {self.raised_s:6.2f} s  {codes:14}"
            f"  {self.problem or 'ok':24}  {self.error[:100]}"
        )


def _slack_s() -> float:
    return SLACK_S if os.getloadavg()[0] > (os.cpu_count() or 1) else 0.0


def _name_within_s(case: Case) -> float:
    limit = NAME_WITHIN_S.get(case.kind, NAME_WITHIN_DEFAULT_S)
    return limit + _slack_s() + (RAISE_WITHIN_S.get(case.moment, 0) if case.kind == "exit" else 0)


def _raise_within_s(case: Case) -> float:
    return _name_within_s(case) + RAISE_WITHIN_S.get(case.moment, 0)


def _code(job: WatchedJob, process: int) -> str:
    """How a process ended, in the launcher's words."""
    line = job.first(None, rf"process {process} \(.*?\): (exit code \d+|killed by \w+)")
    found = line and re.search(r"(?:exit code|killed by) (\w+)", line.text)
    return found[1] if found else "0"


def _named(job: WatchedJob, since: float) -> Line | None:
    """The first line of the other process that names the failed one."""
    return job.first(OTHER, rf"(caught|the job has failed:) .*\bprocess {FAILED}\b", since)


def _problem(job: WatchedJob, row: Row, on_gpus: bool) -> str:
    """The first thing that is wrong with a job that has ended, or ""."""
    case = row.case
    if not row.error:
        return "no error"
    if not re.search(rf"process {FAILED}\b", row.error):
        return "not named"
    if row.named_s > _name_within_s(case):
        return "named late"
    if row.raised_s > _raise_within_s(case):
        return "raised late"
    if any("WRONG" in line.text or line.text == "finished" for line in job.lines):
        return "wrong numbers"
    if case.moment == "save" and not job.first(OTHER, "@ saved"):
        return "save was cut"
    if case.kind == "stop" and not job.first(FAILED, "caught PeerError"):
        return "stopped process went on"
    if case.moment != "setup" and not job.first(OTHER, "device works"):
        return "device does not work"
    if on_gpus and case.moment == "between":
        missing = [d for d in DTYPES if not job.first(OTHER, f"poisoned {d}$")]
        if missing:
            return f"no NaN in {missing[0]}"
    if row.codes != CODES[case.kind]:
        return "other exit codes"
    return ""


def _run(case: Case, folder: pathlib.Path, env: Mapping[str, str], on_gpus: bool) -> Row:
    """Runs a job until its fault, and until it has ended."""
    folder.mkdir()
    fault = ["--fault", case.moment, case.kind, str(FAILED), "--folder", str(folder)]
    command = [VICTIM, "1000000", *fault, "--elements", str(case.elements)]
    if case.transport:
        env = {**env, "JAXHET_TRANSPORTS": case.transport}
    if case.transport == "verbs":
        env = {**env, **softverbs("cuda")}
    job = WatchedJob(command, islands=2, grace_s=END_WITHIN_S, env=env)
    try:
        pid = int(job.wait_for(rf"@ fault {case.moment} (\d+)", FAILED, START_WITHIN_S)[1])
        line = job.first(FAILED, "@ fault")
        assert line is not None
        since = line.time - 0.1
        deadline = line.time + END_WITHIN_S
        while not job.first(OTHER, "caught ", since):
            if time.monotonic() > deadline or not job.is_running:
                break
            time.sleep(0.02)
        if case.kind == "stop":
            os.kill(pid, signal.SIGCONT)
        code = job.wait(END_WITHIN_S)
    except AssertionError as failed:
        problem = str(failed).splitlines()[0]
        return Row(case, 0, 0, "", ("?", "?", -1), problem, job.text())
    finally:
        if job.is_running:
            job.kill()
    error, named = job.first(OTHER, "caught ", since), _named(job, since)
    begin = line.time
    if case.kind == "exit" and named:
        calls = [x.time for x in job.lines if x.process == OTHER and x.text.startswith("@ call")]
        begin = max([begin, *(time for time in calls if time < named.time)])
    row = Row(
        case,
        named.time - begin if named else 0.0,
        error.time - begin if error else 0.0,
        error.text.removeprefix("caught ") if error else "",
        (_code(job, FAILED), _code(job, OTHER), code),
        "",
        job.text(),
    )
    problem = _problem(job, row, on_gpus) or ("processes left" if _pids_left(job) else "")
    return dataclasses.replace(row, problem=problem)


def _pids_left(job: WatchedJob) -> set[int]:
    """Processes of a job that has ended, and which are still there."""
    pids = {int(found[1]) for x in job.lines if (found := re.match(r"@ \w+.* (\d+)$", x.text))}
    return {pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()}


def _run_all(
    cases: Sequence[Case], jobs: int, folder: pathlib.Path, env: Mapping[str, str], on_gpus: bool
) -> None:
    """Runs jobs, several at a time; prints their rows, and fails if one is not as it must be."""
    shared = set(SHM.iterdir())
    folders = [folder / str(i) for i in range(len(cases))]
    with ThreadPoolExecutor(jobs) as pool:
        futures = [
            pool.submit(_run, case, each, env, on_gpus)
            for case, each in zip(cases, folders, strict=True)
        ]
        rows = [future.result() for future in futures]
    print("", "moment   kind   over   named in raised in  codes           result", *rows, sep="\n")
    for row in rows:
        assert not row.problem, f"{row}\n{row.text}"
    assert set(SHM.iterdir()) <= shared


@pytest.mark.timeout(900)
def test_other_process_reports_each_fault_on_gpus(tmp_path: pathlib.Path) -> None:
    if reason := gpus.why_fewer_than(2):
        pytest.skip(reason)
    jobs = max(1, min(8, (os.cpu_count() or 1) // 4))
    env = {"JAX_PLATFORMS": "", "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.75 / jobs:.3f}"}
    softverbs()  # built before jobs run
    _run_all(ON_GPUS, jobs, tmp_path, env, on_gpus=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", [FEW, pytest.param(ON_CPUS, marks=pytest.mark.slow)])
def test_other_process_reports_each_fault_on_cpus(
    cases: list[Case], tmp_path: pathlib.Path
) -> None:
    _run_all(cases, max(1, (os.cpu_count() or 1) // 2), tmp_path, {}, on_gpus=False)
