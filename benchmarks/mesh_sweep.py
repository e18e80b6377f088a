"""What does a mesh cost? One model on several meshes, each on a job of islands on CPU, or planned.

    python -m benchmarks.mesh_sweep [--config demo] [--meshes data=4 fsdp=4 …]
                                    [--plan [cpu|cuda|rocm]] [--json FILE] [--plot FILE]

Each mesh is trained on for a few steps by `models.pretrain` under `jaxhet launch`. Bytes across and
exchanges are those of a rank in a step, by the engine's counters: of process 0, by its number of
devices. Times are the median of the steps after the first ones, which compile. Compare times of one
run only.

With `--plan` nothing is trained: `jaxhet plan` asks a vendor's compiler what each rank would
exchange in a step, and the table has the rank with most bytes. Times are calculated for the given
link speeds, with one exchange after the other. Exchanges beside matrix products may cost less.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.mesh_report import Measured, Planned, Row, plot, show
from models.configs import CONFIGS, DTYPES
from models.extras import planned
from models.extras.records import METRICS, read_rows

MESHES = ("data=4", "data=2,model=2", "fsdp=4", "data=2,fsdp=2", "stage=2,data=2")
VENDORS = ("cpu", "cuda", "rocm")
# Steps that compile, or run for the first time.
WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Settings of the runs: a job of so many islands, of one process each, for each mesh.

    `plan` is the vendor to plan for; None: run.
    """

    config: str
    meshes: Sequence[str]
    dtype: str
    islands: int
    devices: int
    steps: int
    batch: int
    seq: int
    run_dir: pathlib.Path
    plan: str | None = None
    link_gb_per_s: float = 50.0
    latency_us: float = 10.0

    @property
    def title(self) -> str:
        """The common settings of all rows."""
        size = f"{self.islands} islands x {self.devices} devices, batch {self.batch} x {self.seq}"
        title = f"{self.config}, {self.dtype}, {size}"
        if not self.plan:
            return title
        link = f"{self.link_gb_per_s:g} GB/s, {self.latency_us:g} us an exchange"
        return f"{title}\nplanned for {self.plan}; {link}"

    def command(self, mesh: str) -> list[str]:
        """The command that trains on `mesh`, or plans a step on it."""
        jaxhet = [sys.executable, "-m", "jaxhet.cli"]
        size = [f"--islands={self.islands}", f"--devices={self.devices}"]
        if self.plan:
            return [*jaxhet, "plan", f"--vendor={self.plan}", *size, "--json", planned.TARGET]
        launch = [*jaxhet, "launch", *size, "--processes-per-island=1", "--"]
        return [*launch, sys.executable, "-m", "models.pretrain", *self.training(mesh)]

    def training(self, mesh: str) -> list[str]:
        """The options of `models.pretrain`."""
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
        return [f"--{key}={value}" for key, value in options.items()]


def measure(sweep: Sweep, mesh: str) -> Row | str:
    """Trains on one mesh, or plans it; returns its row, or a text that says what failed."""
    folder = sweep.run_dir / mesh
    if not sweep.plan:
        shutil.rmtree(folder, ignore_errors=True)
    result = subprocess.run(
        sweep.command(mesh),
        env=_environment() | {planned.OPTIONS: shlex.join(sweep.training(mesh))},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        return _last_words(result.stderr) or f"exit code {result.returncode}"
    if sweep.plan:
        return of_plan(sweep, mesh, json.loads(result.stdout))
    return summary(sweep, mesh, read_rows(folder / METRICS))


def summary(sweep: Sweep, mesh: str, rows: Sequence[Mapping[str, Any]]) -> Measured:
    """The medians of the steps after the warm-up, from the metrics of a run."""
    rows = rows[WARM_UP:]
    seconds = _median([row["seconds"] for row in rows])
    sent = [
        sum(row.get(f"bytes_sent_{name}", 0) for name in ("process_vm", "socket")) for row in rows
    ]
    return Measured(
        mesh=mesh,
        bytes_across=_median(sent) / sweep.devices,
        exchanges=_median([row.get("exchanges_completed", 0) for row in rows]) / sweep.devices,
        seconds=seconds,
        tokens_per_s=sweep.batch * sweep.seq / seconds,
        loss=rows[-1]["loss"],
    )


def of_plan(sweep: Sweep, mesh: str, told: Mapping[str, Any]) -> Planned:
    """Row made from the output of `jaxhet plan --json`; exchanges follow each other on one link."""

    def seconds(exchange: Mapping[str, Any]) -> float:
        times = 1 if exchange["times"] is None else exchange["times"]
        of_bytes = exchange["num_bytes"] / (sweep.link_gb_per_s * 1e9)
        return times * (sweep.latency_us * 1e-6 + of_bytes)

    total = sum(map(seconds, told["exchanges"]))
    hidden = sum(seconds(exchange) for exchange in told["exchanges"] if exchange["products"])
    return Planned(
        mesh=mesh,
        bytes_across=told["bytes_per_step"],
        exchanges=told["exchanges_per_step"],
        seconds=total,
        overlapped=hidden / total if total else 0.0,
        is_exact=told["is_exact"],
    )


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def _environment() -> dict[str, str]:
    """The environment of a run: the CPU, and no job but the one that the launcher makes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAXHET_")}
    return {**kept, "JAX_PLATFORMS": "cpu"}


def _last_words(text: str) -> str:
    """The line in which a run says why it ended, if there is one, without who said it."""
    said = re.search(r"(?:models\.pretrain|jaxhet\.\w+Error): (.*)", text)
    return said[1] if said else ""


def run(sweep: Sweep, json_path: pathlib.Path | None, plot_path: pathlib.Path | None) -> int:
    """Measures all meshes, prints and writes the results; the exit code is 1 if one failed."""
    results = {
        mesh: measure(sweep, mesh)
        for mesh in track(sweep.meshes, "meshes", console=Console(stderr=True))
    }
    kind = Planned if sweep.plan else Measured
    show(sweep.title, kind, results, Console(width=120))
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
        description="Train or plan one model on several meshes over islands; compare their costs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--config", choices=CONFIGS, default="demo", help="size of the model")
    parser.add_argument("--meshes", nargs="+", default=MESHES, help="axes, outer one first")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type to compute in")
    parser.add_argument("--islands", type=int, default=2, help="islands, of one process each")
    parser.add_argument("--devices", type=int, default=2, help="devices of each island")
    parser.add_argument("--steps", type=int, default=10, help="steps that are measured")
    parser.add_argument("--batch", type=int, default=16, help="rows in a batch")
    parser.add_argument("--seq", type=int, default=128, help="positions in a row")
    parser.add_argument(
        "--run-dir",
        type=pathlib.Path,
        default=pathlib.Path("runs/mesh_sweep"),
        help="folder of the runs",
    )
    parser.add_argument(
        "--plan",
        nargs="?",
        const="cpu",
        choices=VENDORS,
        help="run nothing; whose compiler plans",
    )
    parser.add_argument(
        "--link-gb-per-s",
        type=float,
        default=Sweep.link_gb_per_s,
        help="with --plan: of a rank, across islands",
    )
    parser.add_argument(
        "--latency-us", type=float, default=Sweep.latency_us, help="with --plan: of an exchange"
    )
    parser.add_argument("--json", type=pathlib.Path, help="file for the table's rows")
    parser.add_argument("--plot", type=pathlib.Path, help="file for a plot, PNG")
    options = vars(parser.parse_args())
    json_path, plot_path = options.pop("json"), options.pop("plot")
    return run(Sweep(**options), json_path, plot_path)


if __name__ == "__main__":
    sys.exit(main())
