"""A training that is killed at any moment and resumed is the same training, on any mesh.

Each moment is one test: `pytest -m slow tests/faults/test_kill_training.py -k "seed7-"`. The file
of `--junitxml` has steps and differences as properties.

On another mesh sums are added in another order, and losses differ by rounding: one plain world that
is resumed on that mesh has the same bits. In float64 the difference is below 1e-14, and planted
errors are far beyond (`tests/python/models/test_pretrain.py`).
"""

import dataclasses
import os
import pathlib
import random
import shutil
import time
from collections.abc import Callable
from signal import SIGKILL, SIGTERM, Signals

import pytest
from watched import Line, WatchedJob

from models.extras.records import METRICS, differences, read_rows
from tests.support.commands import python

pytestmark = pytest.mark.timeout(2400)

STEPS = 80
# The longest that a job may take to come to a step or to its end, also beside other work.
WAIT_BUDGET_S = 300
MOMENTS = 20
# Other meshes than data=2 of two islands, with islands and devices of each.
ELSEWHERE = {
    "another mesh": ("fsdp=2,model=2", (2, 2)),
    "three islands": ("data=3", (3, 1)),
    "model": ("model=2", (2, 1)),
    "sequence": ("data=2,sequence=2", (2, 2)),
    "one island": ("data=2", (1, 2)),
}
TRAINING = [
    *("--config=tiny", "--batch=12", "--seq=32", f"--steps={STEPS}"),
    *("--checkpoint-every=3", "--log-every=1", "--resume=auto"),
]
PRETRAIN = "import os, models.pretrain as p; print('pid', os.getpid(), flush=True); p.main()"
# A process that can't write the files of a checkpoint, as on a disk that is full.
FULL_DISK = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (1000, r.RLIM_INFINITY))"


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a run is ended (some seconds after a step), and by which signal to which process.

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


def words_of(folder: pathlib.Path, mesh: str) -> list[str]:
    return [*TRAINING, f"--mesh={mesh}", f"--run-dir={folder}"]


def start(folder: pathlib.Path, mesh: str, islands: int = 2, devices: int = 1) -> WatchedJob:
    words = ["-c", PRETRAIN, *words_of(folder, mesh)]
    return WatchedJob(words, islands=islands, devices=devices, fast_compile=True)


def one_world(folder: pathlib.Path, mesh: str, devices: int) -> None:
    """Trains in one process without islands."""
    words = ("-m", "models.pretrain", *words_of(folder, mesh))
    python(*words, timeout_s=WAIT_BUDGET_S, env={"JAX_NUM_CPU_DEVICES": str(devices)})


def copied(folder: pathlib.Path, name: str) -> pathlib.Path:
    folder.mkdir(exist_ok=True)  # a run that was killed early has made none
    return shutil.copytree(folder, folder.with_name(name))


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
    assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
    return [row[name] for row in rows]


def assert_equal_bits(folder: pathlib.Path, other: pathlib.Path, steps: int = STEPS) -> None:
    for name in ("loss", "gradient_norm"):
        mine = measures(folder, name)
        assert len(mine) == steps
        assert mine == measures(other, name)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a run on data=2 that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(start(folder, "data=2"))
    return folder


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


@pytest.mark.slow
@pytest.mark.parametrize("moment", [*map(Moment.random, range(MOMENTS))], ids=str)
def test_killed_training_resumes_to_the_bit_and_elsewhere_as_one_world_does(
    moment: Moment,
    undisturbed: pathlib.Path,
    tmp_path: pathlib.Path,
    record: Callable[[str, object], None],
) -> None:
    run = tmp_path / "run"
    end(start(run, "data=2"), moment)
    before = newest_checkpoint(run)
    elsewhere, alone = copied(run, "elsewhere"), copied(run, "alone")
    finish(start(run, "data=2"))
    assert_equal_bits(run, undisturbed)

    place = [*ELSEWHERE][moment.seed % len(ELSEWHERE)]
    mesh, (islands, devices) = ELSEWHERE[place]
    finish(start(elsewhere, mesh, islands=islands, devices=devices))
    one_world(alone, mesh, islands * devices)
    apart = max(differences(measures(elsewhere), measures(alone)))
    record("resumed from step", before)
    record("elsewhere", f"{mesh}, {islands} islands of {devices}")
    for name in ("loss", "gradient_norm"):
        far = max(differences(measures(elsewhere, name), measures(undisturbed, name)))
        record(f"{name}, to an undisturbed run", far)
    record("to one world resumed there", apart)
    assert measures(elsewhere)[:before] == measures(undisturbed)[:before]
    assert_equal_bits(elsewhere, alone)


@pytest.mark.slow
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
