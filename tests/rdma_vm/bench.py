"""How fast are engine and verbs transport against perftest, on soft-RoCE in one guest?

    python -m tests.rdma_vm.bench [--repeats 5]

All take turns in one boot, each of our figures right behind perftest's; figures and ratios are
medians. Bandwidth is that of exchanges of which 4 are under way at any time, as 128 writes are for
ib_write_bw. It is an emulator: ratios count, not speeds, and only on a machine that does nothing
else.
"""

import argparse
import dataclasses
import functools
import math
import re
import statistics
import sys
from collections.abc import Callable

from benchmarks import tables
from tests.rdma_vm.guest import REAL_VERBS, Guest, boot
from tests.rdma_vm.image import make
from tools.programs import build

_SIZES = tuple(n << 20 for n in (1, 2, 4, 8))
_LEAST_BANDWIDTH = 0.85  # share of ib_write_bw's rate
_MOST_LATENCY = 2.0  # times ib_write_lat
_LATENCY_BYTES = 8
_MESSAGES = 5_000
_MOVED = 64 << 20  # bytes, for a bandwidth
_CHUNK = 512 << 10
_TIMEOUT_S = 300
_RDMA = "-d rxe0 -x 1 -F"

Pairs = list[tuple[float, float]]  # figures of ours and perftest's, taken one after the other


@dataclasses.dataclass(frozen=True)
class Case:
    """Measurement of ours and of perftest, and the expected ratio."""

    what: str
    unit: str
    ours: Callable[[Guest], float]
    perftest: Callable[[Guest], float]
    least: float = 0.0
    most: float = math.inf

    def holds(self, pairs: Pairs) -> bool:
        """Whether the ratio is where it should be."""
        return self.least <= _ratio(pairs) <= self.most

    def cells(self, pairs: Pairs) -> tuple[str, ...]:
        """The line of the table."""
        medians = (statistics.median(figures) for figures in zip(*pairs, strict=True))
        bar = f">= {self.least}" if self.least > 0 else f"<= {self.most}"
        return (
            self.what,
            *(f"{median:.1f} {self.unit}" for median in medians),
            f"{_ratio(pairs):.2f}",
            bar if (self.least, self.most) != (0.0, math.inf) else "reported",
            "" if self.holds(pairs) else "MISSED",
        )


def _ratio(pairs: Pairs) -> float:
    return statistics.median(ours / perftest for ours, perftest in pairs)


def _output(guest: Guest, script: str) -> str:
    ended = guest.run(script, _TIMEOUT_S, REAL_VERBS)
    assert ended.code == 0, ended.text
    return ended.text


def _perftest(guest: Guest, command: str) -> list[float]:
    """The figures after size and iterations."""
    client = f"until {command} 127.0.0.1 >/tmp/client 2>&1; do sleep 0.2; done"
    text = _output(guest, f"{command} >/dev/null 2>&1 & {client}; wait; cat /tmp/client")
    found = re.findall(r"^ *\d+ +\d+ +([\d. \t]+)$", text, re.MULTILINE)
    assert found, text
    return [float(figure) for figure in found[-1].split()]


def _perftest_mb_s(guest: Guest, num_bytes: int) -> float:
    iterations = _MOVED // num_bytes
    mib_s = _perftest(guest, f"ib_write_bw {_RDMA} -s {num_bytes} -n {iterations}")[1]
    return mib_s * (1 << 20) / 1e6


def _perftest_us(guest: Guest) -> float:
    return _perftest(guest, f"ib_write_lat {_RDMA} -s {_LATENCY_BYTES} -n {_MESSAGES}")[2]


def _time_us(text: str, what: str) -> float:
    found = re.search(rf"{what}\b.* (?:p50|mean) +([\d.]+) us", text)
    assert found, text
    return float(found[1])


def _engine_us(guest: Guest, num_bytes: int, ways: str) -> float:
    bench = build("exchange_bench")
    return _time_us(_output(guest, f"{bench} verbs {ways} {num_bytes}"), ways)


def _engine_mb_s(guest: Guest, num_bytes: int) -> float:
    return num_bytes / _engine_us(guest, num_bytes, "streamed")


def _transport_us(guest: Guest) -> float:
    bench = build("verbs_peer_bench")
    return _time_us(_output(guest, f"{bench} {_LATENCY_BYTES} {_MESSAGES} {_CHUNK}"), "verbs")


def _cases() -> list[Case]:
    cases = [
        Case(
            f"engine, streamed, {size >> 20} MiB",
            "MB/s",
            functools.partial(_engine_mb_s, num_bytes=size),
            functools.partial(_perftest_mb_s, num_bytes=size),
            least=_LEAST_BANDWIDTH,
        )
        for size in _SIZES
    ]
    what = f"{_LATENCY_BYTES} bytes"
    engine = functools.partial(_engine_us, num_bytes=_LATENCY_BYTES, ways="both_ways")
    cases.append(Case(f"transport, {what}", "us", _transport_us, _perftest_us, most=_MOST_LATENCY))
    cases.append(Case(f"engine, {what}", "us", engine, _perftest_us))
    return cases


def measure(guest: Guest, repeats: int) -> list[tuple[Case, Pairs]]:
    """All cases take turns."""
    measured: list[tuple[Case, Pairs]] = [(case, []) for case in _cases()]
    for _ in range(repeats):
        for case, pairs in measured:
            perftest = case.perftest(guest)
            pairs.append((case.ours(guest), perftest))
    return measured


def main() -> int:
    """Prints the table; the exit code is 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="tests.rdma_vm.bench", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    guest = boot(make())
    try:
        measured = measure(guest, repeats)
    finally:
        guest.close()
    headings = ("what", "ours", "perftest", "ratio", "bar", "")
    print(tables.markdown(headings, [case.cells(pairs) for case, pairs in measured]))
    return 0 if all(case.holds(pairs) for case, pairs in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
