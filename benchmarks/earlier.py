"""Costs of a job's start and of an all-reduce, in this tree and in an earlier one.

    python -m benchmarks.earlier FOLDER [--turns 6] [--sizes 1024,…] [--json FILE]

FOLDER is a checkout of the earlier commit, with an environment of its own (`make setup`). Jobs are
two islands of one device each. Both trees take turns, and the first one of a turn changes.

A start lasts from the launch until both processes have the result of a first all-reduce of 1 KiB;
`processor` is the processor time of all processes of the job, until its end. For the all-reduces, a
job of each tree lives beside the other. A turn's time is that of its quickest call, on the slower
process: other work on the machine disturbs most calls, and seldom all. A ratio is a turn's cost in
this tree / that in the earlier one. The table has the medians of the turns, and the quartiles of
their ratios.
"""

import argparse
import json
import os
import pathlib
import resource
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.all_reduce import WORKER, iterations
from benchmarks.tables import made_at, markdown
from jaxhet.testing import Job

_ROOT = pathlib.Path(__file__).parents[1]
_TREES = ("earlier", "this")
_TRANSPORTS = ("shm", "tcp")
_START_BYTES = 1024

# Seconds of each turn by measurement and tree.
Times = dict[str, dict[str, list[float]]]


def start(root: pathlib.Path, transport: str) -> Job:
    """A running job of a tree."""
    python = sys.executable if root == _ROOT else str(root / ".venv" / "bin" / "python")
    launch = [python, "-m", "jaxhet.cli", "launch", "--islands", "2"]
    worker = root / WORKER.relative_to(_ROOT)
    command = ["env", "-C", str(root), *launch, "--devices", "1", "--", python, str(worker)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAXHET_")}
    env = {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "JAXHET_TRANSPORTS": transport}
    return Job([(command, {**kept, **env})], 2)


def _quickest(job: Job, num_bytes: int, count: int) -> float:
    request = {"dtype": "float32", "bytes": num_bytes, "iterations": count}
    return float(np.min(np.max(job.ask(request, timeout_s=600), axis=0)))


def _in_turn(turn: int) -> Sequence[str]:
    return _TREES if turn % 2 == 0 else _TREES[::-1]


def measure_starts(roots: Mapping[str, pathlib.Path], turns: int) -> Times:
    """Times from the launch to the first result, and the processor times of whole jobs."""
    found: Times = {name: {tree: [] for tree in _TREES} for name in ("start", "start, processor")}
    for turn in track(range(turns), "starts", console=Console(stderr=True)):
        for tree in _in_turn(turn):
            begin, busy = time.monotonic(), _busy()
            job = start(roots[tree], "shm,tcp")
            _quickest(job, _START_BYTES, 1)
            found["start"][tree].append(time.monotonic() - begin)
            job.close()
            found["start, processor"][tree].append(_busy() - busy)
    return found


def _busy() -> float:
    """Processor time of all children that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_all_reduces(
    roots: Mapping[str, pathlib.Path], sizes: Sequence[int], turns: int
) -> Times:
    """Times of all-reduces, by transport and bytes."""
    found: Times = {}
    for transport in _TRANSPORTS:
        jobs = {tree: start(root, transport) for tree, root in roots.items()}
        try:
            for turn in track(range(turns), transport, console=Console(stderr=True)):
                for size in sizes:
                    times = found.setdefault(f"{transport}, {size:,} bytes", {t: [] for t in jobs})
                    for tree in _in_turn(turn):
                        times[tree].append(_quickest(jobs[tree], size, iterations(size)))
        finally:
            for job in jobs.values():
                job.close()
    return found


def table(times: Times) -> str:
    """A row for each measurement."""
    rows = []
    for name, of_trees in times.items():
        earlier, this = (np.array(of_trees[tree]) for tree in _TREES)
        low, middle, high = np.quantile(this / earlier, [0.25, 0.5, 0.75])
        medians = (f"{np.median(seconds) * 1000:,.2f}" for seconds in (earlier, this))
        rows.append((name, *medians, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"))
    return markdown(("", "earlier, ms", "this, ms", "ratio", "quartiles"), rows)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path, help="checkout of the earlier commit")
    parser.add_argument("--turns", type=int, default=6, help="starts of each tree")
    parser.add_argument("--sizes", default="1024,65536,1048576,16777216")
    parser.add_argument("--json", type=pathlib.Path, help="file for the times, in seconds")
    args = parser.parse_args()
    roots = {"earlier": args.folder.resolve(), "this": _ROOT}
    sizes = [int(size) for size in args.sizes.split(",")]
    times = {
        **measure_all_reduces(roots, sizes, 4 * args.turns),
        **measure_starts(roots, args.turns),
    }
    print(f"{table(times)}\n{made_at()}")
    if args.json:
        args.json.write_text(json.dumps(times) + "\n")


if __name__ == "__main__":
    main()
