import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import generate as module
from models.generate import Sampling, decode, generate, prefill
from models.huggingface import load
from models.llama import Llama
from tests.python.models.golden_models import (
    GOLDEN,
    PROMPT,
    WIDE,
    each_family,
    expected,
    save_words,
)

pytestmark = pytest.mark.usefixtures("compile_fast")


@each_family("llama-3.1", "qwen2.5", "qwen3-moe")  # together they have each part of a family
def test_greedy_tokens_are_those_of_transformers(family, make_mesh):
    golden = expected(family)
    config, params = load(GOLDEN / family, make_mesh(data=1), **WIDE)
    texts = [golden["tokens"][0, :PROMPT].tolist()]
    result = generate(config, params, texts, len(golden["continuation"]))
    np.testing.assert_array_equal(result.tokens[0], golden["continuation"])
    assert result.first_s > 0
    assert result.tokens_per_s > 0


def test_step_by_step_logits_are_those_of_whole_texts(make_mesh, fast_jit):
    tokens = jnp.tile(expected("qwen3")["tokens"], (2, 1)).at[1].add(1) % 64
    config, params = load(GOLDEN / "qwen3", make_mesh(data=1), **WIDE)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    whole = fast_jit(lambda params: nnx.merge(graph, params)(tokens))(params)
    lengths = jnp.array([9, 4])
    begin = fast_jit(lambda p, *args: prefill(nnx.merge(graph, p), *args, room=24))
    advance = fast_jit(lambda p, *args: decode(nnx.merge(graph, p), *args))
    rows = jnp.arange(2)
    logits, past = begin(params, tokens[:, :9], lengths)
    for _ in range(12):
        np.testing.assert_allclose(logits, whole[rows, lengths - 1], atol=1e-4, rtol=0)
        logits, past = advance(params, tokens[rows, lengths], past, lengths)
        lengths += 1


def test_texts_of_several_lengths_on_a_mesh_are_as_alone(make_mesh):
    golden, mesh = expected("llama-3.1"), make_mesh(data=2, model=2)
    text = golden["tokens"][0, :PROMPT].tolist()
    config, params = load(GOLDEN / "llama-3.1", mesh, **WIDE)
    with jax.set_mesh(mesh):
        together = generate(config, params, [text, [5, 6, 7], text[:3]], 8)
    assert together.tokens.shape == (3, 8)
    np.testing.assert_array_equal(together.tokens[0], golden["continuation"][:8])
    config, params = load(GOLDEN / "llama-3.1", make_mesh(data=1), **WIDE)
    alone = generate(config, params, [[5, 6, 7]], 8)
    np.testing.assert_array_equal(together.tokens[1], alone.tokens[0])


def test_choices_are_among_the_likeliest_as_often_as_said():
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))
    keys = jax.random.split(jax.random.key(0), 2000)

    def shares(sampling: Sampling) -> np.ndarray:
        tokens = jax.vmap(lambda key: sampling(logits, key)[0])(keys)
        return np.bincount(tokens, minlength=4) / len(keys)

    np.testing.assert_allclose(shares(Sampling(1.0)), [0.1, 0.5, 0.15, 0.25], atol=0.05)
    np.testing.assert_allclose(shares(Sampling(1.0, 0.7)), [0, 2 / 3, 0, 1 / 3], atol=0.05)
    np.testing.assert_allclose(shares(Sampling(1.0, 0.4)), [0, 1, 0, 0])
    np.testing.assert_allclose(shares(Sampling()), [0, 1, 0, 0])
    squares = np.square([0.1, 0.5, 0.15, 0.25])
    np.testing.assert_allclose(shares(Sampling(0.5)), squares / squares.sum(), atol=0.05)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -0.5}, "temperature -0.5 can't divide logits: give 0 for the likeliest"),
        ({"temperature": math.nan}, "temperature nan can't divide logits"),
        ({"temperature": math.inf}, "temperature inf can't divide logits"),
        ({"top_p": 0.0}, r"top-p 0.0 is not a probability.*: give a number above 0 and at most 1"),
        ({"top_p": 1.5}, "top-p 1.5 is not a probability"),
        ({"top_p": math.nan}, "top-p nan is not a probability"),
    ],
)
def test_sampling_that_means_nothing_is_refused(values, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**values)


def test_command_prints_tokens_and_times(capsys):
    golden = expected("qwen2.5")
    text = ",".join(map(str, golden["tokens"][0, :PROMPT]))
    folder = str(GOLDEN / "qwen2.5")
    module.main([folder, text, "--tokens", "--number", "4", "--dtype", "float32"])
    printed = capsys.readouterr()
    assert printed.out.strip() == ",".join(map(str, golden["continuation"][:4]))
    assert "first token after" in printed.err
    assert "tokens/s" in printed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["1,2,x"], "'1,2,x' is not of the form 1,15,7"),
        (["1,64"], "token 64 is not in the vocabulary of 64"),
        (["1", "--temperature=-1"], "temperature -1.0 can't divide logits"),
        (["1", "--top-p=0"], "top-p 0.0 is not a probability to choose among"),
        (["1", "--number=0"], "can't continue by 0 tokens: ask for 1 or more"),
        (["1", "--mesh=sequence=4"], "a mesh with sequence: texts grow by one position at a time"),
        (["1", "--mesh=model=3"], "does not hold the job's 4 devices; choose sizes whose product"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(arguments, words):
    with pytest.raises(SystemExit, match=words):
        module.main([str(GOLDEN / "qwen2"), "--tokens", *arguments])


def test_command_continues_text_up_to_its_end(tmp_path, capsys):
    golden, folder = expected("qwen2.5"), tmp_path / "model"
    shutil.copytree(GOLDEN / "qwen2.5", folder)
    save_words(folder / "tokenizer.json")
    continuation = golden["continuation"][:6].tolist()
    end = continuation[4]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    prompt = " ".join(f"w{number}" for number in golden["tokens"][0, :PROMPT])
    module.main([str(folder), prompt, "--number", "6", "--dtype", "float32"])
    kept = continuation[: continuation.index(end)]
    assert capsys.readouterr().out.strip() == " ".join(f"w{number}" for number in kept)


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(SystemExit, match=r"has no tokenizer.json: give numbers of tokens as 1,15"):
        module.main([str(GOLDEN / "qwen2"), "Once upon a time"])
