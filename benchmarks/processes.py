"""Costs of many processes: time to start; sockets, threads and memory of each process.

    python -m benchmarks.processes [--processes 8 64] [--json FILE]

All processes are on this machine and have one CPU device each. The jobs, one at a time: two islands
of `jaxhet launch` with the default transports, the same with sockets alone, again with sockets and
a sum over rails, and one world of `jax.distributed` and Gloo.

`start` is the time from the launch until all processes have the result of a first sum: over all
devices, or over each rail, which has one device of each island. It includes the import of JAX and
the compilation of the sum. `sockets` counts the TCP connections of a process, also of JAX and Gloo.
`memory` is the proportional set size: a page that n processes share counts 1 / n. Sockets, threads
and memory are maxima over the processes.
"""

import argparse
import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.tables import made_at, markdown, write_json
from jaxhet.testing import Job, Shape, island_job, joined_job

WORKER = pathlib.Path(__file__).with_name("processes_worker.py")
_RAILS = "jaxhet, socket, rails"
SYSTEMS = ("jaxhet", "jaxhet, socket", _RAILS, "jax.distributed")
_LONG_TIMEOUT = {"JAXHET_CONNECT_TIMEOUT_S": "400"}  # processes share few cores


@dataclasses.dataclass(frozen=True)
class Row:
    """A job: seconds to start, and maxima over its processes."""

    processes: int
    system: str
    start_s: float
    sockets: int
    threads: int
    memory_mib: float


def start(system: str, num_processes: int) -> Job:
    """Starts a job; returns when its workers are connected."""
    if system == "jax.distributed":
        return joined_job(Shape(1, num_processes), WORKER)
    allowed = {"JAXHET_TRANSPORTS": "socket"} if "socket" in system else {}
    return island_job(Shape(2, num_processes // 2), WORKER, {**_LONG_TIMEOUT, **allowed})


def measure(system: str, num_processes: int, timeout_s: float) -> Row:
    """Starts and ends one job."""
    begin = time.monotonic()
    job = start(system, num_processes)
    try:
        sums = "rails" if system == _RAILS else "all"
        facts: Sequence[Mapping[str, Any]] = job.ask(sums, timeout_s)
        start_s = max(fact["ready"] for fact in facts) - begin
    finally:
        job.close()
    most = {name: max(fact[name] for fact in facts) for name in facts[0]}
    return Row(
        num_processes, system, start_s, most["sockets"], most["threads"], most["memory"] / 2**20
    )


def table(rows: Sequence[Row]) -> str:
    """The rows, with the ratio of each start to that of jax.distributed."""
    headings = ("processes", "system", "start, s", "ratio", "sockets", "threads", "memory, MiB")
    plain = {row.processes: row.start_s for row in rows if row.system == "jax.distributed"}
    cells = []
    for row in rows:
        ratio = f"{row.start_s / plain[row.processes]:.2f}" if row.processes in plain else ""
        counts = (str(row.sockets), str(row.threads), f"{row.memory_mib:.0f}")
        cells.append((str(row.processes), row.system, f"{row.start_s:.1f}", ratio, *counts))
    return markdown(headings, cells)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.processes",
        description="Start jobs of many processes: time, sockets, threads and memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--processes", nargs="+", type=int, default=[8, 64], help="even numbers")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--timeout-s", type=float, default=400, help="for each job to start")
    parser.add_argument("--json", type=pathlib.Path, help="file for the table's rows")
    options = parser.parse_args()
    jobs = [(system, count) for count in options.processes for system in options.systems]
    console = Console(stderr=True)
    rows = [measure(*job, options.timeout_s) for job in track(jobs, "jobs", console=console)]
    print(f"{table(rows)}\n{made_at()}")
    write_json(options.json, {}, rows)


if __name__ == "__main__":
    main()
