"""An uneven pipeline on islands of unequal speed: their layers sleep, so load decides nothing."""

import pathlib

import numpy as np
import pytest

from models.extras.records import METRICS, read_rows
from tests.support.commands import launch, python

LAYER_S = 0.005, 0.015  # the first island is three times as fast
MICROBATCHES = 4
TURNS = MICROBATCHES + 2  # times that each stage computes in a step, of two stages


@pytest.mark.slow
def test_measured_stages_beat_equal_ones_on_islands_of_unequal_speed(
    tmp_path: pathlib.Path,
) -> None:
    where = tuple(f"--island-env=island{i}:LAYER_S={s}" for i, s in enumerate(LAYER_S))
    run = f"--mesh=stage=2 --remat=full --microbatches={MICROBATCHES} --batch={MICROBATCHES}"
    run += " --seq=8 --steps=8 --log-every=1"
    folders = tmp_path / "even", tmp_path / "auto"
    runs = [f"{run} --run-dir={folders[0]}", f"{run} --run-dir={folders[1]} --stages=auto"]
    program = ("-m", "tests.multiprocess.several_runs", *runs)
    python(*launch("--islands=2", "--devices=1", *where), *program)
    even, auto = (read_rows(folder / METRICS) for folder in folders)
    assert [row["stages"]["layers"] for row in auto if "stages" in row] == [[3, 1]]
    seconds = [min(row["seconds"] for row in rows[1:]) for rows in (even, auto)]
    # Each layer sleeps forward, again where it is computed again, and twice as long backward.
    assert seconds[0] >= 4 * TURNS * 2 * LAYER_S[1]
    assert seconds[1] >= 4 * TURNS * max(3 * LAYER_S[0], LAYER_S[1])
    assert seconds[1] < 0.75 * seconds[0], seconds  # 0.5 and the products
    losses = [[row["loss"] for row in rows] for rows in (even, auto)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
