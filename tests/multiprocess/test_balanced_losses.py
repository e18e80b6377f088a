"""Losses of 300 steps with unequal shares, compared with other orders of the same rows."""

import pathlib

import numpy as np
import pytest

from models.extras.records import METRICS, read_rows
from tests.support.commands import launch, python

STEPS = 300
RUNS = {
    "even": "--balance=even",
    "balanced": "--balance=6,2",
    "order 1": "--balance=even --permute=1",
    "order 2": "--balance=even --permute=2",
    "other weights": "--balance=even --weight-decay=0.1001",  # 0.1 % more
}


@pytest.mark.slow
def test_unequal_shares_differ_from_equal_ones_by_the_noise_of_orders(
    tmp_path: pathlib.Path,
) -> None:
    how = f"--mesh=data=2 --batch=16 --seq=32 --accumulate=4 --steps={STEPS} --log-every=50"
    folders = {name: tmp_path / name.replace(" ", "-") for name in RUNS}
    runs = [f"{how} {words} --run-dir={folders[name]}" for name, words in RUNS.items()]
    program = ("-m", "tests.multiprocess.several_runs", *runs)
    python(*launch("--islands=2", "--devices=1"), *program, timeout_s=280)
    losses = {
        name: np.array([row["loss"] for row in read_rows(folder / METRICS)])
        for name, folder in folders.items()
    }
    assert all(len(found) == STEPS for found in losses.values())
    assert losses["even"][-1] < 0.9 * losses["even"][0]  # it learns
    away = {
        name: float(np.sqrt(np.mean((found / losses["even"] - 1) ** 2)))
        for name, found in losses.items()
    }
    noise = 1.5 * max(away["order 1"], away["order 2"])
    assert noise < 1e-6
    assert away["balanced"] <= noise, away
    assert away["other weights"] > noise, away  # so a small mistake would be seen
