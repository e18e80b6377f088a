"""A training that is killed at any moment and resumed is the same training, on any mesh.

Each moment is one test: `pytest -m slow tests/faults/test_kill_training.py -k "seed7-"`.
"""

import dataclasses
import os
import pathlib
import random
import time
from signal import SIGKILL, SIGTERM, Signals

import pytest
from watched import Line, WatchedJob

from models import parity
from models.records import METRICS, differences, read_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 80
MOMENTS = 20
TRAINING = [
    *("--config=tiny", "--batch=12", "--seq=32", f"--steps={STEPS}"),
    *("--checkpoint-every=3", "--log-every=1", "--resume=auto"),
]
PRETRAIN = "import os, models.pretrain as p; print('pid', os.getpid(), flush=True); p.main()"
# A process that can't write the files of a checkpoint, as on a disk that is full.
FULL_DISK = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (1000, r.RLIM_INFINITY))"


@dataclasses.dataclass(frozen=True)
class Moment:
    """When and how a run is ended: some seconds after a step; by a signal to one process.

    `victim` is a process of the job, or None for its launcher. Step 0 is the start.
    """

    seed: int
    step: int
    delay_s: float
    victim: int | None
    signal: Signals

    @classmethod
    def random(cls, seed: int) -> "Moment":
        draw = random.Random(seed)
        step = draw.choice((0, *(draw.randrange(STEPS // 2) for _ in range(4))))
        victim = draw.choice((0, 1, None))
        number = SIGKILL if victim is not None else draw.choice((SIGKILL, SIGTERM))
        return cls(seed, step, round(draw.uniform(0, 0.4 if step else 3.0), 3), victim, number)

    def __str__(self) -> str:
        victim = "launcher" if self.victim is None else f"process{self.victim}"
        return f"seed{self.seed}-step{self.step}+{self.delay_s}s-{self.signal.name}-{victim}"


def start(
    folder: pathlib.Path, mesh: str, *options: str, islands: int = 2, devices: int = 1
) -> WatchedJob:
    words = ["-c", PRETRAIN, *TRAINING, f"--mesh={mesh}", f"--run-dir={folder}", *options]
    return WatchedJob(words, islands=islands, devices=devices, fast_compile=True)


def finish(job: WatchedJob) -> None:
    assert job.wait(180) == 0, job.text()


def wait_for(job: WatchedJob, process: int, pattern: str) -> Line:
    """The line of a process that holds the pattern, be it there already."""
    deadline = time.monotonic() + 90
    while (line := job.first(process, pattern)) is None:
        assert job.is_running, job.text()
        assert time.monotonic() < deadline, job.text()
        time.sleep(0.01)
    return line


def end(job: WatchedJob, moment: Moment) -> None:
    """Ends a job at a moment; returns when all of its processes are gone."""
    pids = [int(wait_for(job, process, r"^pid \d+$").text.split()[1]) for process in range(2)]
    if moment.step:
        wait_for(job, 0, rf"^step {moment.step}/")
    time.sleep(moment.delay_s)
    os.kill(job.pid if moment.victim is None else pids[moment.victim], moment.signal)
    code = job.wait()
    assert code in (-SIGKILL, 128 + SIGKILL, 128 + SIGTERM), job.text()
    deadline = time.monotonic() + 30
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, job.text()
        time.sleep(0.02)


def measures(folder: pathlib.Path, name: str = "loss") -> list[float]:
    rows = read_rows(folder / METRICS)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row[name] for row in rows]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    finish(start(folder, "data=2"))
    return folder


@pytest.fixture(scope="module")
def noise_floor(undisturbed: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """How far losses are moved by another order of rows and devices: by rounding alone."""
    folder = tmp_path_factory.mktemp("runs") / "permuted"
    finish(start(folder, "data=2", "--permute=1"))
    return max(differences(measures(folder), measures(undisturbed)))


@pytest.mark.parametrize("moment", [*map(Moment.random, range(MOMENTS))], ids=str)
def test_killed_training_resumes_to_the_bit(
    moment: Moment, undisturbed: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    end(start(tmp_path, "data=2"), moment)
    finish(start(tmp_path, "data=2"))
    for name in ("loss", "gradient_norm"):
        assert measures(tmp_path, name) == measures(undisturbed, name)


@pytest.mark.parametrize(
    ("mesh", "islands", "devices"),
    [("data=3", 3, 1), ("fsdp=2,model=2", 2, 2), ("data=2", 1, 2)],
    ids=["three islands", "another mesh", "one island"],
)
def test_killed_training_resumes_elsewhere(
    mesh: str,
    islands: int,
    devices: int,
    undisturbed: pathlib.Path,
    noise_floor: float,
    tmp_path: pathlib.Path,
) -> None:
    end(start(tmp_path, "data=2"), Moment(0, STEPS // 3, 0.1, islands % 2, SIGKILL))
    before = max(int(p.name) for p in (tmp_path / "checkpoints").glob("[0-9]*") if p.name.isdigit())
    finish(start(tmp_path, mesh, islands=islands, devices=devices))
    whole, parts = measures(undisturbed), measures(tmp_path)
    assert parts[:before] == whole[:before]
    apart = max(differences(parts, whole))
    assert apart <= parity.NOISE_FLOORS * noise_floor, (apart, noise_floor)


def test_save_that_fails_in_one_process_ends_the_job_in_words(tmp_path: pathlib.Path) -> None:
    full = f"import os\nif os.environ['JAXHET_PROCESS_ID'] == '1': {FULL_DISK}\n{PRETRAIN}"
    job = WatchedJob(
        ["-c", full, *TRAINING, "--mesh=data=2", f"--run-dir={tmp_path}"],
        islands=2,
        fast_compile=True,
    )
    assert job.wait() == 1, job.text()
    words = r"^python -m models.pretrain: the checkpoint of step 3 can't be written to .*; there is"
    said = job.first(1, words)
    assert said, job.text()
    told = job.first(0, r"PeerError.*process 1\b")
    assert told, job.text()
    assert job.lines[-1].time - said.time < 10, job.text()
    assert not any((tmp_path / "checkpoints").glob("[0-9]")), job.text()
