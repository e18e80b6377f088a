"""The benchmark of unequal islands: what it writes and what it refuses; not how fast it is."""

import json
import os
import pathlib
import subprocess

import pytest

from benchmarks.efficiency import (
    PINNED,
    Row,
    numbers_of_cores,
    parts_of_cores,
    table,
    table_rows,
)
from tests.support.commands import python

_SPIN = """
import time
began = time.perf_counter()
while time.perf_counter() < began + 1:
    pass
print(time.process_time())
"""


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = ("-m", "benchmarks.efficiency", "--config=tiny", "--turns=1")
    return python(*command, *options, exit_code=None)


def test_ideal_is_the_sum_of_the_islands_alone() -> None:
    rates = {"island 0 alone": 200.0, "island 1 alone": 100.0, "even": 198.0, "auto": 291.0}
    rows = table_rows(rates, ["island 0 alone", "island 1 alone"], "32,16")
    assert rows[2] == Row("sum of the islands alone", 300, 1, "")
    assert rows[3] == Row("together, equal shares", 198, 0.66, "")
    assert "| together, measured shares | 291      | 0.970 | 32,16  |" in table(rows)


def test_islands_have_their_parts_of_a_core() -> None:
    assert parts_of_cores(["0", "1", "1"], [1, 0.6, 0.3]) == ["0,1", "0,0.6", "0.6,0.9"]
    with pytest.raises(ValueError, match="give the islands of core 1 parts above 0, with a sum"):
        parts_of_cores(["0", "1", "1"], [1, 0.6, 0.5])
    with pytest.raises(ValueError, match="parts above 0"):
        parts_of_cores(["0"], [0])


def test_islands_have_ranges_of_cores() -> None:
    assert numbers_of_cores(["0-7", "8-11", "12"]) == [8, 4, 1]
    for wrong in (["0-7", "7-9"], ["3-2", "4"]):
        with pytest.raises(ValueError, match="give islands equal cores, or none in common"):
            numbers_of_cores(wrong)
    with pytest.raises(ValueError, match="'0-x' is not a core, or a range such as 8-11"):
        numbers_of_cores(["0-x"])


def test_stopped_island_computes_in_its_part_only() -> None:
    core = min(os.sched_getaffinity(0))
    where = {"JAX_PLATFORMS": "cpu", "EFFICIENCY_CORE": str(core), "EFFICIENCY_PART": "0.5,0.8"}
    ended = subprocess.run(
        [*PINNED, "-c", _SPIN], env={**os.environ, **where}, capture_output=True, check=True
    )
    # At most 0.3 s, and what Python needs to start; less on a machine with other work.
    assert 0 < float(ended.stdout) < 0.6


@pytest.mark.slow
@pytest.mark.timeout(900)
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
@pytest.mark.timeout(900)
def test_layers_are_shared_too() -> None:
    ended = run("--share=stages")
    assert ended.returncode == 0, ended.stderr
    assert "| 1,1 " in ended.stdout.splitlines()[-3]
    assert ended.stdout.endswith("with the bubble of the pipeline at most 0.960 of the sum\n")
