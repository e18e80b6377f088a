"""Times of an all-reduce over socket, by value of JAXHET_ENCRYPTION.

    python -m benchmarks.encryption [--sizes 1024,…] [--repeats 5] [--json FILE]

All-reduces in float32 over two islands of one device each, as in `benchmarks.all_reduce`. The jobs
of all modes live side by side and take turns. Times are p50 of a call, the longer one of both
processes; a ratio is a mode's time / that of `off`. busbw is as in nccl-tests: with two devices,
bytes / time; GB/s = 1e9 B/s.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import collectives
from benchmarks.all_reduce import SIZES, WORKER, iterations
from benchmarks.tables import made_at
from jaxhet.testing import Shape, island_job

MODES = ("off", "auth", "full")


def measure(sizes: Sequence[int], repeats: int) -> dict[tuple[str, int], list[float]]:
    """Seconds of each call, by mode and bytes."""
    jobs = {
        mode: island_job(
            Shape(2), WORKER, {"JAXHET_TRANSPORTS": "socket", "JAXHET_ENCRYPTION": mode}
        )
        for mode in MODES
    }
    times: dict[tuple[str, int], list[float]] = {(m, size): [] for m in MODES for size in sizes}
    try:
        for _ in track(range(repeats), "repeats", console=Console(stderr=True)):
            for size in sizes:
                for mode, job in jobs.items():
                    request = {"dtype": "float32", "bytes": size, "iterations": iterations(size)}
                    times[mode, size].extend(np.max(job.ask(request), axis=0))
    finally:
        for job in jobs.values():
            job.close()
    return times


def table(times: dict[tuple[str, int], list[float]]) -> Table:
    """A row for each number of bytes."""
    found = Table("bytes", "off µs", "busbw", "auth µs", "ratio", "full µs", "ratio")
    for size in sorted({size for _, size in times}):
        of = {mode: collectives.timing("all_reduce", size, 2, times[mode, size]) for mode in MODES}
        cells = [f"{size:,}", f"{of['off'].p50_us:,.0f}", f"{of['off'].busbw_gb_s:.2f}"]
        for mode in MODES[1:]:
            cells += [f"{of[mode].p50_us:,.0f}", f"{of[mode].p50_us / of['off'].p50_us:.2f}"]
        found.add_row(*cells)
    return found


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="file for the times, in seconds")
    args = parser.parse_args()
    times = measure([int(size) for size in args.sizes.split(",")], args.repeats)
    console = Console(width=100)
    console.print(table(times))
    console.print(made_at())
    if args.json:
        rows = [{"mode": m, "bytes": size, "seconds": t} for (m, size), t in times.items()]
        args.json.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
