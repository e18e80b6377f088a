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
import re
import statistics
from collections.abc import Callable

from tests.rdma_vm.guest import REAL_VERBS, Guest, boot
from tests.rdma_vm.image import make
from tests.support.programs import build

_SIZES = tuple(n << 20 for n in (1, 2, 4, 8))
_LEAST_BANDWIDTH = 0.85  # of ib_write_bw
_MOST_LATENCY = 2.0  # times ib_write_lat
_LATENCY_BYTES = 8
_MESSAGES = 5_000
_MOVED = 64 << 20  # bytes, for a bandwidth
_CHUNK = 512 << 10
_TIMEOUT_S = 300
_RDMA = "-d rxe0 -x 1 -F"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the result; `bar` is what `ratio` should reach, or stay below."""

    what: str
    ours: str
    perftest: str
    ratio: float
    bar: str
    holds: bool


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured, of us and of perftest, and what their ratio should be."""

    what: str
    unit: str
    ours: Callable[[Guest], float]
    perftest: Callable[[Guest], float]
    least: float | None = None
    most: float | None = None

    def row(self, pairs: list[tuple[float, float]]) -> Row:
        """Of figures of ours and perftest's that were taken one after the other."""
        ours, perftest = (
            f"{statistics.median(figures):.1f} {self.unit}" for figures in zip(*pairs, strict=True)
        )
        ratio = statistics.median(ours / perftest for ours, perftest in pairs)
        if self.least:
            return Row(self.what, ours, perftest, ratio, f">= {self.least}", ratio >= self.least)
        if self.most:
            return Row(self.what, ours, perftest, ratio, f"<= {self.most}", ratio <= self.most)
        return Row(self.what, ours, perftest, ratio, "reported", holds=True)


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


def measure(guest: Guest, repeats: int) -> list[Row]:
    """The table."""
    cases = _cases()
    pairs: list[list[tuple[float, float]]] = [[] for _ in cases]
    for _ in range(repeats):
        for case, its_pairs in zip(cases, pairs, strict=True):
            perftest = case.perftest(guest)
            its_pairs.append((case.ours(guest), perftest))
    return [case.row(its_pairs) for case, its_pairs in zip(cases, pairs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.rdma_vm.bench", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    guest = boot(make())
    try:
        rows = measure(guest, repeats)
    finally:
        guest.close()
    print("| what | ours | perftest | ratio | bar | |\n|---|---|---|---|---|---|")
    for row in rows:
        cells = (row.what, row.ours, row.perftest, f"{row.ratio:.2f}", row.bar)
        print("|", *(f"{cell} |" for cell in cells), "|" if row.holds else "MISSED |")


if __name__ == "__main__":
    main()
