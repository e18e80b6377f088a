"""Results of `benchmarks.ladder`: rows of a table, of a JSON file and of two plots; pure."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks import tables
from benchmarks.training import Trace
from models.extras.records import differences


@dataclasses.dataclass(frozen=True)
class Row:
    """A program on a rung. Without figures, `reason` says why.

    Attributes:
      parallel: name of the program in `ladder_rungs.PARALLEL`.
      rung: name in `ladder_rungs.RUNGS`; `text` is what the table calls it.
      reason: why there are no figures.
      is_failed: whether the rung should have run.
      is_comparable: whether the losses are of the same batches as the reference's.
      remark: note for readers of the figures.
      tokens_per_s: rate of each step, over all islands; None where a step is not timed.
      losses: one for each step, in nats per byte.
      islands: p50 of tokens/s of each island, where islands train alone.
      exchanges: started in a step, over all ranks.
      bytes_sent: in a step by transport, over all processes.
      ratio: p50 over that of the one world.
      difference: |a - b| / |b| of the losses a to the one world's b, the largest of all steps.
    """

    parallel: str
    rung: str
    text: str
    reason: str = ""
    is_failed: bool = False
    is_comparable: bool = True
    remark: str = ""
    tokens_per_s: Sequence[float | None] = ()
    losses: Sequence[float] = ()
    islands: Sequence[float] = ()
    exchanges: float = 0.0
    bytes_sent: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ratio: float | None = None
    difference: float | None = None

    @property
    def timed(self) -> list[float]:
        """Tokens/s of the steps that are timed."""
        return [rate for rate in self.tokens_per_s if rate is not None]

    @property
    def figures(self) -> dict[str, Any]:
        """All fields, with `p50` and `p99` of tokens/s if there are any."""
        rates = self.timed
        found = {"p50": reached(rates, 50), "p99": reached(rates, 99)} if rates else {}
        return {**dataclasses.asdict(self), **found}


def reached(rates: Sequence[float], percent: float) -> float:
    """The rate that `percent` % of the steps reach: one of `rates`."""
    return float(np.percentile(rates, 100 - percent, method="lower"))


def rates_of(
    turns: Sequence[Sequence[Trace]], tokens: int, untimed: int
) -> tuple[list[float | None], list[list[float]]]:
    """Tokens/s of each step over all islands, and for each island those of its timed steps.

    A step of an island takes as long as on its slowest process.

    Args:
      turns: for each turn, the trace of each process.
      tokens: number of tokens in a step of each island that the turns name.
      untimed: first steps of each turn that are run and not timed.
    """
    islands = sorted({trace.island for trace in turns[0]})
    total: list[float | None] = []
    each = np.empty((len(islands), 0))
    for turn in turns:
        seconds = [np.max([t.seconds for t in turn if t.island == i], axis=0) for i in islands]
        rates = tokens / np.array(seconds)
        total += [None] * untimed + rates.sum(axis=0)[untimed:].tolist()
        each = np.concatenate([each, rates[:, untimed:]], axis=1)
    return total, each.tolist()


def compared(rows: Sequence[Row], reference: str) -> list[Row]:
    """The rows with ratios and differences to the rung `reference` of the same program."""
    found = {row.parallel: row for row in rows if row.rung == reference and row.timed}
    result = []
    for row in rows:
        one = found.get(row.parallel)
        if one is None or row is one or not row.timed:
            result.append(row)
            continue
        apart = differences(row.losses, one.losses) if row.is_comparable else ()
        ratio = reached(row.timed, 50) / reached(one.timed, 50)
        # A NaN must not get lost in max().
        worst = max(apart, key=lambda d: (d != d, d)) if apart else None
        result.append(dataclasses.replace(row, ratio=ratio, difference=worst))
    return result


HEADINGS = (
    *("program", "rung", "tokens/s p50", "p99", "of one world"),
    *("last loss", "largest difference", "MB sent", "remark"),
)


def table(rows: Sequence[Row]) -> str:
    """A line for each row, as Markdown."""
    return tables.markdown(HEADINGS, [_line(row) for row in rows])


def _line(row: Row) -> tuple[str, ...]:
    if not row.timed:
        state = "failed" if row.is_failed else "absent"
        return (row.parallel, row.text, *[""] * 6, f"{state}: {row.reason}")
    rates = [f"{p50:,.0f}" for p50 in row.islands]
    sent = sum(n for transport, n in row.bytes_sent.items() if transport != "local")
    return (
        row.parallel,
        row.text,
        f"{reached(row.timed, 50):,.0f}",
        f"{reached(row.timed, 99):,.0f}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        f"{row.losses[-1]:.4f}",
        "" if row.difference is None else f"{row.difference:.1e}",
        f"{sent / 1e6:.2f}" if sent else "",
        "; ".join(filter(None, (" + ".join(rates), row.remark))),
    )


def plot(path: pathlib.Path, rows: Sequence[Row], field: str, label: str) -> None:
    """Draws `field` of each row over the step, a panel for each program, as a PNG."""
    rows = [row for row in rows if row.timed]
    programs = list(dict.fromkeys(row.parallel for row in rows))
    if not programs:
        return
    figure = Figure(figsize=(8, 0.8 + 3.4 * len(programs)), layout="constrained")
    panels = figure.subplots(len(programs), squeeze=False)[:, 0]
    for axes, program in zip(panels, programs, strict=True):
        for row in rows:
            if row.parallel == program:
                values = [np.nan if v is None else v for v in getattr(row, field)]
                steps = np.arange(1, len(values) + 1)
                axes.plot(steps, values, label=row.rung, linewidth=1, alpha=0.8)
        axes.set(title=program, xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", ncols=4)
    figure.savefig(path, dpi=150, format="png")
