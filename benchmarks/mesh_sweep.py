"""What does a mesh cost? One model on several meshes, each on a job of islands on CPU.

    python -m benchmarks.mesh_sweep [--config demo] [--meshes data=4 fsdp=4 …]
                                    [--json FILE] [--plot FILE]

Each mesh is trained on for a few steps by `models.pretrain` under `jaxhet launch`. Bytes across are
those that process 0 sends to other processes in a step, by the engine's counters; times are the
median of the steps after the first ones, which compile. Compare times of one run only.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from models.configs import CONFIGS, DTYPES
from models.records import METRICS, read_rows

MESHES = ("data=4", "data=2,model=2", "model=4", "fsdp=4", "data=2,fsdp=2", "stage=2,data=2")
# Steps that compile, or run for the first time.
WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What to run: a job of so many islands, of one process each, for each mesh."""

    config: str
    meshes: Sequence[str]
    dtype: str
    islands: int
    devices: int
    steps: int
    batch: int
    seq: int
    run_dir: pathlib.Path

    def command(self, mesh: str) -> list[str]:
        """The command that trains on `mesh`."""
        launch = [sys.executable, "-m", "jaxhet.cli", "launch", "--islands", str(self.islands)]
        launch += ["--processes-per-island", "1", "--devices", str(self.devices), "--"]
        options = {
            "config": self.config,
            "dtype": self.dtype,
            "mesh": mesh,
            "steps": WARM_UP + self.steps,
            "batch": self.batch,
            "seq": self.seq,
            "log-every": 1,
            "run-dir": self.run_dir / mesh,
        }
        words = [f"--{key}={value}" for key, value in options.items()]
        return [*launch, sys.executable, "-m", "models.pretrain", *words]


@dataclasses.dataclass(frozen=True)
class Row:
    """What a step on one mesh costs, for one process."""

    mesh: str
    bytes_across: float
    exchanges: float
    step_s_p50: float
    tokens_per_s: float
    loss: float


def measure(sweep: Sweep, mesh: str) -> Row | str:
    """Trains on one mesh; what failed, in words, if it can't be trained on."""
    folder = sweep.run_dir / mesh
    shutil.rmtree(folder, ignore_errors=True)
    result = subprocess.run(
        sweep.command(mesh), env=_environment(), capture_output=True, text=True, check=False
    )
    if result.returncode:
        return _last_words(result.stderr) or f"exit code {result.returncode}"
    return summary(mesh, read_rows(folder / METRICS), sweep.batch * sweep.seq)


def summary(mesh: str, rows: Sequence[Mapping[str, Any]], tokens: int) -> Row:
    """The medians of the steps after the warm-up, from the metrics of a run."""
    rows = rows[WARM_UP:]
    seconds = _median([row["seconds"] for row in rows])
    return Row(
        mesh=mesh,
        bytes_across=_median(
            [sum(row.get(f"bytes_sent_{name}", 0) for name in ("shm", "tcp")) for row in rows]
        ),
        exchanges=_median([row.get("exchanges_completed", 0) for row in rows]),
        step_s_p50=seconds,
        tokens_per_s=tokens / seconds,
        loss=rows[-1]["loss"],
    )


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def _environment() -> dict[str, str]:
    """The environment of a run: the CPU, and no job but the one that the launcher makes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAXHET_")}
    return {**kept, "JAX_PLATFORMS": "cpu"}


def _last_words(text: str) -> str:
    """The line in which a run says why it ended, if there is one, without who said it."""
    said = [line for line in text.splitlines() if "models.pretrain: " in line]
    return said[0].partition("models.pretrain: ")[2] if said else ""


def show(sweep: Sweep, results: Mapping[str, Row | str], console: Console) -> None:
    """Prints a line for each mesh."""
    title = f"{sweep.config}, {sweep.dtype}, {sweep.islands} islands x {sweep.devices} devices"
    table = Table(title=f"{title}, batch {sweep.batch} x {sweep.seq}")
    table.add_column("mesh")
    for heading in ("MB across", "exchanges", "step, ms (p50)", "tokens/s", "loss"):
        table.add_column(heading, justify="right")
    for mesh, row in results.items():
        if isinstance(row, str):
            table.add_row(mesh, "failed")
            continue
        table.add_row(
            mesh,
            f"{row.bytes_across / 1e6:.2f}",
            f"{row.exchanges:g}",
            f"{row.step_s_p50 * 1e3:.1f}",
            f"{row.tokens_per_s:.0f}",
            f"{row.loss:.4f}",
        )
    console.print(table)
    for mesh, row in results.items():
        if isinstance(row, str):
            console.print(f"{mesh} failed: {row}", style="bold red")


def plot(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Draws bytes across, exchanges and time of a step for each mesh, as a PNG."""
    figure = Figure(figsize=(11, 1.2 + 0.4 * len(rows)), layout="constrained")
    panels = {
        "MB across islands": [row.bytes_across / 1e6 for row in rows],
        "exchanges": [row.exchanges for row in rows],
        "step, ms (p50)": [row.step_s_p50 * 1e3 for row in rows],
    }
    names = [row.mesh for row in rows]
    columns = figure.subplots(1, len(panels), sharey=True)
    for axes, (label, values) in zip(columns, panels.items(), strict=True):
        axes.bar_label(axes.barh(names, values), fmt="%.3g", padding=2)
        axes.set(xlabel=label)
        axes.margins(x=0.2)
    columns[0].invert_yaxis()
    figure.savefig(path, dpi=150, format="png")


def run(sweep: Sweep, json_path: pathlib.Path | None, plot_path: pathlib.Path | None) -> int:
    """Measures all meshes, prints and writes the results; the exit code is 1 if one failed."""
    results = {
        mesh: measure(sweep, mesh)
        for mesh in track(sweep.meshes, "meshes", console=Console(stderr=True))
    }
    show(sweep, results, Console(width=120))
    rows = [row for row in results.values() if isinstance(row, Row)]
    if json_path:
        json_path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    if plot_path and rows:
        plot(plot_path, rows)
    return 0 if len(rows) == len(results) else 1


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mesh_sweep",
        description="Train one model on several meshes over islands, and compare what they cost.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--config", choices=CONFIGS, default="demo", help="size of the model")
    parser.add_argument("--meshes", nargs="+", default=MESHES, help="axes, outer one first")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type to compute in")
    parser.add_argument("--islands", type=int, default=2, help="islands, of one process each")
    parser.add_argument("--devices", type=int, default=2, help="CPU devices of each island")
    parser.add_argument("--steps", type=int, default=10, help="steps that are measured")
    parser.add_argument("--batch", type=int, default=16, help="rows in a batch")
    parser.add_argument("--seq", type=int, default=128, help="positions in a row")
    parser.add_argument(
        "--run-dir", type=pathlib.Path, default=pathlib.Path("runs/mesh_sweep"), help="of the runs"
    )
    parser.add_argument("--json", type=pathlib.Path, help="file for the table's rows")
    parser.add_argument("--plot", type=pathlib.Path, help="file for a plot, PNG")
    options = vars(parser.parse_args())
    json_path, plot_path = options.pop("json"), options.pop("plot")
    return run(Sweep(**options), json_path, plot_path)


if __name__ == "__main__":
    sys.exit(main())
