"""Training on meshes whose axes cross islands, beside one world.

With `sequence` keys and values cross, with `expert` tokens, with `stage` and `model` activations.
"""

import pathlib

import pytest

from jaxhet.testing import FAST_COMPILE
from models import parity
from models.extras.parity_runs import ISLANDS

TRAINING = ("--config=tiny", "--batch=4", "--seq=36", "--loss-chunk=7", "--log-every=2")
ONE_FLOOR = "--permutations=1"
FLOAT64 = ("--dtype=float64", "--param-dtype=float64", "--moments-dtype=float64")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "words",
    [
        ("--meshes=sequence=2", "--devices=1", "--unlike=", "--steps=4"),
        ("--meshes=sequence=4", "--steps=6"),
        ("--meshes=sequence=2,data=2", "--steps=4", "--unlike=", "--accumulate=2"),
        ("--meshes=sequence=2,model=2", "--steps=4", "--unlike=", "--remat=full"),
        ("--meshes=expert=4", "--config=moe", "--steps=3", "--unlike="),
        # Four layers with a tied embedding, which both stages need.
        (
            *("--meshes=stage=2,data=2", "--config=demo-qwen", "--stages=3,1", "--batch=8"),
            *("--steps=3", "--unlike="),
        ),
        ("--meshes=model=2,data=2", "--config=tiny-qwen2", "--steps=4"),
        # Rounding in float64 is the allowed difference, also over unlike islands.
        ("--meshes=data=2,model=2", "--config=tiny-qwen", "--steps=6", "--warmup=5", *FLOAT64),
    ],
    ids=lambda words: words[0].removeprefix("--meshes="),
)
def test_training_over_islands_is_that_of_one_world(
    words: tuple[str, ...], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--dtype=float64" in words:  # optimized: otherwise no island has FMA
        monkeypatch.setenv("JAX_ENABLE_X64", "1")
    else:
        monkeypatch.setenv("XLA_FLAGS", FAST_COMPILE["XLA_FLAGS"])
    results = parity.run(parity.parse([*TRAINING, *words, ONE_FLOOR, f"--out={tmp_path}"]))
    for result in results:
        assert not result.failures, (result.run, result.failures)
    (islands,) = (result for result in results if result.run == ISLANDS)
    assert islands.gradient is not None
    assert islands.gradient < 1e-4
