"""`benchmarks.ladder` on CPU: what it runs, compares and writes; not how fast it is."""

import json
import math
import pathlib
import time
from typing import Any

import pytest
from matplotlib.image import imread

from benchmarks import ladder, ladder_rungs
from benchmarks.gpu_jobs import Setting
from benchmarks.ladder_report import Row, compared, rates_of
from benchmarks.ladder_rungs import DEFAULT, PARALLEL, REFERENCE, RUNGS, why_absent
from benchmarks.training import Program, Trace
from jaxhet.testing import Shape
from tests.support.commands import python

SMALL = ("--platform=cpu", "--layers=1", "--seq=8", "--steps=6", "--turns=2")
CPU = Setting("cpu", Shape(2, 1, 2))
PROGRAM = Program("tiny", PARALLEL["stage"], scan=True, batch=8, seq=8)


def climb(folder: pathlib.Path, *options: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Runs the ladder; its rows as written, by program and rung."""
    result = python("-m", "benchmarks.ladder", f"--out={folder}", *options, timeout_s=900)
    assert (folder / "ladder.md").read_text() == result.stdout
    for name in ("tokens.png", "losses.png"):
        assert imread(folder / name).ndim == 3
    written = json.loads((folder / "ladder.json").read_text())
    assert written["device"] == "cpu"
    return {(row["parallel"], row["rung"]): row for row in written["rows"]}


def assert_agree(rows: dict[tuple[str, str], dict[str, Any]], steps: int) -> None:
    """Rungs that train the same batches have the same losses, but for rounding."""
    for (parallel, name), row in rows.items():
        assert row["reason"] or len(row["losses"]) == len(row["tokens_per_s"]) == steps
        if row["reason"] or not row["is_comparable"]:
            continue
        assert row["losses"] == pytest.approx(rows[parallel, REFERENCE]["losses"], rel=1e-4), name
        if name != REFERENCE:
            assert row["difference"] < 1e-4
            assert row["ratio"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whole_ladder_runs_in_its_time(tmp_path: pathlib.Path) -> None:
    start = time.monotonic()
    rows = climb(tmp_path, "--platform=cpu")
    seconds = time.monotonic() - start
    assert [*rows] == [(parallel, rung) for parallel in PARALLEL for rung in DEFAULT]
    assert_agree(rows, steps=ladder.DEFAULTS["cpu"]["steps"])
    assert {rung for (_, rung), row in rows.items() if row["reason"]} == {"device_direct"}
    for parallel in PARALLEL:
        assert rows[parallel, "verbs"]["bytes_sent"]["verbs"] > 0
        assert rows[parallel, "alone"]["exchanges"] == 0
        assert len(rows[parallel, "alone"]["islands"]) == 2
    # Sums of a stage's gradients stay on an island: exchanges only if islands are split.
    assert rows["stage", "all_socket"]["exchanges"] > rows["stage", "socket"]["exchanges"]
    assert seconds < 180


@pytest.mark.parametrize(
    ("name", "setting", "words"),
    [
        ("device_direct", CPU, "cuda_ipc does not exist between islands of CPUs"),
        (
            "all_socket",
            Setting("cpu", Shape(2)),
            "each island has one device: the same as the rung",
        ),
        ("socket", CPU, ""),
    ],
)
def test_rung_says_why_it_is_absent(name: str, setting: Setting, words: str) -> None:
    reason = why_absent(RUNGS[name], setting)
    assert words in reason
    assert bool(words) == bool(reason)


def trace(island: int, *seconds: float) -> Trace:
    return Trace(island, list(seconds), [1.0] * len(seconds), 0, {})


def test_step_takes_as_long_as_on_the_slowest_process() -> None:
    turns = [[trace(0, 9, 1, 2), trace(0, 9, 4, 1)], [trace(0, 9, 8, 1), trace(0, 9, 1, 1)]]
    total, each = rates_of(turns, tokens=8, untimed=1)
    assert total == [None, 2.0, 4.0, None, 1.0, 8.0]
    assert each == [[2.0, 4.0, 1.0, 8.0]]


def row(rung: str, rates: list[float | None], losses: list[float], **more: Any) -> Row:
    return Row("data", rung, RUNGS[rung].text, tokens_per_s=rates, losses=losses, **more)


def test_rows_are_compared_with_one_world() -> None:
    rows = compared(
        [
            row("socket", [None, 2.0], [2.0, 1.1]),
            row("host", [None, 3.0], [2.0, math.nan]),
            row("alone", [None, 8.0], [9.0, 9.0], is_comparable=False),
            Row("data", "verbs", "", reason="no NIC"),
            Row("fsdp", "socket", "", tokens_per_s=[1.0], losses=[1.0]),
            row(REFERENCE, [None, 4.0], [2.0, 1.0]),
        ],
        REFERENCE,
    )
    assert [r.ratio for r in rows] == [0.5, 0.75, 2.0, None, None, None]
    assert rows[0].difference == pytest.approx(0.1)
    assert math.isnan(rows[1].difference or 0.0)
    assert [r.difference for r in rows[2:]] == [None] * 4


def test_failed_rung_is_a_row_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> Any:
        raise AssertionError("a worker ended:\njaxhet.PeerError: process 1 is gone\nbye\n")

    monkeypatch.setattr(ladder_rungs.Rung, "start", start)
    one = ladder.Ladder(CPU, {"data": PROGRAM}, ("socket",), steps=6, turns=2)
    rows, facts = ladder.climb(one)
    assert [(r.is_failed, r.reason) for r in rows] == [
        (True, "jaxhet.PeerError: process 1 is gone")
    ]
    assert not facts
