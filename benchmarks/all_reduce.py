"""How fast is an all-reduce over two islands, against JAX's own Gloo on the same processes?

    python -m benchmarks.all_reduce [--json FILE] [--sizes 1024,…] [--dtypes float32,bfloat16]
                                    [--shapes 2x1,2x2] [--systems jaxhet-socket,gloo] [--repeats 5]

A system is `gloo`, or `jaxhet-` with a transport and perhaps a value of JAXHET_ENCRYPTION, as in
`jaxhet-socket-auth`. Jobs of all systems live side by side and take turns, so that noise of the
machine meets all of them. Ratios are p50 of the last system / p50. Times are of one call of a
jitted `psum` until its result is ready, the longest of all processes. Sizes are bytes per device.
With n devices: algbw = bytes / p50, busbw = algbw × 2 (n − 1) / n (as in nccl-tests);
GB/s = 1e9 B/s.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import collectives
from benchmarks.tables import made_at
from jaxhet.testing import Job, Shape, island_job, joined_job

WORKER = pathlib.Path(__file__).with_name("all_reduce_worker.py")
SYSTEMS = ("jaxhet-process_vm", "jaxhet-socket", "gloo")
SIZES = (1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
LARGE_BYTES = 1 << 20
# Bars of the project: (p50 ratio Gloo / jaxhet) by system, for 1 KiB and from 1 MiB
# on.
BARS = {
    ("2x1", "jaxhet-process_vm", "large"): 4.0,
    ("2x1", "jaxhet-socket", "large"): 1.5,
    ("2x2", "jaxhet-process_vm", "large"): 2.0,
    ("2x2", "jaxhet-socket", "large"): 1.25,
    ("2x1", "jaxhet-process_vm", "small"): 2.0,
    ("2x1", "jaxhet-socket", "small"): 2.0,
    ("2x2", "jaxhet-process_vm", "small"): 2.0,
    ("2x2", "jaxhet-socket", "small"): 2.0,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the result."""

    system: str
    processes: int
    devices_per_process: int
    dtype: str
    bytes: int
    p50_us: float
    p99_us: float
    algbw_gb_s: float
    busbw_gb_s: float
    ratio: float  # the last system's p50 / this p50


def iterations(num_bytes: int) -> int:
    """Calls per repeat: about as much time for every size."""
    return int(np.clip((8 << 20) // max(num_bytes, 1), 3, 60))


def start(system: str, shape: Shape) -> Job:
    """The job of one system."""
    if system == "gloo":
        return joined_job(shape, WORKER)
    _, transport, *encryption = system.split("-")
    env = {"JAXHET_TRANSPORTS": transport, "JAXHET_ENCRYPTION": "".join(encryption) or "off"}
    return island_job(shape, WORKER, env)


def measure(
    shape: Shape, sizes: Sequence[int], dtypes: Sequence[str], systems: Sequence[str], repeats: int
) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """Runs all systems on `shape`.

    Returns:
      Rows, and the times of a program without collectives by system.
    """
    jobs = {system: start(system, shape) for system in systems}
    cases = [(dtype, size) for dtype in dtypes for size in sizes]
    times: dict[tuple[str, str, int], list[float]] = {}
    unrelated: dict[str, dict[str, list[float]]] = {
        s: {"compile_s": [], "run_s": []} for s in systems
    }
    try:
        for repeat in track(
            range(repeats), f"{shape.num_processes} × {shape.devices}", console=Console(stderr=True)
        ):
            for dtype, size in cases:
                for system, job in jobs.items():
                    request = {"dtype": dtype, "bytes": size, "iterations": iterations(size)}
                    answers = job.ask(request)
                    times.setdefault((system, dtype, size), []).extend(np.max(answers, axis=0))
            for system, job in jobs.items():
                for answer in job.ask({"unrelated": repeat}):
                    for key, value in answer.items():
                        unrelated[system][key].append(value)
    finally:
        for job in jobs.values():
            job.close()
    rows = [
        _row(system, shape, dtype, size, times, systems[-1])
        for dtype, size in cases
        for system in systems
    ]
    medians = {s: {k: float(np.median(v)) for k, v in of.items()} for s, of in unrelated.items()}
    return rows, medians


def _row(
    system: str,
    shape: Shape,
    dtype: str,
    size: int,
    times: dict[tuple[str, str, int], list[float]],
    baseline: str,
) -> Row:
    n = shape.num_devices
    measured = collectives.timing("all_reduce", size, n, times[system, dtype, size])
    return Row(
        system=system,
        processes=shape.num_processes,
        devices_per_process=n // shape.num_processes,
        dtype=dtype,
        bytes=size,
        **dataclasses.asdict(measured),
        ratio=float(np.median(times[baseline, dtype, size]) * 1e6 / measured.p50_us),
    )


def bar_of(row: Row) -> float | None:
    """The ratio that this row should reach, if one is set."""
    small = "small" if row.bytes <= SIZES[0] else "large" if row.bytes >= LARGE_BYTES else None
    return (
        BARS.get((f"{row.processes}x{row.devices_per_process}", row.system, small))
        if small
        else None
    )


def show(rows: Sequence[Row], console: Console) -> bool:
    """Prints the table; returns whether all bars are reached."""
    table = Table(
        "system",
        "processes × devices",
        "dtype",
        "bytes",
        "p50 µs",
        "p99 µs",
        "algbw",
        "busbw",
        "ratio",
        "bar",
    )
    reached = True
    for row in rows:
        bar = bar_of(row) if rows[-1].system == "gloo" else None
        good = bar is None or row.ratio >= bar
        reached &= good
        table.add_row(
            row.system,
            f"{row.processes} × {row.devices_per_process}",
            row.dtype,
            f"{row.bytes:,}",
            f"{row.p50_us:,.0f}",
            f"{row.p99_us:,.0f}",
            f"{row.algbw_gb_s:.3f}",
            f"{row.busbw_gb_s:.3f}",
            f"{row.ratio:.2f}",
            "" if bar is None else f"{'≥' if good else 'MISSED'} {bar:g}",
        )
    console.print(table)
    console.print(made_at())
    return reached


def show_unrelated(shape: Shape, medians: dict[str, dict[str, float]], console: Console) -> None:
    """Prints what jaxhet costs a program without collectives."""
    *systems, baseline = medians
    last = "plain JAX" if baseline == "gloo" else baseline
    for system in systems:
        compile_ratio, run_ratio = (
            medians[system][k] / medians[baseline][k] for k in ("compile_s", "run_s")
        )
        console.print(
            f"program without collectives, {shape.num_processes} × {shape.devices},"
            f" {system} / {last}: compile time × {compile_ratio:.3f}, run time × {run_ratio:.3f}"
        )


def main() -> int:
    """Runs the benchmark; the exit code is 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--shapes", default="2x1,2x2", help="processes x devices per process")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    systems = args.systems.split(",")
    console = Console(width=120)
    rows: list[Row] = []
    for text in args.shapes.split(","):
        processes, devices = map(int, text.split("x"))
        shape = Shape(processes, 1, devices)
        more, medians = measure(
            shape,
            [int(s) for s in args.sizes.split(",")],
            args.dtypes.split(","),
            systems,
            args.repeats,
        )
        rows += more
        show_unrelated(shape, medians, console)
    reached = show(rows, console)
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
