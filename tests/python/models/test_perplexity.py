import math
import shutil

import numpy as np
import pytest

from models.extras import perplexity
from models.extras.corpus import Corpus
from models.extras.perplexity import measure, rows
from models.huggingface import load
from tests.python.models.golden_models import GOLDEN, WIDE, expected, save_words

pytestmark = pytest.mark.usefixtures("compile_fast")


def corpus(tokens) -> Corpus:
    return Corpus("test", (np.asarray(tokens, np.uint32),), vocab=64)


def entropies(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The cross-entropy of each of tokens [T], but the first, given logits [T, V]."""
    logits = logits[:-1].astype(np.float64)
    chosen = np.take_along_axis(logits, tokens[1:, None], axis=1)[:, 0]
    return np.log(np.exp(logits).sum(axis=1)) - chosen


@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 2, "model": 2}])
def test_perplexity_is_that_of_the_logits(axes, make_mesh):
    golden, mesh = expected("qwen3"), make_mesh(**axes)
    config, params = load(GOLDEN / "qwen3", mesh, **WIDE)
    tokens = golden["tokens"][0]
    measured = measure(config, params, corpus(tokens), mesh, seq=30, batch=2)
    assert measured.tokens == 23
    nats = entropies(golden["logits"][0], tokens).mean()
    np.testing.assert_allclose(measured.nats, nats, atol=1e-5)
    assert measured.perplexity == math.exp(measured.nats)


def test_rows_predict_each_token_once(make_mesh):
    config, params = load(GOLDEN / "qwen3", make_mesh(data=1), **WIDE)
    tokens = np.random.default_rng(1).integers(0, 64, 24)
    parts = list(rows(corpus(tokens), 5, 2))
    assert [part.shape for part in parts] == [(2, 6)] * 3
    labels = np.concatenate([part[:, 1:].ravel() for part in parts])
    np.testing.assert_array_equal(labels[:23], tokens[1:])
    assert set(labels[23:]) == {-1}
    whole = measure(config, params, corpus(tokens), make_mesh(data=1), seq=5, batch=2)
    rest = measure(config, params, corpus(tokens[:6]), make_mesh(data=1), seq=5, batch=1)
    more = measure(config, params, corpus(tokens[5:]), make_mesh(data=1), seq=5, batch=3)
    assert (whole.tokens, rest.tokens, more.tokens) == (23, 5, 18)
    np.testing.assert_allclose(whole.nats * 23, rest.nats * 5 + more.nats * 18, rtol=1e-5)


def test_command_counts_tokens(tmp_path, capsys):
    golden, folder = expected("qwen2.5"), tmp_path / "model"
    shutil.copytree(GOLDEN / "qwen2.5", folder)
    save_words(folder / "tokenizer.json")
    tokens = golden["tokens"][0]
    (tmp_path / "text.txt").write_text(" ".join(f"w{number}" for number in tokens))
    data = f"--data={tmp_path / 'text.txt'}"
    perplexity.main([str(folder), data, "--dtype=float32", "--tokens=17"])
    nats = entropies(golden["logits"][0], tokens)[:16].mean()
    said = capsys.readouterr().out.split()
    assert said[1:5] == ["nats", "per", "token,", "perplexity"]
    np.testing.assert_allclose(float(said[0]), nats, atol=2e-5)
    np.testing.assert_allclose(float(said[5].rstrip(",")), math.exp(nats), rtol=1e-4)
    assert said[6:] == ["16", "tokens", "predicted"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the data has tokens up to 255, and the model has 64 rows of embeddings"),
        (["--tokens=1"], "text.txt has 1 tokens: give at least 2"),
        (["--batch=3", "--mesh=data=4"], "--batch 3 can't be split over 4 devices: choose a mult"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(arguments, words, tmp_path):
    shutil.copytree(GOLDEN / "qwen2", tmp_path / "model")
    (tmp_path / "text.txt").write_text("some text")
    with pytest.raises(SystemExit, match=words):
        perplexity.main([str(tmp_path / "model"), f"--data={tmp_path / 'text.txt'}", *arguments])
