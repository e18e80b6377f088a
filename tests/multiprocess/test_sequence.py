"""Training with rows split over islands: keys and values cross from one to the other."""

import pathlib

import pytest

from models import parity
from tests.support.jobs import FAST_COMPILE

TRAINING = ("--config=tiny", "--batch=4", "--seq=36", "--loss-chunk=7", "--log-every=2")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "words",
    [
        ("--meshes=sequence=2", "--devices=1", "--unlike=", "--steps=4"),
        ("--meshes=sequence=4", "--steps=6"),
        ("--meshes=sequence=2,data=2", "--steps=4", "--unlike=", "--accumulate=2"),
        ("--meshes=sequence=2,model=2", "--steps=4", "--unlike=", "--remat=full"),
    ],
    ids=lambda words: words[0],
)
def test_rows_split_over_islands_train_as_in_one_world(
    words: tuple[str, ...], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", FAST_COMPILE["XLA_FLAGS"])
    results = parity.run(parity.parse([*words, *TRAINING, f"--out={tmp_path}"]))
    for result in results:
        assert not result.failures, (result.run, result.failures)
    islands = results[2]
    assert islands.run == parity.ISLANDS
    assert islands.gradient is not None
    assert islands.gradient < 1e-4
