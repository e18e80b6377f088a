"""`jaxhet bench` on two islands: what it measures, checks and says."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import pytest

from jaxhet import bench
from jaxhet._errors import UsageError
from jaxhet.bench import cases
from jaxhet.cli import bench as command
from jaxhet.testing import FAST_COMPILE
from tests.support.jobs import ROOT

_CLI = [sys.executable, "-m", "jaxhet.cli"]


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAXHET_")}
    return subprocess.run(
        [*_CLI, *words],
        check=False,
        cwd=ROOT,
        env={**env, **FAST_COMPILE, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )


def _check(written: dict[str, Any], dtypes: tuple[str, ...], n: int) -> None:
    rows = written["rows"]
    found = {(row["collective"], row["dtype"]) for row in rows}
    assert found == {(c, dtype) for c in bench.COLLECTIVES for dtype in dtypes}
    for row in rows:
        assert not row["problem"], row
        assert row["num_wrong"] == 0, row
        assert row["count"] % n == 0
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["algbw_gb_s"] == pytest.approx(row["bytes"] / row["p50_us"] / 1e3)
        factor = bench.busbw_factor(row["collective"], n)
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * factor)


def test_every_collective_is_timed_and_right_in_a_launched_job(tmp_path: pathlib.Path):
    path = tmp_path / "rows.json"
    bench_words = ["bench", "--sizes=1001", "--dtypes=float32,int8", "--iterations=3"]
    launch = ["launch", "--islands", "2", "--devices", "1,2", "--"]
    ended = _run(*launch, *_CLI, *bench_words, f"--json={path}")
    assert ended.returncode == 0, ended.stderr
    written = json.loads(path.read_text())
    _check(written, ("float32", "int8"), 3)
    assert written["islands"].startswith("island0: 1 processes, 1 devices (cpu), island1: 1 proc")
    sizes = {row["bytes"] for row in written["rows"]}
    assert sizes == {996, 999}  # multiples of three elements
    lines = ended.stdout.splitlines()
    assert all(line.startswith("[island0/0] ") for line in lines)
    assert len([line for line in lines if not line.startswith("[island0/0] #")]) == 10
    assert "wrong elements: 0; not run: 0" in lines[-1]


@pytest.mark.slow
def test_every_type_is_right(tmp_path: pathlib.Path):
    path = tmp_path / "rows.json"
    words = ["bench", "--sizes=4K", "--dtypes=all", "--iterations=1"]
    ended = _run("launch", "--islands", "2", "--", *_CLI, *words, f"--json={path}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    _check(json.loads(path.read_text()), bench.DTYPES, 2)


def test_bench_without_a_job_says_how_to_get_one():
    ended = _run("bench")
    assert ended.returncode == 2
    assert "no coordinator_address" in ended.stderr
    assert "`jaxhet launch`" in ended.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"collectives": "all_sum"}, "--collectives 'all_sum' is not valid; it takes"),
        ({"dtypes": "bf16"}, "--dtypes 'bf16' is not valid; it takes all, or int8"),
        ({"dtypes": ","}, "--dtypes is empty"),
        ({"sizes": "1K,x"}, "--sizes '1K,x' is not a list of bytes like 1K,16M,1G"),
        ({"sizes": "0"}, "is not a list of bytes"),
    ],
)
def test_option_that_is_wrong(options: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=words):
        command.bench(**options)


@pytest.mark.parametrize("collective", bench.COLLECTIVES)
@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_a_wrong_element_is_counted(
    collective: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = bench.Case(collective, 400, 0, dtype)
    assert bench.prepare(case).num_wrong == 0
    right = cases._collective(case)

    def spoilt(x: jax.Array) -> jax.Array:
        return right(x).at[5].add(1).at[7].add(3)

    monkeypatch.setattr(cases, "_collective", lambda case: spoilt)
    assert bench.prepare(case).num_wrong == 2 * jax.device_count()
