"""What does an uneven pipeline cost where one island is slower?

    python -m benchmarks.stages [--splits 2,2 1,3 3,1] [--slow XLA_FLAGS] [--json FILE]

Two islands of one CPU device are the two stages of a pipeline; the first compiles with flags that
make it slower. Each split is trained on for a few steps by `models.pretrain`, in turns. The time is
the median of the steps after the first ones, which compile. Compare times of one run only.

A stage skips the rows of its parameters that hold no layer. An uneven split is also timed with a
control that computes these rows and drops the results.
"""

import argparse
import dataclasses
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.tables import made_at, markdown, write_json
from models.extras.records import METRICS, read_rows

# Narrow vectors, no optimization: slower, with the same program.
SLOW = "--xla_cpu_max_isa=SSE4_2 --xla_backend_optimization_level=0"
WARM_UP = 2
SKIP, COMPUTE = "skipped", "computed"
PROGRAMS = {
    SKIP: "from models.pretrain import main; main()",
    COMPUTE: "import jax.numpy, models.llama, models.pretrain as p; models.llama.run_if = "
    "lambda used, run, x: jax.numpy.where(used, run(x), x); p.main()",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A split of the layers, what happens to rows without a layer, and the median time of a step.

    `empty` is a key of `PROGRAMS`.
    """

    stages: str
    empty: str
    step_s: float


def seconds(case: tuple[str, str], slow: str, steps: int, rows: int) -> list[float]:
    """Trains on one split, with one of `PROGRAMS`; the times of the steps after the warm-up."""
    stages, empty = case
    with tempfile.TemporaryDirectory() as folder:
        launch = ["jaxhet.cli", "launch", "--devices=1", f"--island-env=island0:XLA_FLAGS={slow}"]
        train = ["--mesh=stage=2", f"--stages={stages}", "--remat=full", "--log-every=1"]
        sizes = [f"--steps={WARM_UP + steps}", f"--batch={rows}", f"--run-dir={folder}"]
        program = [sys.executable, "-c", PROGRAMS[empty], *train, *sizes]
        command = [sys.executable, "-m", *launch, "--", *program]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"python -m benchmarks.stages: {stages} failed:\n{ended.stderr}")
        return [row["seconds"] for row in read_rows(pathlib.Path(folder, METRICS))[WARM_UP:]]


def table(rows: Sequence[Row]) -> str:
    """The rows with their ratio to the first one."""
    first = rows[0]
    cells = [
        (r.stages, r.empty, f"{r.step_s * 1e3:.0f}", f"{r.step_s / first.step_s:.2f}") for r in rows
    ]
    headings = ("layers of each stage", "rows without a layer", "step, ms", f"÷ {first.stages}")
    return markdown(headings, cells)


def cases(splits: Sequence[str]) -> list[tuple[str, str]]:
    """Each split with skipped rows; an uneven one also with computed rows."""
    return [
        (split, empty)
        for split in splits
        for empty in PROGRAMS
        if empty == SKIP or len(set(split.split(","))) > 1
    ]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stages",
        description="Train on pipelines with other splits of the layers, one island being slower.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--splits", nargs="+", default=("2,2", "1,3", "3,1"), help="splits of 4 layers"
    )
    parser.add_argument("--slow", default=SLOW, help="XLA_FLAGS of the first island")
    parser.add_argument("--steps", type=int, default=8, help="steps that are measured, each time")
    parser.add_argument("--rows", type=int, default=16, help="rows in a batch")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each split, in turns")
    parser.add_argument("--json", type=pathlib.Path, help="file for the table's rows")
    options = parser.parse_args()
    times: dict[tuple[str, str], list[float]] = {case: [] for case in cases(options.splits)}
    for _ in range(options.repeats):
        for case, measured in times.items():
            measured.extend(seconds(case, options.slow, options.steps, options.rows))
    rows = [Row(*case, statistics.median(measured)) for case, measured in times.items()]
    print(f"first island with {options.slow!r}\n{table(rows)}\n{made_at()}")
    write_json(options.json, {"slow": options.slow}, rows)


if __name__ == "__main__":
    main()
