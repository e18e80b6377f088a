"""How fast are engine and verbs transport against perftest, on soft-RoCE in one guest?

    python -m tests.rdma_vm.bench [--repeats 5]

All take turns in one boot; the figures are medians. Bandwidth is that of exchanges of which 4 are
under way at any time, as 128 writes are for ib_write_bw. It is an emulator: ratios count, not
speeds, and only on a machine that does nothing else.
"""

import argparse
import dataclasses
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
    iterations = max(10, (40 << 20) // num_bytes)
    mib_s = _perftest(guest, f"ib_write_bw {_RDMA} -s {num_bytes} -n {iterations}")[1]
    return mib_s * (1 << 20) / 1e6


def _perftest_us(guest: Guest) -> float:
    return _perftest(guest, f"ib_write_lat {_RDMA} -s {_LATENCY_BYTES} -n 1000")[2]


def _time_us(text: str, what: str) -> float:
    found = re.search(rf"{what}\b.* (?:p50|mean) +([\d.]+) us", text)
    assert found, text
    return float(found[1])


def _engine_us(guest: Guest, num_bytes: int, ways: str) -> float:
    bench = build("exchange_bench")
    return _time_us(_output(guest, f"{bench} verbs {num_bytes}"), ways)


def _transport_us(guest: Guest) -> float:
    bench = build("verbs_peer_bench")
    return _time_us(_output(guest, f"{bench} {_LATENCY_BYTES} 1000 {_CHUNK}"), "verbs")


def measure(guest: Guest, repeats: int) -> dict[str, float]:
    """Medians by name."""
    cases: dict[str, Callable[[], float]] = {}
    for size in _SIZES:
        cases[f"perftest {size}"] = lambda size=size: _perftest_mb_s(guest, size)
        cases[f"engine {size}"] = lambda size=size: size / _engine_us(guest, size, "streamed")
    cases["perftest latency"] = lambda: _perftest_us(guest)
    cases["transport latency"] = lambda: _transport_us(guest)
    cases["engine latency"] = lambda: _engine_us(guest, _LATENCY_BYTES, "both_ways")
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, run in cases.items():
            times[name].append(run())
    return {name: statistics.median(values) for name, values in times.items()}


def rows(medians: dict[str, float]) -> list[Row]:
    """The table."""
    table = []
    for size in _SIZES:
        ours, perftest = medians[f"engine {size}"], medians[f"perftest {size}"]
        ratio = ours / perftest
        what = f"engine, streamed, {size >> 20} MiB"
        texts = (f"{ours:.1f} MB/s", f"{perftest:.1f} MB/s")
        holds = ratio >= _LEAST_BANDWIDTH
        table.append(Row(what, *texts, ratio, f">= {_LEAST_BANDWIDTH}", holds))
    perftest = medians["perftest latency"]
    for name, most in (("transport", _MOST_LATENCY), ("engine", None)):
        ours = medians[f"{name} latency"]
        ratio = ours / perftest
        texts = (f"{ours:.1f} us", f"{perftest:.1f} us")
        bar = f"<= {most}" if most else "reported"
        holds = most is None or ratio <= most
        table.append(Row(f"{name}, {_LATENCY_BYTES} bytes", *texts, ratio, bar, holds))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.rdma_vm.bench", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    guest = boot(make())
    try:
        medians = measure(guest, repeats)
    finally:
        guest.close()
    print("| what | ours | perftest | ratio | bar | |\n|---|---|---|---|---|---|")
    for row in rows(medians):
        cells = (row.what, row.ours, row.perftest, f"{row.ratio:.2f}", row.bar)
        print("|", *(f"{cell} |" for cell in cells), "|" if row.holds else "MISSED |")


if __name__ == "__main__":
    main()
