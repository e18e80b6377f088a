"""How much of what unequal islands do alone do they reach together?

    python -m benchmarks.efficiency [--burners 0,1] [--json FILE]

Each island is one CPU device on a core of its own. A burner is a process that computes on an
island's core all the time, so that the kernel gives the island 1 / (1 + burners) of the core. The
same model is trained by each island alone, all of them at the same time, then together with equal
shares of a batch (`--balance even`), and with measured shares (`--balance auto`). Every rate is the
median over windows of steps after the first one, which compiles, in several turns.

The ideal is the sum of the rates of the islands alone; efficiency is a rate divided by it. All
cases compute microbatches of one size by the same program. Compare rates of one run only.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.tables import made_at, markdown, write_json
from models.extras.records import METRICS, read_rows

WINDOW, WINDOWS = 3, 4  # steps of a window, and windows, the first of which is not counted
ROWS, POSITIONS, MICROBATCHES = 2, 128, 24  # size of a microbatch; mean number in a step
EVEN, AUTO = "even", "auto"
_ON_CORE = "EFFICIENCY_CORE"
_PIN = f"""
import os, sys
os.sched_setaffinity(0, {{int(os.environ["{_ON_CORE}"])}})
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
# Runs Python's arguments on the core that the environment names.
PINNED = (sys.executable, "-c", _PIN)
_BURN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
while os.getppid() == parent:
    sum(range(100_000))
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """A case, tokens per second in it, that divided by the ideal, and shares of the islands."""

    case: str
    tokens_per_second: float
    efficiency: float
    shares: str


@contextlib.contextmanager
def burning(burners: Sequence[int], cores: Sequence[int]) -> Iterator[None]:
    """Runs so many burners on each core."""
    # Everything is in one session: Linux first divides a core's time between sessions.
    started = [
        subprocess.Popen([sys.executable, "-c", _BURN, str(core)])
        for number, core in zip(burners, cores, strict=True)
        for _ in range(number)
    ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def on_cores(cores: Sequence[int], command: Sequence[str]) -> list[str]:
    """The command that runs a command of `PINNED` on islands, one for each core."""
    where = [f"--island-env=island{i}:{_ON_CORE}={core}" for i, core in enumerate(cores)]
    launch = ["jaxhet.cli", "launch", f"--islands={len(cores)}", "--devices=1", *where, "--"]
    return [sys.executable, "-m", *launch, *command]


def training(folder: pathlib.Path, islands: int, config: str, balance: str) -> list[str]:
    """The command of a process that trains on so many islands."""
    batch = MICROBATCHES * islands * ROWS
    return [
        *PINNED,
        *("-m", "models.pretrain", f"--config={config}"),
        *(f"--mesh=data={islands}", f"--batch={batch}", f"--seq={POSITIONS}"),
        *(f"--accumulate={MICROBATCHES}", f"--balance={balance}", f"--log-every={WINDOW}"),
        *(f"--steps={WINDOW * WINDOWS}", f"--run-dir={folder}"),
    ]


def run_alone(folder: pathlib.Path, config: str, cores: Sequence[int]) -> None:
    """Trains on each island alone, at the same time, in a folder for each."""
    # A job's processes have two threads, too.
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAXHET_")}
    env |= {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": "2"}
    processes = [
        subprocess.Popen(
            training(folder / str(i), 1, config, EVEN),
            env={**env, _ON_CORE: str(core)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, core in enumerate(cores)
    ]
    for i, process in enumerate(processes):
        _, said = process.communicate()
        _check(process.returncode, f"island {i} alone", said)


def run_together(folder: pathlib.Path, config: str, cores: Sequence[int], balance: str) -> None:
    """Trains on all islands."""
    command = on_cores(cores, training(folder, len(cores), config, balance))
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    _check(ended.returncode, balance, ended.stderr)


def _check(code: int, case: str, said: str) -> None:
    if code:
        raise SystemExit(f"python -m benchmarks.efficiency: {case} failed:\n{said}")


def rates(folder: pathlib.Path) -> list[float]:
    """Tokens per second of each window but the first."""
    return [r["tokens_per_second"] for r in read_rows(folder / METRICS)[WINDOW::WINDOW]]


def shares(folder: pathlib.Path) -> str:
    """The shares of a run that it ended with."""
    noted = [row["balance"] for row in read_rows(folder / METRICS) if "balance" in row]
    return ",".join(map(str, noted[-1]["counts"]))


def measure(config: str, burners: Sequence[int], cores: Sequence[int], turns: int) -> list[Row]:
    """All cases, in turns."""
    alone = [f"island {i} alone" for i in range(len(cores))]
    found: dict[str, list[float]] = {case: [] for case in (*alone, EVEN, AUTO)}
    chosen = ""
    with burning(burners, cores):
        for _ in range(turns):
            with tempfile.TemporaryDirectory() as name:
                folder = pathlib.Path(name)
                run_alone(folder, config, cores)
                for i, case in enumerate(alone):
                    found[case] += rates(folder / str(i))
                for case in (EVEN, AUTO):
                    run_together(folder / case, config, cores, case)
                    found[case] += rates(folder / case)
                chosen = shares(folder / AUTO)
    medians = {case: statistics.median(values) for case, values in found.items()}
    return table_rows(medians, alone, chosen)


def table_rows(medians: dict[str, float], alone: Sequence[str], chosen: str) -> list[Row]:
    """Rows with the ideal, which is the sum of the islands alone."""
    ideal = sum(medians[case] for case in alone)
    equal = ",".join([str(MICROBATCHES)] * len(alone))
    rates_and_shares = {
        **{case: (medians[case], "") for case in alone},
        "sum of the islands alone": (ideal, ""),
        "together, equal shares": (medians[EVEN], equal),
        "together, measured shares": (medians[AUTO], chosen),
    }
    return [Row(case, rate, rate / ideal, how) for case, (rate, how) in rates_and_shares.items()]


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    cells: Any = [
        (r.case, f"{r.tokens_per_second:,.0f}", f"{r.efficiency:.3f}", r.shares) for r in rows
    ]
    return markdown(("case", "tokens/s", "÷ sum", "microbatches"), cells)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.efficiency",
        description="Train on islands of unequal speed, alone and together.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--burners", default="0,1", help="burners on the core of each island")
    parser.add_argument("--config", default="demo", help="size of the model")
    parser.add_argument("--turns", type=int, default=2, help="runs of each case, in turns")
    parser.add_argument("--json", type=pathlib.Path, help="file for the table's rows")
    options = parser.parse_args()
    burners = [int(number) for number in options.burners.split(",")]
    cores = sorted(os.sched_getaffinity(0))[: len(burners)]
    if len(cores) < len(burners):
        parser.error(f"--burners has {len(burners)} islands, and there are {len(cores)} cores")
    rows = measure(options.config, burners, cores, options.turns)
    print(f"{options.config}, burners {options.burners}\n{table(rows)}\n{made_at()}")
    write_json(options.json, {"config": options.config, "burners": burners}, rows)


if __name__ == "__main__":
    main()
