"""`benchmarks.ladder` on CPU: what it runs, compares and writes; not how fast it is."""

import dataclasses
import functools
import json
import math
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
from matplotlib.image import imread

from benchmarks import ladder, ladder_rungs
from benchmarks.gpu_jobs import Setting
from benchmarks.ladder_report import HEADINGS, Row, compared, plot, rates_of, reached, table
from benchmarks.ladder_rungs import DEFAULT, PARALLEL, REFERENCE, RUNGS, why_absent, why_impossible
from benchmarks.training import Program, Trace
from jaxhet.testing import Shape
from tests.support.jobs import ROOT

SMALL = ("--platform=cpu", "--layers=1", "--seq=8", "--steps=6", "--turns=2")
CPU = Setting("cpu", Shape(2, 1, 2))
PROGRAM = Program("tiny", PARALLEL["stage"], scan=True, batch=8, seq=8)


def climb(folder: pathlib.Path, *options: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Runs the ladder; its rows as written, by program and rung."""
    command = [sys.executable, "-m", "benchmarks.ladder", f"--out={folder}", *options]
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
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


def test_two_rungs_of_real_jobs(tmp_path: pathlib.Path) -> None:
    rungs = ("shm", REFERENCE)
    options = (*SMALL, "--shape=2x1x1", "--parallel=data", f"--rungs={','.join(rungs)}")
    rows = climb(tmp_path, *options)
    assert [*rows] == [("data", rung) for rung in rungs]
    assert_agree(rows, steps=6)
    assert rows["data", "shm"]["bytes_sent"]["shm"] > 0
    assert not rows["data", REFERENCE]["bytes_sent"]


@pytest.mark.slow  # eight processes that compile: about 100 s of CPU time
@pytest.mark.timeout(900)
def test_ladder_has_rows_for_all_rungs_and_equal_losses(tmp_path: pathlib.Path) -> None:
    rungs = ("all_tcp", "tcp", "device_direct", REFERENCE)
    options = (*SMALL, "--parallel=data", f"--rungs={','.join(rungs)}")
    rows = climb(tmp_path, *options)
    assert [*rows] == [("data", rung) for rung in rungs]
    assert "does not exist between islands of CPUs" in rows["data", "device_direct"]["reason"]
    assert_agree(rows, steps=6)
    assert rows["data", "all_tcp"]["losses"][-1] < rows["data", "all_tcp"]["losses"][0]
    split, crossing = rows["data", "all_tcp"], rows["data", "tcp"]
    assert split["bytes_sent"]["tcp"] > crossing["bytes_sent"]["tcp"] > 0
    assert split["bytes_sent"].get("local", 0) < crossing["bytes_sent"]["local"]
    assert not rows["data", REFERENCE]["bytes_sent"]
    assert [rate is None for rate in split["tokens_per_s"]] == [True, True, False] * 2


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
    # Between the devices of an island, the stages' sums of gradients are exchanges only if split.
    assert rows["stage", "all_tcp"]["exchanges"] > rows["stage", "tcp"]["exchanges"]
    assert seconds < 180


def test_every_device_is_an_island_on_the_first_rung() -> None:
    assert RUNGS["all_tcp"].shape(CPU.shape) == Shape(4, 1, 1)
    assert RUNGS["tcp"].shape(CPU.shape) == CPU.shape


def test_island_alone_has_its_share_of_the_batch() -> None:
    assert RUNGS["alone"].program(PROGRAM, 2) == dataclasses.replace(PROGRAM, batch=4)
    assert RUNGS["tcp"].program(PROGRAM, 2) == PROGRAM


@pytest.mark.parametrize(
    ("name", "setting", "words"),
    [
        ("device_direct", CPU, "cuda_ipc does not exist between islands of CPUs"),
        ("shm_ring", Setting("cuda", Shape(2)), "shm_ring does not exist between islands of GPUs"),
        ("all_tcp", Setting("cpu", Shape(2)), "each island has one device: the same as the rung"),
        ("tcp", CPU, ""),
    ],
)
def test_rung_says_why_it_is_absent(name: str, setting: Setting, words: str) -> None:
    reason = why_absent(RUNGS[name], setting)
    assert words in reason
    assert bool(words) == bool(reason)


@pytest.mark.parametrize(
    ("name", "shape", "rows", "words"),
    [
        ("alone", Shape(2), 8, "one island has 1 device(s); stage=2,data=-1 needs a multiple of 2"),
        ("tcp", Shape(2, 1, 2), 6, "the job has 6 rows; stage=2,data=-1 needs a multiple of 8"),
        ("alone", Shape(2, 1, 2), 8, ""),
    ],
)
def test_rung_says_why_it_cannot_run(name: str, shape: Shape, rows: int, words: str) -> None:
    reason = why_impossible(RUNGS[name], dataclasses.replace(PROGRAM, batch=rows), shape)
    assert reason.startswith(words)
    assert bool(words) == bool(reason)


def test_missing_nic_and_software_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> None:
        raise FileNotFoundError("cmake")

    monkeypatch.setattr(ladder_rungs, "has_rdma_nic", lambda: False)
    assert "a libibverbs in software" in RUNGS["verbs"].remark(CPU)
    monkeypatch.setattr(ladder_rungs, "softverbs", build)
    uncached = functools.cache(ladder_rungs._why_no_verbs.__wrapped__)
    monkeypatch.setattr(ladder_rungs, "_why_no_verbs", uncached)
    words = "no RDMA NIC, and the software libibverbs of tests/softverbs was not built: cmake"
    assert why_absent(RUNGS["verbs"], CPU) == words
    monkeypatch.setattr(ladder_rungs, "has_rdma_nic", lambda: True)
    assert not RUNGS["verbs"].remark(CPU)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shape=1x1x2"], "has one island, and a ladder needs two"),
        (["--steps=4", "--turns=2"], "leaves nothing to time: the first 2 steps of a turn"),
        (["--rungs=tcp,fast"], "'tcp,fast': choose of all_tcp, tcp"),
    ],
)
def test_options_that_cannot_be_used_are_said(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ladder.parse(["--platform=cpu", *options])
    assert words in capsys.readouterr().err


def test_turns_divide_all_steps() -> None:
    assert ladder.Ladder(CPU, {}, (), steps=10, turns=3).turn_steps == [3, 3, 4]


def test_percentile_is_the_rate_that_so_many_steps_reach() -> None:
    rates = [float(rate) for rate in range(1, 201)]
    assert reached(rates, 99) == 2.0
    assert sum(rate >= reached(rates, 99) for rate in rates) >= 0.99 * len(rates)
    assert reached([3.0, 1.0, 2.0], 50) == 2.0
    assert reached([7.0], 99) == 7.0


def trace(island: int, *seconds: float) -> Trace:
    return Trace(island, list(seconds), [1.0] * len(seconds), 0, {})


def test_step_takes_as_long_as_on_the_slowest_process() -> None:
    turns = [[trace(0, 9, 1, 2), trace(0, 9, 4, 1)], [trace(0, 9, 8, 1), trace(0, 9, 1, 1)]]
    total, each = rates_of(turns, tokens=8, untimed=1)
    assert total == [None, 2.0, 4.0, None, 1.0, 8.0]
    assert each == [[2.0, 4.0, 1.0, 8.0]]


def test_islands_alone_are_added_up() -> None:
    total, each = rates_of([[trace(0, 9, 1), trace(1, 9, 4)]], tokens=8, untimed=1)
    assert total == [None, 10.0]
    assert each == [[8.0], [2.0]]


def row(rung: str, rates: list[float | None], losses: list[float], **more: Any) -> Row:
    return Row("data", rung, RUNGS[rung].text, tokens_per_s=rates, losses=losses, **more)


def test_rows_are_compared_with_one_world() -> None:
    rows = compared(
        [
            row("tcp", [None, 2.0], [2.0, 1.1]),
            row("shm", [None, 3.0], [2.0, math.nan]),
            row("alone", [None, 8.0], [9.0, 9.0], is_comparable=False),
            Row("data", "verbs", "", reason="no NIC"),
            Row("fsdp", "tcp", "", tokens_per_s=[1.0], losses=[1.0]),
            row(REFERENCE, [None, 4.0], [2.0, 1.0]),
        ],
        REFERENCE,
    )
    assert [r.ratio for r in rows] == [0.5, 0.75, 2.0, None, None, None]
    assert rows[0].difference == pytest.approx(0.1)
    assert math.isnan(rows[1].difference or 0.0)
    assert [r.difference for r in rows[2:]] == [None] * 4


def test_table_has_figures_or_a_reason_in_each_line() -> None:
    lines = table(
        [
            row("tcp", [None, 1000.0, 2000.0], [2.0, 1.5], bytes_sent={"tcp": 3e6, "local": 9e6}),
            row("alone", [500.0], [1.0], islands=[200.0, 300.0], remark="half of the batch"),
            Row("data", "verbs", "RDMA", reason="no NIC"),
            Row("data", "shm", "shared", reason="PeerError", is_failed=True),
        ]
    ).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == [*HEADINGS]
    assert cells[2][2:] == ["1,000", "1,000", "", "1.5000", "", "3.00", ""]
    assert cells[3][-1] == "200 + 300; half of the batch"
    assert cells[4][1:] == ["RDMA", *[""] * 6, "absent: no NIC"]
    assert cells[5][-1] == "failed: PeerError"


def test_failed_rung_is_a_row_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> Any:
        raise AssertionError("a worker ended:\njaxhet.PeerError: process 1 is gone\nbye\n")

    monkeypatch.setattr(ladder_rungs.Rung, "start", start)
    one = ladder.Ladder(CPU, {"data": PROGRAM}, ("tcp",), steps=6, turns=2)
    rows, facts = ladder.climb(one)
    assert [(r.is_failed, r.reason) for r in rows] == [
        (True, "jaxhet.PeerError: process 1 is gone")
    ]
    assert not facts


def test_plot_of_rows_without_figures_is_not_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "tokens.png"
    plot(path, [Row("data", "verbs", "", reason="no NIC")], "tokens_per_s", "tokens/s")
    assert not path.exists()
