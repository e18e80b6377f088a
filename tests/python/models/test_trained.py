import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from models import convert, generate, pretrain
from models.configs import CONFIGS
from models.extras import loop, reporter, text, tokenize
from models.extras.checkpoint import Checkpoints
from models.huggingface import load
from models.train import TrainState
from tests.python.models.conftest import FAST_COMPILE
from tests.python.models.golden_models import GOLDEN, save_words

THREE = dataclasses.replace(CONFIGS["tiny"], layers=3)


pytestmark = pytest.mark.usefixtures("compile_fast")


def train(folder: Path, *words: str) -> Any:
    """Trains for a step; returns the parameters that the run saved."""
    saved: list[Any] = []
    save = Checkpoints.save

    def keep(checkpoints: Checkpoints, step: int, state: TrainState) -> None:
        saved.append(jax.tree.map(np.asarray, state.params))
        save(checkpoints, step, state)

    sizes = ("--config=tiny", "--batch=4", "--seq=16", "--microbatches=2", "--steps=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", keep)
        pretrain.main([*sizes, f"--run-dir={folder}", *words])
    return saved[-1]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> tuple[Path, Any]:
    """The folder of a run whose stages have one layer and two, and its parameters."""
    run = tmp_path_factory.mktemp("uneven") / "run"
    fast = functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "tiny", THREE)
        patch.setattr(loop.jaxhet, "jit", fast)
        return run, train(run, "--mesh=stage=2,data=2", "--stages=1,2")


def export(source: Path, target: Path) -> Path:
    convert.main(["export", str(source), str(target)])
    return target


def assert_equal(params: Any, others: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, params, others)


@pytest.mark.slow
def test_run_of_uneven_stages_is_exported_and_continues_text(
    uneven, tmp_path, make_mesh, monkeypatch, capsys
):
    monkeypatch.setitem(CONFIGS, "tiny", THREE)
    run, spread = uneven
    folder = export(run, tmp_path / "out")
    config, params = load(folder, make_mesh(model=2))
    assert (config.layers, config.vocab) == (3, 256)
    rows = np.array([0, 2, 3])  # row 1 fills up the first stage
    blocks = jax.tree.map(lambda x: x[rows], spread["blocks"])
    assert_equal(params, spread | {"blocks": blocks})
    written = json.loads((folder / "config.json").read_text())
    assert written["max_position_embeddings"] == 16
    # A byte ends no text. `transformers` takes 2 where the key is absent.
    assert (written["bos_token_id"], written["eos_token_id"]) == (None, None)

    capsys.readouterr()
    generate.main([str(folder), "if é", "--number=4"])
    made = generate.generate(config, params, [list("if é".encode())], 4).tokens[0]
    printed = capsys.readouterr().out.removesuffix("\n")
    assert printed == bytes(made.tolist()).decode(errors="replace")


@pytest.mark.slow
def test_checkpoint_of_a_run_from_a_model_keeps_tokenizer_and_ends(tmp_path, make_mesh):
    start = tmp_path / "start"
    shutil.copytree(GOLDEN / "qwen2.5", start)
    theirs = json.loads((start / "config.json").read_text()) | {"eos_token_id": 7}
    (start / "config.json").write_text(json.dumps(theirs))
    save_words(start / "tokenizer.json")
    (tmp_path / "text.txt").write_text("w1 w2 w3 w5 " * 40)
    data = f"--data={tmp_path / 'text.txt'}"
    run = tmp_path / "run"
    trained_params = train(run, f"--init-from={start}", data, "--mesh=fsdp=2,data=2")
    folder = export(run / "checkpoints" / "1", tmp_path / "out")
    config, params = load(folder, make_mesh(data=1))
    assert config.param_dtype == "float32"
    assert_equal(params, trained_params)
    written = json.loads((folder / "config.json").read_text())
    assert (written["eos_token_id"], written["model_type"]) == (7, "qwen2")
    assert (folder / "tokenizer.json").read_bytes() == (start / "tokenizer.json").read_bytes()

    words = tmp_path / "words.json"
    save_words(words, "<eos>", number=63)
    own = tmp_path / "own"
    train(own, f"--init-from={start}", data, f"--tokenizer={words}", "--mesh=data=4")
    special = json.loads((export(own, tmp_path / "c") / "config.json").read_text())
    assert special["max_position_embeddings"] == theirs["max_position_embeddings"]
    assert (special["bos_token_id"], special["eos_token_id"]) == (None, 63)

    shutil.rmtree(run / "checkpoints" / "1" / "state")
    with pytest.raises(SystemExit, match="has no state: it is not a whole checkpoint"):
        convert.main(["export", str(run), str(tmp_path / "other")])


@pytest.mark.slow
def test_tokenizer_of_a_run_is_exported_or_the_reason_is_given(tmp_path, capsys, monkeypatch):
    units = []
    monkeypatch.setattr(reporter, "plot_losses", lambda *arguments: units.append(arguments[2]))
    words = tmp_path / "words.json"
    save_words(words, "</s>")
    (tmp_path / "text.txt").write_text("w1 w2 w3 w5 " * 40)
    data = str(tmp_path / "text.txt")
    tokenize.main([data, f"--tokenizer={words}", f"--out={tmp_path / 'shards'}"])
    run = tmp_path / "run"
    train(run, f"--data={data}", f"--tokenizer={words}", "--param-dtype=bfloat16")
    assert units == ["token"]
    assert (export(run, tmp_path / "a") / "tokenizer.json").read_text() == words.read_text()
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["torch_dtype"], config["eos_token_id"]) == ("bfloat16", 64)

    options = run / "config.yaml"
    options.write_text(options.read_text().replace(f"tokenizer: {words}", "tokenizer: null"))
    capsys.readouterr()
    assert not (export(run, tmp_path / "b") / "tokenizer.json").exists()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["eos_token_id"] is None
    why = "had shards and no --tokenizer: copy the tokenizer.json that made them"
    assert why in capsys.readouterr().err
    options.write_text(options.read_text().replace("tokenizer: null", f"tokenizer: {words}"))
    words.write_text(words.read_text() + " ")
    assert not (export(run, tmp_path / "c") / "tokenizer.json").exists()
    assert "is not the tokenizer any more that made the run's tokens" in capsys.readouterr().err


def test_run_that_can_not_be_exported_is_one_line(uneven, tmp_path, monkeypatch):
    run, _ = uneven

    def refused(words: str, source: Path = run) -> None:
        with pytest.raises(SystemExit, match=words):
            convert.main(["export", str(source), str(tmp_path / "out")])

    refused("no complete checkpoint of step 9: take one of 1", run / "checkpoints" / "9")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    refused("has no complete checkpoint: let the run save one", tmp_path / "empty")
    monkeypatch.setitem(CONFIGS, "tiny", dataclasses.replace(THREE, hidden=97))
    words = r"shape \(4, 96, 32\), but \(4, 97, 32\) by the config 'tiny', which has changed since"
    refused(words)
    monkeypatch.setitem(CONFIGS, "tiny", dataclasses.replace(THREE, experts=2))
    refused("no family has .*experts=2 and shared_mlp=True together")
    monkeypatch.delitem(CONFIGS, "tiny")
    refused("has the config 'tiny'; known configs are demo")


def test_byte_tokenizer_gives_bytes_and_the_same_text(tmp_path):
    (tmp_path / "tokenizer.json").write_text(text.byte_tokenizer_json(), encoding="utf-8")
    codec = text.Codec.load(tmp_path / "tokenizer.json")
    for example in ("", " a  b\n\t", "Grüße, 世界 🙂", "\x00\x7f\xa0\xad"):
        assert codec.encode(example) == list(example.encode())
        assert codec.decode(codec.encode(example)) == example
