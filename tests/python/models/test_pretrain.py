import dataclasses
import math
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml
from flax import nnx

from models import huggingface, pretrain
from models.configs import CONFIGS
from models.extras import loop, tokenize
from models.extras.options import RESOLVED
from models.extras.records import METRICS, PLOT, compare_replicas, differences, read_rows
from models.llama import Llama

pytestmark = pytest.mark.usefixtures("compile_fast")


def train(run_dir: Path, **options) -> None:
    """Trains the smallest model for a few steps on all devices; `resume=True` adds `--resume`."""
    values = {"config": "tiny", "batch": 8, "seq": 16, "mesh": "data=-1,model=2", "log_every": 2}
    values |= {"run_dir": run_dir, **options}
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in values.items()
    ]
    pretrain.main([*words, "--digest"])


def final_digests(run_dir: Path) -> list[dict]:
    rows = read_rows(run_dir / "digests-0.jsonl")
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_rows(run_dir / METRICS)]


def checkpoints(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


def test_resumed_run_continues_to_the_bit_and_on_another_mesh(tmp_path):
    train(tmp_path / "whole", steps=6)
    train(tmp_path / "halves", steps=3)
    shutil.copytree(tmp_path / "halves", tmp_path / "other")
    train(tmp_path / "halves", steps=6, resume=True)
    assert [step for step, _ in losses(tmp_path / "whole")] == [1, 2, 3, 4, 5, 6]
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    assert final_digests(tmp_path / "halves") == final_digests(tmp_path / "whole")
    assert (tmp_path / "whole" / PLOT).exists()
    for name in ("whole", "halves"):
        replicas = compare_replicas(tmp_path / name)
        assert replicas.equal, replicas.differences
    train(tmp_path / "other", steps=6, resume=True, mesh="fsdp=4", update="sharded")
    (_, whole), (_, other) = (zip(*losses(tmp_path / n), strict=True) for n in ("whole", "other"))
    assert other[:3] == whole[:3]
    np.testing.assert_allclose(other, whole, rtol=1e-5)


@pytest.mark.slow
def test_run_of_uneven_stages_is_resumed_on_other_stages(tmp_path, monkeypatch, x64):
    monkeypatch.setitem(CONFIGS, "tiny", dataclasses.replace(CONFIGS["tiny"], layers=4))
    wide = {"dtype": "float64", "param_dtype": "float64", "moments_dtype": "float64", "warmup": 1}
    pipeline = {"mesh": "stage=2,data=2", "microbatches": 2}
    train(tmp_path / "run", steps=2, **wide, **pipeline, stages="1,3")
    others = {
        "whole": {**pipeline, "stages": "1,3"},
        "no stages": {"mesh": "fsdp=2,model=2", "update": "sharded"},
        "uneven": {**pipeline, "stages": "3,1"},
        "even": {"mesh": "stage=4", "microbatches": 2},
    }
    for name, options in others.items():
        shutil.copytree(tmp_path / "run", tmp_path / name)
        train(tmp_path / name, steps=4, resume=True, **wide, **options)
    _, whole = zip(*losses(tmp_path / "whole"), strict=True)
    for name in others:
        _, other = zip(*losses(tmp_path / name), strict=True)
        assert max(differences(other, whole)) <= 1e-14, name
    # An even division of layers follows an uneven one, and the other way round.
    train(tmp_path / "even", steps=5, resume=True, **wide, **pipeline, stages="3,1")
    train(tmp_path / "whole", steps=5, resume=True, **wide, **pipeline, stages="1,3")
    assert max(differences(*([losses(tmp_path / n)[-1][1]] for n in ("even", "whole")))) <= 1e-14


def test_run_goes_on_from_the_newest_checkpoint(tmp_path, capsys):
    train(tmp_path, steps=3, checkpoint_every=1, keep=2)
    assert checkpoints(tmp_path) == {"2", "3"}
    with pytest.raises(SystemExit, match="holds a run of 3 steps: give --resume"):
        train(tmp_path, steps=4)
    with pytest.raises(
        SystemExit, match=r"can't resume from step 3.*seed was 0 and is 1.*--run-dir"
    ):
        train(tmp_path, steps=4, resume=True, seed=1)
    with pytest.raises(SystemExit, match="config was 'tiny' and is 'demo'"):
        train(tmp_path, steps=4, resume="auto", config="demo")
    train(tmp_path, steps=4, resume="auto")
    assert checkpoints(tmp_path) == {"3", "4"}
    assert "step 4/4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"mesh": "rows=2"},
            "'rows=2' is not of the form data=2,model=2, of axes data, fsdp, expert",
        ),
        ({"batch": 7}, "can't be split over data=2: choose a multiple of 2"),
        ({"mesh": "stage=4"}, r"2 layers are too few for stage=4.* mesh with stage=2 at most"),
        ({"stages": "1,1"}, r"--stages 1,1 on --mesh \S+, which has no axis stage: give a mesh"),
        ({"stages": "1,2"}, r"don't divide 2 layers: give each stage at least one"),
        ({"data": __file__, "seq": 10**6}, "test_pretrain.py has .* tokens, too few for rows"),
        (
            {"mesh": "stage=2,data=-1", "accumulate": 2, "microbatches": 2},
            "--accumulate 2 on a mesh with stages.*give --microbatches",
        ),
        (
            {"mesh": "data=2,sequence=2", "seq": 15},
            r"rows of 15 positions \(--seq\) can't be split over sequence=2",
        ),
        ({"mesh": "stage=2,sequence=2"}, "a pipeline does not split positions"),
        (
            {"mesh": "data=2,sequence=2", "attention": "cudnn"},
            r"--attention cudnn on a mesh with sequence.*choose auto or xla",
        ),
        ({"attention": "cudnn"}, "--attention cudnn needs NVIDIA GPUs on all islands: choose auto"),
        ({"accumulate": 3}, "can't be split over data=2,accumulate=3: choose a multiple of 6"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(options, words, tmp_path):
    with pytest.raises(SystemExit, match=words):
        train(tmp_path, steps=1, **options)


def test_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint_before(tmp_path):
    words = (
        r"the (loss|gradient norm) is (nan|inf) at step 2: lower .*; the checkpoint of step 1 is"
    )
    with pytest.raises(SystemExit, match=words):
        train(tmp_path, steps=9, learning_rate=1e30, warmup=1, checkpoint_every=1, log_every=9)
    assert checkpoints(tmp_path) == {"1"}
    first, second = read_rows(tmp_path / METRICS)
    assert math.isfinite(first["loss"])
    assert not math.isfinite(second["loss"] + second["gradient_norm"])


def test_run_that_is_told_to_stop_saves_its_state(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "reached_preemption_sync_point", lambda step: step == 3)
    with pytest.raises(SystemExit) as stopped:
        train(tmp_path, steps=9, checkpoint_every=2, log_every=5)
    assert stopped.value.code == 128 + signal.SIGTERM
    words = "told to stop (SIGTERM); the checkpoint of step 3 is complete: continue with --resume."
    assert words in capsys.readouterr().err
    assert checkpoints(tmp_path) == {"2", "3"}
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3]


def test_run_on_shards_evaluates_accumulates_and_saves_its_options(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "one two three, two two four. "}\n' * 60)
    shards = tmp_path / "shards"
    tokenize.main([str(tmp_path / "text.jsonl"), f"--out={shards}", "--shard-tokens=500"])
    file = tmp_path / "run.yaml"
    text = {"data": str(shards), "order": "epochs", "schedule": "cosine", "accumulate": 2}
    file.write_text(yaml.safe_dump({**text, "eval-every": 2, "eval_part": 0.2, "steps": 9}))
    run_dir = tmp_path / "run"
    training = {"steps": 3, "peak_flops": 1e9}
    train(run_dir, config_file=file, mesh="data=2,model=-1", **training)
    rows = read_rows(run_dir / METRICS)
    assert [row["step"] for row in rows if "perplexity" in row] == [2, 3]
    assert rows[1]["perplexity"] == pytest.approx(math.exp(rows[1]["eval_loss"]))
    for row in rows:
        assert row["mfu"] == pytest.approx(row["model_flops_per_second"] / 4e9)
        assert row["tokens_per_second"] == pytest.approx(8 * 16 / row["seconds"])
    saved = yaml.safe_load((run_dir / RESOLVED).read_text())
    assert (saved["steps"], saved["data"], saved["eval_every"]) == (3, str(shards), 2)


def published(folder: Path, **changes) -> dict:
    """A folder of Hugging Face's with a small model over bytes; its parameters."""
    config = dataclasses.replace(CONFIGS["tiny"], **changes)
    params = nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(7)), nnx.Param))
    huggingface.save(folder, config, params)
    return params


def test_run_starts_from_a_folder_of_hugging_face(tmp_path):
    params = published(tmp_path / "published", qkv_bias=True, tied=True)
    train(tmp_path / "run", init_from=tmp_path / "published", steps=1, learning_rate=0)
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore((tmp_path / "run" / "checkpoints" / "1" / "state").absolute())
    jax.tree.map(np.testing.assert_array_equal, saved["params"], params)


def test_model_with_fewer_embeddings_than_tokens_is_refused(tmp_path):
    published(tmp_path / "published", vocab=128)
    words = "the data has tokens up to 255, and the model of .* has 128 rows of embeddings"
    with pytest.raises(SystemExit, match=words):
        train(tmp_path / "run", init_from=tmp_path / "published", steps=1)


def test_job_is_known_by_coordinator_or_by_the_file_of_its_secret(monkeypatch):
    for name in ("JAXHET_COORDINATOR_ADDRESS", "JAXHET_JOB_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
        assert not pretrain.in_job()
        monkeypatch.setenv(name, "here")
        assert pretrain.in_job()
        monkeypatch.delenv(name)
