"""How fast are collectives over two islands of GPUs, against NCCL on the same processes?

    python -m benchmarks.gpu_collectives [--shape 2x1x1] [--systems cuda_ipc,host,socket,nccl,…]
        [--collectives all_reduce,…] [--sizes 1K,16M,1G] [--dtype float32] [--json FILE]

All systems live side by side and take turns (`benchmarks/gpu_jobs.py` says what they are). Below
16 MiB a time is that of a whole call of a jitted collective; from there on of a link of a program
that chains several, each of which waits for the one before. It is the longest of all processes.
Every program's result is checked. benchmarks/README.md has the formulas.
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks import gpu_jobs, tables
from benchmarks.collectives import COLLECTIVES, Case, across_factor, parse_size, timing

WORKER = pathlib.Path(__file__).with_name("gpu_collectives_worker.py")
SIZES = "1K,16K,256K,1M,16M,64M,256M,1G"
LARGE_BYTES = 16 << 20
COPY_BYTES = 256 << 20

# The system that a system is compared with, and at least how many times as fast it should be, for
# sizes below LARGE_BYTES and from there on. None: the rate across islands is compared with that of
# copies between GPU and host.
BARS: dict[str, tuple[str | None, float | None, float | None]] = {
    "cuda_ipc": ("nccl", 1 / 1.2, 1.0),
    "cuda_ipc_hidden": ("cuda_ipc", None, None),
    "host": (None, None, 0.6),
    "socket": ("nccl_sockets", None, 3.0),
}
# Bytes that a chain moves, by the speed that a system can have. Compared systems have the same.
_CHAIN_BYTES = {
    **dict.fromkeys(("cuda_ipc", "cuda_ipc_hidden", "nccl"), 16 << 30),
    "host": 4 << 30,
}
_SLOW_CHAIN_BYTES = 128 << 20
_MAX_LINKS, _MAX_CALLS = 16, 40
# Turns that a case has at least; further ones begin within the first _MAX_CASE_S seconds.
_MAX_CASE_S, _MIN_TURNS = 1.0, 2


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the result; `across` is what a rank sends to the other island, in 1e9 B/s."""

    system: str
    collective: str
    bytes: int
    links: int
    samples: int
    p50_us: float
    p99_us: float
    algbw_gb_s: float
    busbw_gb_s: float
    across_gb_s: float
    ratio: float | None
    bar: float | None

    @property
    def is_missed(self) -> bool:
        """Whether there is a bar, and the row is below it."""
        return self.bar is not None and self.ratio is not None and self.ratio < self.bar


def case_of(system: str, collective: str, num_bytes: int, dtype: str) -> Case:
    """The case that times a collective of a size on a system."""
    if num_bytes < LARGE_BYTES:
        return Case(collective, num_bytes, 0, dtype)
    budget = _CHAIN_BYTES.get(system, _SLOW_CHAIN_BYTES)
    return Case(collective, num_bytes, int(np.clip(budget // num_bytes, 2, _MAX_LINKS)), dtype)


class Benchmark:
    """Running systems, and the seconds that each took for each collective and size."""

    def __init__(self, systems: gpu_jobs.Systems, args: argparse.Namespace, num_devices: int):
        self._systems = systems
        self._args = args
        self._num_devices = num_devices
        self._pairs = [(c, size) for c in args.collectives for size in args.sizes]
        self._times: dict[tuple[str, str, int], list[float]] = {}
        self._calls: dict[tuple[str, str, int], int] = {}
        self._failures: dict[tuple[str, str, int], str] = {}

    def prepare(self) -> list[str]:
        """Compiles, checks and warms up everything, all systems at the same time.

        Returns:
          What failed, a line for each case of a system; it is not timed.
        """
        answers = self._systems.ask_all(
            lambda s: {"prepare": [self._case(s, *pair) for pair in self._pairs]}
        )
        for system, of_processes in answers.items():
            for pair, texts in zip(self._pairs, zip(*of_processes, strict=True), strict=True):
                if text := next(filter(None, texts), ""):
                    self._failures[system, *pair] = text
        return [f"{' '.join(map(str, key))}: {text}" for key, text in self._failures.items()]

    def measure(self) -> None:
        """Takes turns: each case on each system, then again."""
        for system in [*self._systems.alive]:  # idle devices begin slowly
            if (system, *self._pairs[0]) not in self._failures:
                self._turn(system, *self._pairs[0])
        self._times.clear()
        for turn in range(self._args.repeats):
            for pair in self._pairs:
                for system in [*self._systems.alive]:
                    if (system, *pair) in self._failures:
                        continue
                    links = max(self._case(system, *pair).links, 1)
                    spent_s = sum(self._times.get((system, *pair), ())) * links
                    if turn < _MIN_TURNS or spent_s < _MAX_CASE_S:
                        self._turn(system, *pair)

    def copies(self) -> dict[str, float]:
        """Rates of copies by name, each of the slowest process of the first system that answers."""
        for system in [*self._systems.alive]:
            if rates := self._systems.ask(system, {"copies": self._args.copy_bytes}):
                return {name: min(rate[name] for rate in rates) for name in rates[0]}
        return {}

    def rows(self, copies: Mapping[str, float]) -> list[Row]:
        """The results."""
        return [
            self._row(system, collective, size, copies)
            for collective, size in self._pairs
            for system in self._args.systems
            if (system, collective, size) in self._times
        ]

    def _case(self, system: str, collective: str, size: int) -> Case:
        return case_of(system, collective, size, self._args.dtype)

    def _turn(self, system: str, collective: str, size: int) -> None:
        key = (system, collective, size)
        case = self._case(system, collective, size)
        if key not in self._calls:  # calls that fit into a turn, from the time of one
            if not (first := self._systems.ask(system, {"time": case, "iterations": 1})):
                return
            fit = self._args.turn_s / (max(a[0] for a in first) * max(case.links, 1))
            self._calls[key] = int(np.clip(fit, 1, _MAX_CALLS))
        if answers := self._systems.ask(system, {"time": case, "iterations": self._calls[key]}):
            self._times.setdefault(key, []).extend(np.max(answers, axis=0))

    def _row(self, system: str, collective: str, size: int, copies: Mapping[str, float]) -> Row:
        seconds = self._times[system, collective, size]
        times = timing(collective, size, self._num_devices, seconds)
        across = times.algbw_gb_s * across_factor(collective, self._num_devices)
        reference, small, large = BARS.get(system, (system, None, None))
        bar = small if size < LARGE_BYTES else large
        if reference is None:
            ratio = across / min(copies.values()) if bar and copies else None
        else:
            theirs = self._times.get((reference, collective, size))
            ratio = float(np.median(theirs)) * 1e6 / times.p50_us if theirs else None
        return Row(
            system=system,
            collective=collective,
            bytes=size,
            links=self._case(system, collective, size).links,
            samples=len(seconds),
            **dataclasses.asdict(times),
            across_gb_s=across,
            ratio=ratio,
            bar=bar,
        )


def table(rows: Sequence[Row]) -> str:
    """A line for each collective and size on a system."""
    headings = ("collective", "bytes", "system", "p50 µs", "p99 µs", "algbw", "busbw", "across")
    lines = [
        (
            row.collective,
            f"{row.bytes:,}",
            row.system,
            f"{row.p50_us:,.1f}",
            f"{row.p99_us:,.1f}",
            f"{row.algbw_gb_s:.2f}",
            f"{row.busbw_gb_s:.2f}",
            f"{row.across_gb_s:.2f}" if gpu_jobs.is_bridged(row.system) else "",
            ""
            if row.ratio is None or row.system not in BARS
            else tables.with_bar(row.ratio, row.bar),
        )
        for row in rows
    ]
    return tables.markdown((*headings, "ratio"), lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    gpu_jobs.add_options(parser, tuple(gpu_jobs.SYSTEMS), "2x1x1")
    parser.add_argument(
        "--collectives", type=gpu_jobs.names_of(COLLECTIVES), default=list(COLLECTIVES)
    )
    parser.add_argument(
        "--sizes",
        type=lambda text: [parse_size(part) for part in text.split(",")],
        default=SIZES,
        help="bytes of the larger buffer of a device",
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each case")
    parser.add_argument("--turn-s", type=float, default=0.03, help="seconds of calls in a turn")
    parser.add_argument("--copy-bytes", type=parse_size, default=COPY_BYTES)
    return parser.parse_args()


def main() -> int:
    """Runs the benchmark; the exit code is 1 when a bar is missed."""
    args = parse()
    setting = gpu_jobs.setting(args)
    start = time.monotonic()
    with gpu_jobs.running(args.systems, setting, WORKER) as systems:
        started = time.monotonic()
        benchmark = Benchmark(systems, args, setting.shape.num_devices)
        facts = {
            **systems.facts({}),
            "shape": args.shape,
            "dtype": args.dtype,
            "xla_flags": setting.xla_flags,
        }
        facts["failures"] = benchmark.prepare()
        prepared = time.monotonic()
        facts["copies_gb_s"] = benchmark.copies()
        benchmark.measure()
        rows = benchmark.rows(facts["copies_gb_s"])
        facts["seconds"] = {
            "start": started - start,
            "prepare": prepared - started,
            "measure": time.monotonic() - prepared,
        }
        tables.write_json(args.json, facts, rows)
        print(table(rows), flush=True)
    copies = ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in facts["copies_gb_s"].items())
    print(
        f"{facts['devices']} x {facts['device']}, {args.dtype}, jax {facts['jax']}; copies:"
        f" {copies}; {time.monotonic() - start:.0f} s in all"
    )
    print(tables.made_at())
    for text in facts["failures"]:
        print(f"FAILED {text}")
    missed = sum(row.is_missed for row in rows) + len(facts["failures"])
    return gpu_jobs.exit_code(missed, systems)


if __name__ == "__main__":
    sys.exit(main())
