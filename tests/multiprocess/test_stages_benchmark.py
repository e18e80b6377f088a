"""The benchmark of uneven pipelines: what it writes and what it refuses; not how fast it is."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.support.jobs import ROOT


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.stages", "--steps=2", "--rows=4", "--repeats=1"]
    return subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_splits_are_timed_and_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "figures.json"
    ended = run("--splits", "2,2", "1,3", "--slow=--xla_cpu_max_isa=AVX", f"--json={path}")
    assert ended.returncode == 0, ended.stderr
    assert "| layers of each stage | rows without a layer | step, ms | ÷ 2,2 |" in ended.stdout
    written = json.loads(path.read_text())
    assert written["slow"] == "--xla_cpu_max_isa=AVX"
    assert [(row["stages"], row["empty"]) for row in written["rows"]] == [
        ("2,2", "skipped"),
        ("1,3", "skipped"),
        ("1,3", "computed"),
    ]
    assert all(row["step_s"] > 0 for row in written["rows"])


@pytest.mark.slow
def test_split_that_fails_is_named_with_the_cause() -> None:
    ended = run("--splits", "2,3")
    assert ended.returncode == 1
    assert "python -m benchmarks.stages: 2,3 failed:" in ended.stderr
    assert "(2, 3) don't divide 4 layers" in ended.stderr
