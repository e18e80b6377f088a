"""Results of `benchmarks.mesh_sweep` for a mesh, as rows of a table and of a plot."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.tables import made_at


@dataclasses.dataclass(frozen=True)
class Row:
    """The cost of a step on one mesh for a rank; `seconds`: its time, planned: its exchanges'."""

    mesh: str
    bytes_across: float
    exchanges: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Measured(Row):
    """The row of a run."""

    tokens_per_s: float
    loss: float


@dataclasses.dataclass(frozen=True)
class Planned(Row):
    """The row of a plan. Exchanges of an unknown number of runs count once, and not `is_exact`."""

    overlapped: float  # the share of the seconds
    is_exact: bool


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table: a field of the rows, times a factor."""

    heading: str
    field: str
    factor: float
    form: str

    def value(self, row: Row) -> float:
        """Value of a row, in the column's unit."""
        return getattr(row, self.field) * self.factor


_ACROSS = (
    Column("MB across", "bytes_across", 1e-6, ".2f"),
    Column("exchanges", "exchanges", 1, "g"),
)
COLUMNS: dict[type[Row], tuple[Column, ...]] = {
    Measured: (
        *_ACROSS,
        Column("step, ms (p50)", "seconds", 1e3, ".1f"),
        Column("tokens/s", "tokens_per_s", 1, ".0f"),
        Column("loss", "loss", 1, ".4f"),
    ),
    Planned: (
        *_ACROSS,
        Column("exchanges, ms", "seconds", 1e3, ".3f"),
        Column("overlapped, %", "overlapped", 100, ".0f"),
    ),
}
PLOTTED = 3  # the first ones, those of `Row`


def show(title: str, kind: type[Row], results: Mapping[str, Row | str], console: Console) -> None:
    """Prints a line for each mesh: its row of that kind, or what failed."""
    columns = COLUMNS[kind]
    table = Table(title=title)
    table.add_column("mesh")
    for column in columns:
        table.add_column(column.heading, justify="right")
    for mesh, row in results.items():
        if isinstance(row, str):
            table.add_row(mesh, "failed")
        else:
            table.add_row(mesh, *(format(column.value(row), column.form) for column in columns))
    console.print(table)
    console.print(made_at())
    for mesh, row in results.items():
        if isinstance(row, str):
            console.print(f"{mesh} failed: {row}", style="bold red")
        elif isinstance(row, Planned) and not row.is_exact:
            console.print(f"{mesh}: at least; how often a loop runs is not known")


def plot(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Draws bytes across, exchanges and time of a step for each mesh, as a PNG."""
    figure = Figure(figsize=(11, 1.2 + 0.4 * len(rows)), layout="constrained")
    panels = COLUMNS[type(rows[0])][:PLOTTED]
    names = [row.mesh for row in rows]
    for axes, column in zip(figure.subplots(1, PLOTTED, sharey=True), panels, strict=True):
        bars = axes.barh(names, [column.value(row) for row in rows])
        axes.bar_label(bars, fmt="%.3g", padding=2)
        axes.set(xlabel=column.heading)
        axes.margins(x=0.2)
    figure.axes[0].invert_yaxis()
    figure.savefig(path, dpi=150, format="png")
