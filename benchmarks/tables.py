"""Results as Markdown tables, to be read in a terminal and pasted into documents."""

import dataclasses
import datetime
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from models.extras.parity_report import commit


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are aligned as text, too."""
    lines = [list(headings), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]

    def text(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([text(lines[0]), rule, *map(text, lines[1:])])


def made_at() -> str:
    """Commit, day and machine of the figures above it, for documents."""
    load, _, _ = os.getloadavg()
    day = datetime.datetime.now(datetime.UTC).date()
    cpus = os.cpu_count()
    return f"Made at commit {commit()} on {day}; {cpus} CPUs, load average {load:.1f}."


def with_bar(value: float, bar: float | None) -> str:
    """A ratio with its bar: MISSED where it is below."""
    return (
        f"{value:.2f}"
        if bar is None
        else f"{value:.2f} {'≥' if value >= bar else 'MISSED'} {bar:g}"
    )


def write_json(path: pathlib.Path | None, facts: dict[str, Any], rows: Sequence[Any]) -> None:
    """Writes `facts`, and `rows` (dataclasses) as their member `rows`; nothing without a path."""
    if path:
        written = {**facts, "rows": [dataclasses.asdict(row) for row in rows]}
        path.write_text(json.dumps(written, indent=1) + "\n")
