"""What does an uneven pipeline cost where one island is slower?

    python -m benchmarks.stages [--splits 2,2 1,3 3,1] [--slow XLA_FLAGS] [--json FILE]

Two islands of one CPU device are the two stages of a pipeline; the first compiles with flags that
make it slower. Each split is trained on for a few steps by `models.pretrain`, in turns. The time is
the median of the steps after the first ones, which compile. Compare times of one run only.
"""

import argparse
import dataclasses
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.tables import markdown, write_json
from models.records import METRICS, read_rows

# Narrow vectors, no optimization: slower, with the same program.
SLOW = "--xla_cpu_max_isa=SSE4_2 --xla_backend_optimization_level=0"
WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Row:
    """A split of the layers, and the median seconds of a step."""

    stages: str
    step_s: float


def seconds(stages: str, slow: str, steps: int, rows: int) -> list[float]:
    """Trains on one split; the times of the steps after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        launch = ["jaxhet.cli", "launch", "--devices=1", f"--island-env=island0:XLA_FLAGS={slow}"]
        train = ["--mesh=stage=2", f"--stages={stages}", "--remat=full", "--log-every=1"]
        sizes = [f"--steps={WARM_UP + steps}", f"--batch={rows}", f"--run-dir={folder}"]
        python = [sys.executable, "-m"]
        command = [*python, *launch, "--", *python, "models.pretrain", *train, *sizes]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"python -m benchmarks.stages: {stages} failed:\n{ended.stderr}")
        return [row["seconds"] for row in read_rows(pathlib.Path(folder, METRICS))[WARM_UP:]]


def table(rows: Sequence[Row]) -> str:
    """The rows with their ratio to the first one."""
    cells = [(r.stages, f"{r.step_s * 1e3:.0f}", f"{r.step_s / rows[0].step_s:.2f}") for r in rows]
    return markdown(("layers of each stage", "step, ms", f"÷ {rows[0].stages}"), cells)


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
    times: dict[str, list[float]] = {split: [] for split in options.splits}
    for _ in range(options.repeats):
        for split in options.splits:
            times[split] += seconds(split, options.slow, options.steps, options.rows)
    rows = [Row(split, statistics.median(measured)) for split, measured in times.items()]
    print(f"first island with {options.slow!r}\n{table(rows)}")
    write_json(options.json, {"slow": options.slow}, rows)


if __name__ == "__main__":
    main()
