"""A published model is fine-tuned over islands as in one world."""

import json
import pathlib
import shutil
import statistics

import pytest

from models import generate
from models.extras import perplexity
from models.extras.parity_runs import ISLANDS, ONE_WORLD, OTHER, PERMUTED, UNLIKE
from models.extras.records import METRICS, read_rows
from tests.support.commands import python
from tests.support.small_model import SMOLLM2, needs_smollm2

STEPS = 50
PARITY = ["-m", "models.parity", "--meshes", "data=2", "--devices=1"]
TRAINING = ["--learning-rate=1e-4", "--warmup=5", "--update=sharded", "--batch=6", "--seq=16"]


@needs_smollm2
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_fine_tuning_over_islands_has_the_losses_of_one_world(tmp_path: pathlib.Path) -> None:
    """SmolLM2-135M learns Python's language reference. Chance is log(49152) = 10.8 nats."""
    where = [f"--init-from={SMOLLM2}", f"--out={tmp_path}", f"--steps={STEPS}", "--log-every=25"]
    try:
        python(*PARITY, *where, *TRAINING, timeout_s=2300, env={"XLA_FLAGS": ""})
    finally:  # a checkpoint of each run has 1.6 GB
        for folder in tmp_path.glob("*/*/checkpoints"):
            shutil.rmtree(folder)
    results = {r["run"]: r for r in json.loads((tmp_path / "report.json").read_text())["results"]}
    more = [f"{PERMUTED} {n}" for n in (2, 3, 4)]
    assert [*results] == [ONE_WORLD, PERMUTED, *more, OTHER, ISLANDS, UNLIKE]
    assert results[PERMUTED]["largest"] > 0  # a floor of rows in another order
    assert results[ISLANDS]["largest"] <= 1e-5
    for run in (ISLANDS, UNLIKE):
        assert results[run]["replicas"]["compared"] > 0
    assert not any(result["failures"] for result in results.values())
    losses = [row["loss"] for row in read_rows(tmp_path / "data2" / "islands" / METRICS)]
    assert len(losses) == STEPS
    assert losses[0] < 6
    assert statistics.mean(losses[-10:]) < statistics.mean(losses[:10])


@needs_smollm2
@pytest.mark.slow
def test_published_model_writes_and_predicts_text(capsys: pytest.CaptureFixture[str]) -> None:
    """SmolLM2-135M-Instruct: 2.864 nats on Python 3.12's language reference; chance is 10.8."""
    generate.main([str(SMOLLM2), "The capital of France is", "--number", "12"])
    assert "Paris." in capsys.readouterr().out
    perplexity.main([str(SMOLLM2), "--tokens=513", "--batch=1"])
    nats, *_, tokens, _, _ = capsys.readouterr().out.split()
    assert tokens == "512"
    assert 2.5 < float(nats) < 3.3
