"""The main job, shown and checked: `python -m benchmarks.demo`, which `make demo` runs.

Trains one model three times on this machine's CPU with `models.pretrain`: over islands, through
`jaxhet launch`; in one ordinary JAX process with as many devices; and there again with devices and
rows in another order, which changes nothing but rounding: the noise floor. Then compares them.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from models.configs import CONFIGS, DTYPES
from models.extras.records import (
    METRICS,
    PLOT,
    Replicas,
    compare_replicas,
    differences,
    plot_losses,
    read_rows,
)

# Two float32 runs that differ in rounding only agree so well before training amplifies it.
FIRST_STEPS = 20
FIRST_STEPS_TOLERANCE = 1e-5
# Later losses may differ by this many times the measured effect of rounding alone.
NOISE_FLOORS = 2.0

Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Demo:
    """Settings of the runs. The mesh is `data` over islands by `model` over an island's devices."""

    islands: int
    devices: int
    config: str
    dtype: str
    steps: int
    batch: int
    seed: int
    log_every: int
    run_dir: Path

    @property
    def world(self) -> int:
        """Devices in all."""
        return self.islands * self.devices

    def training(self, name: str, *extra: str) -> list[str]:
        """The command that trains into the folder `name`."""
        options = {
            "config": self.config,
            "dtype": self.dtype,
            "steps": self.steps,
            "batch": self.batch,
            "seed": self.seed,
            "log-every": self.log_every,
            "mesh": f"data={self.islands},model={self.devices}",
            "run-dir": self.run_dir / name,
        }
        words = [f"--{key}={value}" for key, value in options.items()]
        return [sys.executable, "-m", "models.pretrain", *words, *extra]

    def runs(self) -> dict[str, list[str]]:
        """The command of each run, by the name of its folder."""
        launch = [sys.executable, "-m", "jaxhet.cli", "launch", "--islands", str(self.islands)]
        launch += ["--processes-per-island", "1", "--devices", str(self.devices), "--"]
        return {
            "islands": [*launch, *self.training("islands", "--digest")],
            "one_world": self.training("one_world"),
            "permuted": self.training("permuted", "--permute=1"),
        }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of the three runs; differences of loss are relative to the one world's."""

    differences: Sequence[float]
    floors: Sequence[float]
    replicas: Replicas
    exchanges_per_step: float
    bytes_per_step: float
    exchange_seconds_per_step: float

    @property
    def busbw_gb_s(self) -> float | None:
        """Bytes sent over the time from start to end of the exchanges, in 1e9 B/s.

        Each of n ranks that all-reduce S bytes sends 2(n-1)/n S: the bytes have the factor. None if
        the session does not count the time.
        """
        seconds = self.exchange_seconds_per_step
        return self.bytes_per_step / seconds / 1e9 if seconds else None


def compare(islands: Rows, one_world: Rows, permuted: Rows, replicas: Replicas) -> Comparison:
    """Compares the metrics of the three runs and the digests of the first."""
    last = islands[-1]
    return Comparison(
        differences=_relative_differences(islands, one_world),
        floors=_relative_differences(permuted, one_world),
        replicas=replicas,
        exchanges_per_step=last.get("exchanges_completed", 0),
        bytes_per_step=sum(last.get(f"bytes_sent_{name}", 0) for name in ("process_vm", "socket")),
        exchange_seconds_per_step=last.get("exchange_seconds", 0.0),
    )


def failures(demo: Demo, seen: Comparison) -> list[str]:
    """The checks that failed, in words; empty if all is well.

    Losses are checked in float32 only: with fewer bits, rounding moves them in the first steps too.
    """
    texts = []
    if not seen.replicas.complete(demo.world, demo.islands):
        texts.append(
            f"replicas can't be compared: digests name {seen.replicas.devices} of {demo.world} "
            f"devices, and some pieces have only {seen.replicas.fewest} of {demo.islands} copies"
        )
    texts += [f"parameters differ: {text}" for text in seen.replicas.differences[:3]]
    if demo.islands > 1 and not seen.exchanges_per_step:
        texts.append("no exchange between the islands was counted")
    if demo.dtype != "float32":
        return texts
    first, floor = max(seen.differences[:FIRST_STEPS]), max(seen.floors)
    if not first <= FIRST_STEPS_TOLERANCE:
        texts.append(
            f"losses differ by {first:.1e} in the first {FIRST_STEPS} steps; allowed is "
            f"{FIRST_STEPS_TOLERANCE:.0e}"
        )
    rest = max(seen.differences[FIRST_STEPS:], default=0.0)
    if not rest <= NOISE_FLOORS * floor:
        texts.append(
            f"losses differ by {rest:.1e} after step {FIRST_STEPS}; allowed is {NOISE_FLOORS:g} "
            f"times the noise floor of {floor:.1e}"
        )
    return texts


def summary(demo: Demo, seen: Comparison) -> dict[str, Any]:
    """The facts for `summary.json`; counters are those of process 0."""
    return {
        "steps": demo.steps,
        "islands": demo.islands,
        "devices_per_island": demo.devices,
        "dtype": demo.dtype,
        "max_relative_loss_difference_first_20": max(seen.differences[:FIRST_STEPS]),
        "max_relative_loss_difference": max(seen.differences),
        "noise_floor": max(seen.floors),
        "parameters_bit_equal": seen.replicas.equal,
        "replicas_compared": seen.replicas.compared,
        "exchanges_per_step": seen.exchanges_per_step,
        "bytes_per_step": seen.bytes_per_step,
        "busbw_gb_s": seen.busbw_gb_s,
        "failures": failures(demo, seen),
    }


def run(demo: Demo, console: Console) -> int:
    """Trains three times, prints and writes the comparison; returns the exit code."""
    commands = demo.runs()
    for number, (name, command) in enumerate(commands.items(), start=1):
        console.rule(f"{number}/{len(commands)}: {name.replace('_', ' ')}")
        shutil.rmtree(demo.run_dir / name, ignore_errors=True)
        code = subprocess.run(command, env=_environment(demo), check=False).returncode
        if code:
            console.print(f"The run {name} failed with exit code {code}.", style="bold red")
            return code if code > 0 else 1
    rows = {name: read_rows(demo.run_dir / name / METRICS) for name in commands}
    replicas = compare_replicas(demo.run_dir / "islands")
    seen = compare(**rows, replicas=replicas)
    facts = summary(demo, seen)
    (demo.run_dir / "summary.json").write_text(json.dumps(facts, indent=2) + "\n")
    plot = demo.run_dir / PLOT
    plot_losses(plot, {name.replace("_", " "): rows[name] for name in ("one_world", "islands")})
    _show(demo, rows, seen, console)
    console.print(f"Plot: {plot}    Summary: {demo.run_dir / 'summary.json'}")
    for text in facts["failures"]:
        console.print(f"Failed: {text}.", style="bold red")
    return 1 if facts["failures"] else 0


def _environment(demo: Demo) -> dict[str, str]:
    """The environment of a run: the CPU, and no job but the one that the launcher makes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAXHET_")}
    # With one thread for each device, runs ahead can deadlock; jaxhet.initialize does the same.
    threads = {"PJRT_NPROC": str(2 * demo.world)}
    return {**threads, **kept, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(demo.world)}


def _relative_differences(rows: Rows, reference: Rows) -> list[float]:
    return differences([row["loss"] for row in rows], [row["loss"] for row in reference])


def _show(demo: Demo, rows: Mapping[str, Rows], seen: Comparison, console: Console) -> None:
    table = Table(title=f"{demo.islands} islands x {demo.devices} devices, {demo.dtype}")
    for heading in ("step", "loss, islands", "loss, one world", "largest difference", "floor"):
        table.add_column(heading, justify="right")
    shown = sorted({1, *range(20, demo.steps + 1, 20), demo.steps})
    for step in shown:
        table.add_row(
            str(step),
            f"{rows['islands'][step - 1]['loss']:.6f}",
            f"{rows['one_world'][step - 1]['loss']:.6f}",
            f"{max(seen.differences[:step]):.1e}",
            f"{max(seen.floors[:step]):.1e}",
        )
    console.print(table)
    console.print(
        "Differences are relative and the largest up to the step; the floor is one world against "
        "itself with devices and rows in another order."
    )
    equal = "equal" if seen.replicas.equal else "NOT equal"
    busbw = "not counted" if seen.busbw_gb_s is None else f"{seen.busbw_gb_s:.2f} GB/s"
    console.print(
        f"Per step and process: {seen.exchanges_per_step:g} exchanges, "
        f"{seen.bytes_per_step / 1e6:.2f} MB sent, busbw {busbw}. "
        f"Replicas of parameters: {seen.replicas.compared} compared over {seen.replicas.steps} "
        f"steps, bits {equal}."
    )


def _parse(arguments: Sequence[str] | None) -> Demo:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description="Train over islands and in one world, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--islands", type=int, default=2, help="islands, of one process each")
    parser.add_argument("--devices", type=int, default=2, help="CPU devices of each island")
    parser.add_argument("--config", choices=CONFIGS, default="demo", help="size of the model")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type to compute in")
    parser.add_argument("--steps", type=int, default=200, help="steps of each run")
    parser.add_argument("--batch", type=int, default=16, help="rows in a batch")
    parser.add_argument("--seed", type=int, default=0, help="seed of parameters and batches")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two log lines")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"), help="folder of results")
    return Demo(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(run(_parse(None), Console()))
