"""Rate of unequal islands together, compared with the sum of their rates alone.

    python -m benchmarks.efficiency [--share stages] [--burners 0,1] [--json FILE]
    python -m benchmarks.efficiency --burners 0,0,0 --cores 0,1,1 --speeds 1,0.6,0.3
    python -m benchmarks.efficiency --cores 0-7,8-11
    python -m benchmarks.efficiency --platform cuda --config 1b [--burners 0,1]

Each island is one CPU device on a core. A burner is a process that computes on an island's core all
the time, so that the kernel gives the island 1 / (1 + burners) of the core. With `--cores 0-7,8-11`
an island has several cores, and unequal numbers of them take the place of burners. With `--speeds`
an island runs for a fixed part of every 20 ms, and is stopped for the rest. Several islands can
then share a core, and none becomes faster when another one waits. The same model is
trained by each island alone, all of them at the same time, then together with equal shares, and
with measured ones: of a batch (`--balance even` and `auto`), or of the layers (`--stages`). Every
rate is the median over windows of steps after the first one, which compiles, in several turns.

With `--platform cuda` each island is a GPU, and a burner multiplies matrices on it all the time:
the driver gives each process on a GPU its time in turns.

The ideal is the sum of the rates of the islands alone; efficiency is a rate divided by it. All
cases compute microbatches of one size. Compare rates of one run only.

A pipeline of S stages needs 2 (S - 1) more turns than it has microbatches M: the table says which
part M / (M + 2 (S - 1)) of the ideal it could reach.
"""

import argparse
import contextlib
import dataclasses
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.tables import made_at, markdown, write_json
from models.extras.records import METRICS, read_rows

WINDOW, WINDOWS = 2, 4  # steps of a window, and windows, the first of which is not counted
MICROBATCHES = 48  # mean number in a step
ROWS, POSITIONS = 2, {"cpu": 128, "cuda": 512}  # size of a microbatch
EVEN, AUTO = "even", "auto"
ALONE, BATCH, STAGES = "alone", "batch", "stages"
_ON_CORE, _PART = "EFFICIENCY_CORE", "EFFICIENCY_PART"
_PERIOD = 0.02  # seconds
_PIN = f"""
import os, signal, sys, time
if os.environ["JAX_PLATFORMS"] == "cpu":
    first, _, last = os.environ["{_ON_CORE}"].partition("-")
    os.sched_setaffinity(0, range(int(first), int(last or first) + 1))
begin, end = (float(x) * {_PERIOD} for x in os.environ.get("{_PART}", "0,1").split(","))
island = os.getpid()
if end - begin < {_PERIOD} and os.fork() == 0:  # a process that stops and continues this one
    os.closerange(0, 3)
    try:
        os.nice(-20)  # or it waits for the core that it is to free
    except PermissionError:
        pass
    def sleep_until(moment):
        time.sleep((moment - time.monotonic()) % {_PERIOD})
    while os.getppid() == island:
        sleep_until(begin)
        os.kill(island, signal.SIGCONT)
        sleep_until(end)
        os.kill(island, signal.SIGSTOP)
    os._exit(0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
# Runs Python's arguments on the cores and in the part of their time that the environment names.
PINNED = (sys.executable, "-c", _PIN)
_BURN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
while os.getppid() == parent:
    sum(range(100_000))
"""
_BURN_GPU = """
import os
import jax, jax.numpy as jnp
parent, x = os.getppid(), jnp.ones((4096, 4096), jnp.bfloat16)
step = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, x: x @ x * 1e-4, x))
while os.getppid() == parent:
    step(x).block_until_ready()
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """A case, tokens per second in it, that divided by the ideal, and shares of the islands."""

    case: str
    tokens_per_second: float
    efficiency: float
    shares: str


@contextlib.contextmanager
def burning(burners: Sequence[int], cores: Sequence[str], platform: str = "cpu") -> Iterator[None]:
    """Runs this number of burners on each core or GPU."""
    # Everything is in one session: Linux first divides a core's time between sessions.
    code = _BURN_GPU if platform == "cuda" else _BURN
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, core],
            env={**environment(platform, [core]), "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"},
        )
        for number, core in zip(burners, cores, strict=True)
        for _ in range(number)
    ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@dataclasses.dataclass(frozen=True)
class Islands:
    """Cores or GPU of each island, burners on it, and the part of its time (two ends: 0 to 1).

    `share` says what the islands share, `BATCH` or `STAGES`; `config` is the size of the model, and
    `microbatches` their mean number in a step. Cores are a number, or a range such as `8-11`.
    """

    share: str
    platform: str
    config: str
    microbatches: int
    cores: Sequence[str]
    burners: Sequence[int]
    parts: Sequence[str]


def numbers_of_cores(cores: Sequence[str]) -> list[int]:
    """The number of cores of each island.

    Raises:
      ValueError: A range has another form, or islands have some cores, but not all, in common.
    """
    ranges = []
    for text in cores:
        first, _, last = text.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"--cores {text!r} is not a core, or a range such as 8-11")
        ranges.append(range(int(first), int(last or first) + 1))
    for one, other in itertools.combinations(ranges, 2):
        if not one or (one != other and {*one} & {*other}):
            raise ValueError(
                f"--cores {','.join(cores)}: give islands equal cores, or none in common"
            )
    return [*map(len, ranges)]


def parts_of_cores(cores: Sequence[str], speeds: Sequence[float]) -> list[str]:
    """For each island, the part of its core's time in which it runs.

    Parts on one core follow each other.

    Raises:
      ValueError: The islands of a core have more than all of its time.
    """
    parts, used = [], dict.fromkeys(cores, 0.0)
    for core, speed in zip(cores, speeds, strict=True):
        begin = used[core]
        used[core] += speed
        if used[core] > 1 + 1e-9 or speed <= 0:
            raise ValueError(
                f"--speeds {','.join(map(str, speeds))} on the cores {','.join(cores)}: "
                f"give the islands of core {core} parts above 0, with a sum of at most 1"
            )
        parts.append(f"{begin:g},{used[core]:g}")
    return parts


def environment(platform: str, cores: Sequence[str]) -> dict[str, str]:
    """The environment of a process on these cores or GPUs."""
    env = {**os.environ, "JAX_PLATFORMS": platform}
    if platform == "cuda":
        names = ",".join(cores)
        env |= {"CUDA_VISIBLE_DEVICES": names, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8"}
    return env


def on_cores(cores: Sequence[str], command: Sequence[str], parts: Sequence[str] = ()) -> list[str]:
    """The command that runs a command of `PINNED` on islands, each on cores of its own."""
    variables = [(_ON_CORE, core) for core in cores], [(_PART, part) for part in parts]
    where = [
        f"--island-env=island{i}:{name}={value}"
        for pairs in variables
        for i, (name, value) in enumerate(pairs)
    ]
    launch = ["jaxhet.cli", "launch", f"--islands={len(cores)}", "--devices=1", *where, "--"]
    return [sys.executable, "-m", *launch, *command]


def training(folder: pathlib.Path, islands: Islands, case: str, windows: int) -> list[str]:
    """The command of a process that trains on all islands, or on one (case `ALONE`)."""
    num = len(islands.cores)
    if case == ALONE:
        how = ["--mesh=data=1", f"--accumulate={islands.microbatches}", f"--balance={EVEN}"]
    elif islands.share == BATCH:
        how = [f"--mesh=data={num}", f"--accumulate={islands.microbatches}", f"--balance={case}"]
    else:
        how = [f"--mesh=stage={num}", f"--microbatches={islands.microbatches}"]
        how += [f"--stages={AUTO}"] if case == AUTO else []
    shares = num if case != ALONE and islands.share == BATCH else 1
    return [
        *PINNED,
        *("-m", "models.pretrain", f"--config={islands.config}", *how),
        *(
            f"--batch={islands.microbatches * shares * ROWS}",
            f"--seq={POSITIONS[islands.platform]}",
        ),
        *(f"--log-every={WINDOW}", f"--steps={WINDOW * windows}", f"--run-dir={folder}"),
    ]


def run_alone(folder: pathlib.Path, islands: Islands) -> None:
    """Trains on each island alone, in a folder for each, until the slowest has enough windows."""
    # A job's process on one core has two threads, too.
    few = {"PJRT_NPROC": "2"}
    processes = [
        subprocess.Popen(
            training(folder / str(i), islands, ALONE, 100 * WINDOWS),
            env={
                **environment(islands.platform, [core]),
                **(few if islands.platform == "cpu" and "-" not in core else {}),
                _ON_CORE: core,
                _PART: part,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for i, (core, part) in enumerate(zip(islands.cores, islands.parts, strict=True))
    ]
    try:  # so that none has more of a core when others are done
        while any(len(rates(folder / str(i))) < WINDOWS - 1 for i in range(len(processes))):
            time.sleep(0.1)
            for i, process in enumerate(processes):
                _check(process.poll() or 0, f"island {i} alone", "")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_together(folder: pathlib.Path, islands: Islands, case: str) -> None:
    """Trains on all islands."""
    command = training(folder, islands, case, WINDOWS)
    ended = subprocess.run(
        on_cores(islands.cores, command, islands.parts),
        env=environment(islands.platform, islands.cores),
        capture_output=True,
        text=True,
        check=False,
    )
    _check(ended.returncode, case, ended.stderr)


def _check(code: int, case: str, said: str) -> None:
    if code:
        raise SystemExit(f"python -m benchmarks.efficiency: {case} failed:\n{said}")


def rates(folder: pathlib.Path) -> list[float]:
    """Tokens per second of each window but the first."""
    path = folder / METRICS
    rows = read_rows(path) if path.exists() else []
    return [r["tokens_per_second"] for r in rows[WINDOW::WINDOW]]


def shares(folder: pathlib.Path) -> str:
    """The shares of a run that it ended with: microbatches or layers."""
    noted = [row.get("balance", row.get("stages")) for row in read_rows(folder / METRICS)]
    found = [note.get("counts") or note["layers"] for note in noted if note]
    return ",".join(map(str, found[-1]))


def measure(islands: Islands, turns: int) -> list[Row]:
    """All cases, in turns."""
    alone = [f"island {i} alone" for i in range(len(islands.cores))]
    found: dict[str, list[float]] = {case: [] for case in (*alone, EVEN, AUTO)}
    chosen = ""
    with burning(islands.burners, islands.cores, islands.platform):
        for _ in range(turns):
            with tempfile.TemporaryDirectory() as name:
                folder = pathlib.Path(name)
                run_alone(folder, islands)
                for i, case in enumerate(alone):
                    found[case] += rates(folder / str(i))
                for case in (EVEN, AUTO):
                    run_together(folder / case, islands, case)
                    found[case] += rates(folder / case)
                chosen = shares(folder / AUTO)
    medians = {case: statistics.median(values) for case, values in found.items()}
    return table_rows(medians, alone, chosen)


def table_rows(medians: dict[str, float], alone: Sequence[str], chosen: str) -> list[Row]:
    """Rows with the ideal, which is the sum of the islands alone."""
    ideal = sum(medians[case] for case in alone)
    rates_and_shares = {
        **{case: (medians[case], "") for case in alone},
        "sum of the islands alone": (ideal, ""),
        "together, equal shares": (medians[EVEN], ""),
        "together, measured shares": (medians[AUTO], chosen),
    }
    return [Row(case, rate, rate / ideal, how) for case, (rate, how) in rates_and_shares.items()]


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    cells: Any = [
        (r.case, f"{r.tokens_per_second:,.0f}", f"{r.efficiency:.3f}", r.shares) for r in rows
    ]
    return markdown(("case", "tokens/s", "÷ sum", "shares"), cells)


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Bars of the rates, divided by the ideal."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as text: a small file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 2.2), layout="constrained")
    shown = rows[::-1]
    bars = axes.barh([row.case for row in shown], [row.efficiency for row in shown])
    axes.bar_label(bars, [f"{row.efficiency:.2f}" for row in shown], padding=2)
    axes.set_xlim(0, 1.15)
    axes.set_xlabel("tokens/s, divided by the sum of the islands alone")
    figure.savefig(path)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.efficiency",
        description="Train on islands of unequal speed, alone and together.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--share",
        choices=(BATCH, STAGES),
        default=BATCH,
        help="shared between islands: a batch or the layers",
    )
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--burners",
        help="burners on the core of each island; default: 0,1, or none for ranges of cores",
    )
    parser.add_argument(
        "--cores", help="core, range of cores, or GPU of each island; default: one of its own"
    )
    parser.add_argument("--speeds", help="with cpu: part of its core's time for each island")
    parser.add_argument("--config", default="demo", help="size of the model")
    parser.add_argument(
        "--microbatches", type=int, default=MICROBATCHES, help="mean number in a step"
    )
    parser.add_argument("--turns", type=int, default=2, help="runs of each case, in turns")
    parser.add_argument("--json", type=pathlib.Path, help="file for the table's rows")
    parser.add_argument("--plot", type=pathlib.Path, help="file for a plot of the rows (.svg)")
    options = parser.parse_args()
    cores = options.cores.split(",") if options.cores else []
    is_range = any("-" in core for core in cores)
    text = options.burners or (",".join("0" * len(cores)) if is_range else "0,1")
    burners = [int(number) for number in text.split(",")]
    found = sorted(os.sched_getaffinity(0)) if options.platform == "cpu" else range(len(burners))
    cores = cores or [str(core) for core in found][: len(burners)]
    speeds = [float(x) for x in (options.speeds or ",".join("1" * len(burners))).split(",")]
    if not len(cores) == len(burners) == len(speeds):
        parser.error(
            f"--burners has {len(burners)} islands, there are {len(cores)} cores for them, and "
            f"--speeds has {len(speeds)} numbers: give one of each for every island"
        )
    try:
        numbers = numbers_of_cores(cores)
        if is_range and any(burners):
            raise ValueError(
                f"--burners {text} with ranges of cores: give unequal numbers of cores"
            )
        parts = parts_of_cores(cores, speeds)
    except ValueError as error:
        parser.error(str(error))
    size = options.config, options.microbatches
    islands = Islands(options.share, options.platform, *size, cores, burners, parts)
    rows = measure(islands, options.turns)
    slowed = f"cores {','.join(map(str, numbers))}" if is_range else f"burners {text}"
    print(f"{options.config}, {slowed}\n{table(rows)}\n{made_at()}")
    if options.share == STAGES:
        possible = options.microbatches / (options.microbatches + 2 * (len(cores) - 1))
        print(f"with the bubble of the pipeline at most {possible:.3f} of the sum")
    write_json(options.json, dataclasses.asdict(islands), rows)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
