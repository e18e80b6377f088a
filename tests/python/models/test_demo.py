import dataclasses
from pathlib import Path

import pytest

from benchmarks import demo
from models.extras.records import Replicas

GOOD = demo.Demo(
    islands=2,
    devices=2,
    config="tiny",
    dtype="float32",
    steps=30,
    batch=8,
    seed=0,
    log_every=10,
    run_dir=Path("runs/demo"),
)
EQUAL = Replicas(steps=3, devices=4, compared=9, fewest=2, differences=())


def rows(change: float = 0.0, at: int = 1, **counters: float) -> demo.Rows:
    """Metrics of 30 steps whose loss is 2, from step `at` on higher by the fraction `change`."""
    return [
        {"step": step, "loss": 2.0 * (1 + change * (step >= at)), **counters}
        for step in range(1, 31)
    ]


def checked(islands: demo.Rows, floor: float = 1e-3, replicas: Replicas = EQUAL, **changes) -> str:
    run = dataclasses.replace(GOOD, **changes)
    seen = demo.compare(islands, rows(), rows(floor, at=25), replicas)
    return "; ".join(demo.failures(run, seen))


def test_equal_runs_pass():
    assert not checked(rows(exchanges_completed=3))
    assert not checked(rows(exchanges_completed=3), floor=0.0)


def test_difference_is_checked_strictly_at_first_and_by_the_floor_later():
    assert "2.0e-05 in the first 20 steps; allowed is 1e-05" in checked(
        rows(2e-5, exchanges_completed=3)
    )
    assert not checked(rows(1.9e-3, at=21, exchanges_completed=3))
    assert "after step 20; allowed is 2 times the noise floor of 1.0e-03" in checked(
        rows(2.1e-3, at=21, exchanges_completed=3)
    )
    assert "losses differ by nan" in checked(rows(float("nan"), exchanges_completed=3))


def test_narrow_types_are_checked_by_their_bits_only():
    assert not checked(rows(1e-2, exchanges_completed=3), dtype="bfloat16")
    differ = dataclasses.replace(EQUAL, differences=("step 5, w[0:2]: devices 0, 2 differ",))
    assert checked(rows(exchanges_completed=3), replicas=differ, dtype="float16") == (
        "parameters differ: step 5, w[0:2]: devices 0, 2 differ"
    )


@pytest.mark.parametrize("lack", [{"devices": 2}, {"fewest": 1}])
def test_missing_digests_fail(lack):
    text = checked(rows(exchanges_completed=3), replicas=dataclasses.replace(EQUAL, **lack))
    assert "replicas can't be compared" in text


def test_run_without_exchanges_fails():
    assert checked(rows()) == "no exchange between the islands was counted"
