"""Training over islands with unlike arithmetic: one compiles for AVX, without FMA."""

import pathlib
from typing import Any

import pytest

from models.extras.records import METRICS, compare_replicas, read_rows
from tests.support.commands import launch, python

UNLIKE = "island1:XLA_FLAGS=--xla_cpu_max_isa=AVX"


def pretrain(run_dir: pathlib.Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    """Trains `tiny` on 2 islands x 2 devices; the rows of its log lines, and its output."""
    train = "-m models.pretrain --config tiny --batch 8 --seq 16 --digest --log-every 20 --run-dir"
    job = launch("--devices=2", f"--island-env={UNLIKE}")
    ended = python(*job, *train.split(), run_dir, *options, env={"XLA_FLAGS": ""})
    rows = [row for row in read_rows(run_dir / METRICS) if "replicas" in row]
    return rows, ended.stderr


def assert_stays_equal(mesh: str, steps: int, run_dir: pathlib.Path, record: Any) -> None:
    """Trains for a number of steps without a difference."""
    rows, said = pretrain(run_dir, "--mesh", mesh, "--steps", str(steps))
    assert "the update is split over" in said
    assert [row["step"] for row in rows] == list(range(20, steps + 1, 20))
    for row in rows:
        assert row["replicas"]["different"] == 0, row
        assert row["replicas"]["compared"] > 0
    replicas = compare_replicas(run_dir)
    assert replicas.equal, replicas.differences
    record("leaves", f"{mesh}: {rows[0]['replicas']['compared']} leaves compared")


def test_sharded_update_keeps_replicas_equal(tmp_path: pathlib.Path, record_property: Any) -> None:
    assert_stays_equal("data=4", 20, tmp_path, record_property)  # a replicated update has drifted


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=4", "data=2,model=2", "fsdp=4", "fsdp=2,model=2"])
def test_sharded_update_keeps_replicas_equal_on(
    mesh: str, tmp_path: pathlib.Path, record_property: Any
) -> None:
    assert_stays_equal(mesh, 300, tmp_path, record_property)


@pytest.mark.slow
def test_replicated_update_drifts_is_reported_at_the_first_log_line_and_healed(
    tmp_path: pathlib.Path,
) -> None:
    options = ("--steps", "40", "--update", "replicated", "--on-difference", "sync")
    rows, said = pretrain(tmp_path, *options)
    assert [row["replicas"]["different"] > 0 for row in rows] == [True, True]
    assert 0 < rows[0]["replicas"]["largest_difference"] < 1e-3
    assert "step 20: replicas differ in" in said
    assert "(on island1; largest difference" in said
    assert "made equal" in said
    replicas = compare_replicas(tmp_path)  # replicas that the run continued with
    assert replicas.equal, replicas.differences


@pytest.mark.slow
def test_drift_that_is_not_healed_goes_on(tmp_path: pathlib.Path) -> None:
    rows, said = pretrain(tmp_path, "--steps", "40", "--update", "replicated")
    assert [row["replicas"]["different"] > 0 for row in rows] == [True, True]
    assert "--update sharded avoids it" in said
    different = compare_replicas(tmp_path).differences
    assert different
    # They were made equal after initialization.
    assert not [d for d in different if d.startswith("step 0,")]


@pytest.mark.slow
def test_difference_ends_a_run_that_asks_for_it(tmp_path: pathlib.Path) -> None:
    with pytest.raises(AssertionError, match=r"step 20: replicas differ in .*--update sharded"):
        pretrain(tmp_path, "--steps", "40", "--update", "replicated", "--on-difference", "raise")
    assert read_rows(tmp_path / METRICS)[-1]["step"] == 20
