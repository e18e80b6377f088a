"""A training that is killed at any moment and resumed is the same training, on any mesh.

Each moment is one test: `pytest -m slow tests/faults/test_kill_training.py -k "seed7-"`. The file
of `--junitxml` has steps and differences as properties.
"""

import dataclasses
import os
import pathlib
import random
import time
from collections.abc import Callable
from signal import SIGKILL, SIGTERM, Signals

import pytest
from watched import Line, WatchedJob

from models.records import METRICS, differences, read_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

STEPS = 80
# The longest that a job may take to come to a step or to its end, also beside other work.
WAIT_BUDGET_S = 300
MOMENTS = 20
# Values of `--permute` whose largest difference to the usual order is the noise floor.
PERMUTATIONS = (1, 2, 3)
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
    assert job.wait(WAIT_BUDGET_S) == 0, job.text()


def wait_for(job: WatchedJob, process: int, pattern: str) -> Line:
    """The line of a process that holds the pattern, be it there already."""
    deadline = time.monotonic() + WAIT_BUDGET_S
    while (line := job.first(process, pattern)) is None:
        assert job.is_running, job.text()
        if time.monotonic() > deadline:
            job.kill()
            raise AssertionError(f"no line with {pattern}:\n{job.text()}")
        time.sleep(0.01)
    return line


def end(job: WatchedJob, moment: Moment) -> None:
    """Ends a job at a moment; returns when all of its processes are gone."""
    pids = [int(wait_for(job, process, r"^pid \d+$").text.split()[1]) for process in range(2)]
    if moment.step:
        wait_for(job, 0, rf"^step {moment.step}/")
    time.sleep(moment.delay_s)
    os.kill(job.pid if moment.victim is None else pids[moment.victim], moment.signal)
    code = job.wait(WAIT_BUDGET_S)
    assert code in (-SIGKILL, 128 + SIGKILL, 128 + SIGTERM), job.text()
    deadline = time.monotonic() + 30
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, job.text()
        time.sleep(0.02)


def measures(folder: pathlib.Path, name: str = "loss") -> list[float]:
    rows = read_rows(folder / METRICS)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row[name] for row in rows]


class Undisturbed:
    """Runs that nothing disturbs, by `--order` and mesh; each is made when it is needed."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def run(
        self,
        order: str,
        permute: int = 0,
        mesh: str = "data=2",
        shape: tuple[int, int] = (2, 1),
    ) -> pathlib.Path:
        islands, devices = shape
        folder = self._folder / f"{order}-{permute}-{mesh}-{islands}x{devices}"
        if not folder.exists():
            words = (f"--order={order}", f"--permute={permute}")
            finish(start(folder, mesh, *words, islands=islands, devices=devices))
        return folder

    def noise_floor(self, order: str, mesh: str, shape: tuple[int, int]) -> float:
        """How far losses are moved by rounding alone.

        The largest difference to the usual run, of runs with rows and devices in other orders and
        of a run on this mesh: tensor parallelism adds the terms of products in another order.
        """
        usual = measures(self.run(order))
        others = [self.run(order, permute) for permute in PERMUTATIONS]
        others.append(self.run(order, mesh=mesh, shape=shape))
        return max(max(differences(measures(other), usual)) for other in others)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def record(
    request: pytest.FixtureRequest, record_testsuite_property: Callable[[str, object], None]
) -> Callable[[str, object], None]:
    """Notes a fact of the test in the file of `--junitxml`."""
    return lambda name, value: record_testsuite_property(f"{request.node.name}: {name}", value)


def newest_checkpoint(folder: pathlib.Path) -> int:
    """The step of the newest complete checkpoint, 0 if there is none."""
    names = (p.name for p in (folder / "checkpoints").glob("[0-9]*"))
    return max((int(name) for name in names if name.isdigit()), default=0)


@pytest.mark.parametrize("moment", [*map(Moment.random, range(MOMENTS))], ids=str)
def test_killed_training_resumes_to_the_bit(
    moment: Moment,
    undisturbed: Undisturbed,
    tmp_path: pathlib.Path,
    record: Callable[[str, object], None],
) -> None:
    end(start(tmp_path, "data=2"), moment)
    record("resumed from step", newest_checkpoint(tmp_path))
    finish(start(tmp_path, "data=2"))
    whole = undisturbed.run("windows")
    for name in ("loss", "gradient_norm"):
        assert measures(tmp_path, name) == measures(whole, name)
    record("equal losses", STEPS)


@pytest.mark.parametrize(
    ("mesh", "shape", "order"),
    [
        ("data=3", (3, 1), "windows"),
        ("data=3", (3, 1), "epochs"),
        ("fsdp=2,model=2", (2, 2), "windows"),
        ("data=2", (1, 2), "windows"),
    ],
    ids=["three islands", "three islands, epochs", "another mesh", "one island"],
)
def test_killed_training_resumes_elsewhere(
    mesh: str,
    shape: tuple[int, int],
    order: str,
    undisturbed: Undisturbed,
    tmp_path: pathlib.Path,
    record: Callable[[str, object], None],
) -> None:
    """On other islands and devices of each (`shape`), losses are within the noise floor."""
    islands, devices = shape
    words = f"--order={order}"
    end(start(tmp_path, "data=2", words), Moment(0, STEPS // 3, 0.1, islands % 2, SIGKILL))
    before = newest_checkpoint(tmp_path)
    finish(start(tmp_path, mesh, words, islands=islands, devices=devices))
    whole, parts = measures(undisturbed.run(order)), measures(tmp_path)
    assert 0 < before < STEPS
    assert parts[:before] == whole[:before]
    apart, floor = max(differences(parts, whole)), undisturbed.noise_floor(order, mesh, shape)
    record("resumed from step", before)
    record("largest difference", f"{apart:.1e}")
    record("noise floor", f"{floor:.1e}")
    assert apart <= floor


def test_save_that_fails_in_one_process_ends_the_job_in_words(tmp_path: pathlib.Path) -> None:
    full = f"import os\nif os.environ['JAXHET_PROCESS_ID'] == '1': {FULL_DISK}\n{PRETRAIN}"
    job = WatchedJob(
        ["-c", full, *TRAINING, "--mesh=data=2", f"--run-dir={tmp_path}"],
        islands=2,
        fast_compile=True,
    )
    assert job.wait(WAIT_BUDGET_S) == 1, job.text()
    words = r"^python -m models.pretrain: the checkpoint of step 3 can't be written to .*; there is"
    said = job.first(1, words)
    assert said, job.text()
    told = job.first(0, r"PeerError.*process 1\b")
    assert told, job.text()
    assert job.lines[-1].time - said.time < 10, job.text()
    assert not any((tmp_path / "checkpoints").glob("[0-9]")), job.text()
