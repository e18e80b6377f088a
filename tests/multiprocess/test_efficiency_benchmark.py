"""The benchmark of unequal islands: what it writes and what it refuses; not how fast it is."""

import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks.efficiency import Row, table, table_rows
from tests.support.jobs import ROOT


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.efficiency", "--config=tiny", "--turns=1"]
    return subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_ideal_is_the_sum_of_the_islands_alone() -> None:
    rates = {"island 0 alone": 200.0, "island 1 alone": 100.0, "even": 198.0, "auto": 291.0}
    rows = table_rows(rates, ["island 0 alone", "island 1 alone"], "32,16")
    assert rows[2] == Row("sum of the islands alone", 300, 1, "")
    assert rows[3] == Row("together, equal shares", 198, 0.66, "")
    assert "| together, measured shares | 291      | 0.970 | 32,16  |" in table(rows)


@pytest.mark.slow
def test_cases_are_timed_and_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "figures.json"
    ended = run(f"--json={path}", f"--plot={tmp_path / 'bars.svg'}")
    assert ended.returncode == 0, ended.stderr
    assert "<svg" in (tmp_path / "bars.svg").read_text()
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 5
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert sum(map(int, rows[-1]["shares"].split(","))) == 96


@pytest.mark.slow
def test_layers_are_shared_too() -> None:
    ended = run("--share=stages")
    assert ended.returncode == 0, ended.stderr
    assert "| 1,1 " in ended.stdout.splitlines()[-3]
    assert ended.stdout.endswith("with the bubble of the pipeline at most 0.960 of the sum\n")


@pytest.mark.slow
def test_more_islands_than_cores_are_refused() -> None:
    ended = run("--burners=" + ",".join(["0"] * 1000))
    assert ended.returncode == 2
    assert "--burners has 1000 islands, there are" in ended.stderr
