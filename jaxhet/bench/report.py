"""`jaxhet bench` in one process of a job: all cases in turn, and a table as in nccl-tests."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxhet import _paths, _session
from jaxhet.bench import cases
from jaxhet.bench.formulas import Case, num_elements, timing

_COLUMNS = "{:<15} {:>12} {:>12} {:<14} {:>12} {:>12} {:>8} {:>8} {:>7}"
_HEADINGS = ("# collective", "bytes", "count", "dtype", "p50 (us)", "p99 (us)")
_RATES = ("algbw", "busbw", "wrong")


@dataclasses.dataclass(frozen=True)
class Row:
    """Result of a case. Times are the longest over all processes; 1 GB/s is 1e9 B/s.

    Attributes:
      collective: Name of the collective.
      bytes: Size of the larger buffer of a device.
      count: Number of elements of that buffer.
      dtype: Type of the elements.
      p50_us: Median of the calls.
      p99_us: 99th percentile of the calls.
      algbw_gb_s: Bytes / p50.
      busbw_gb_s: algbw × the factor of nccl-tests.
      num_wrong: Wrong elements on all devices.
      problem: Why it could not run; then all numbers are 0.
    """

    collective: str
    bytes: int
    count: int
    dtype: str
    p50_us: float = 0.0
    p99_us: float = 0.0
    algbw_gb_s: float = 0.0
    busbw_gb_s: float = 0.0
    num_wrong: int = 0
    problem: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it ran and every element was right."""
        return not self.num_wrong and not self.problem

    def text(self) -> str:
        """A line of the table."""
        if self.problem:
            return (
                f"{self.collective:<15} {self.bytes:>12} {'':>12} {self.dtype:<14} {self.problem}"
            )
        times = f"{self.p50_us:.1f}", f"{self.p99_us:.1f}"
        rates = f"{self.algbw_gb_s:.3f}", f"{self.busbw_gb_s:.3f}"
        what = self.collective, self.bytes, self.count, self.dtype
        return _COLUMNS.format(*what, *times, *rates, self.num_wrong)


def run(
    all_cases: Sequence[Case], iterations: int, warmup: int, show: Callable[[str], None]
) -> list[Row]:
    """Runs the cases, in every process of the job in the same order; `show` gets the table."""
    show("\n".join(f"# {line}" for line in _facts().values()))
    show(_COLUMNS.format(*_HEADINGS, *_RATES))
    rows = []
    for case in all_cases:
        rows.append(_measure(case, iterations, warmup))
        show(rows[-1].text())
        cases.forget_operands()
    ran = [row.busbw_gb_s for row in rows if not row.problem]
    show(
        f"# average busbw: {np.mean(ran) if ran else 0:.3f} GB/s; wrong elements:"
        f" {sum(row.num_wrong for row in rows)}; not run: {len(rows) - len(ran)}"
    )
    return rows


def write(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Writes the facts of the job and the rows as JSON."""
    content = {**_facts(), "rows": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def _facts() -> dict[str, str]:
    """Islands and devices of the job, in words."""
    session = _session.required()
    islands = ", ".join(
        f"{island.name}: {len(island.processes)} processes, {len(island.ranks)} devices"
        f" ({island.devices[0].device_kind})"
        for island in session.islands
    )
    transports = sorted({path.transport for path in _paths.paths()})
    return {
        "islands": islands,
        "software": f"jax {jax.__version__}, {session.island.platform}",
        "transports": f"transports of process {session.process}: {', '.join(transports) or 'none'}",
        "times": "times: the longest over all processes; algbw, busbw: in GB/s (1e9 B/s), at p50",
    }


def _measure(case: Case, iterations: int, warmup: int) -> Row:
    size = num_elements(case.num_bytes, jnp.dtype(case.dtype).itemsize, jax.device_count())
    row = Row(case.collective, case.num_bytes, size, case.dtype)
    try:
        prepared = cases.prepare(case)
    except Exception as error:  # the same on all processes: a type that XLA does not sum, say
        _session.required().raise_if_failed()
        return dataclasses.replace(row, problem=f"{type(error).__name__}: {error}".split("\n")[0])
    seconds = _gather([prepared.num_wrong, *prepared.times(iterations, warmup)])
    wrong, longest = int(seconds[:, 0].sum()), seconds[:, 1:].max(axis=0)
    num_bytes = size * jnp.dtype(case.dtype).itemsize
    measured = timing(case.collective, num_bytes, jax.device_count(), longest)
    return dataclasses.replace(
        row, bytes=num_bytes, num_wrong=wrong, **dataclasses.asdict(measured)
    )


def _gather(values: Sequence[float]) -> Any:
    """Numbers of all processes, one row per process."""
    from jax.experimental import multihost_utils

    gathered = multihost_utils.process_allgather(np.array(values, np.float32))
    return np.asarray(gathered).reshape(jax.process_count(), len(values))
