import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.configs import CONFIGS, Config
from models.data import segments
from models.extras.corpus import Corpus
from models.extras.documents import Documents
from models.extras.options import Options
from models.llama import Llama
from models.pretrain import make_trainer
from models.train import Trainer
from tests.python.models.conftest import SCHEDULE

END = 0
LENGTHS = ((7, 1, 9), (9, 7, 1))  # lengths of the documents in two rows


def packed() -> jax.Array:
    """Rows of the documents of `LENGTHS`, each of which ends with `END`."""
    tokens = jax.random.randint(jax.random.key(1), (2, 17), 1, 256)
    for row, lengths in enumerate(LENGTHS):
        tokens = tokens.at[row, np.cumsum(lengths) - 1].set(END)
    return tokens


def kind(name: str, **changes) -> Config:
    return dataclasses.replace(CONFIGS[name], document_end=END, **changes)


def test_documents_are_numbered_as_in_the_data_and_positions_begin_anew():
    tokens = np.array([[5, 0, 7, 7, 0, 0, 3], [0, 2, 3, 4, 5, 6, 7]])
    documents = Documents.of(jnp.asarray(tokens), end=0)
    np.testing.assert_array_equal(documents.numbers, segments(tokens, end=0))
    assert documents.positions.tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("config", "roundings"),
    [
        (kind("tiny"), 64),
        pytest.param(kind("tiny", attention="xla", scan=False), 64, marks=pytest.mark.slow),
        pytest.param(kind("tiny-qwen", dtype="bfloat16"), 8, marks=pytest.mark.slow),
        pytest.param(kind("tiny", dtype="float16"), 8, marks=pytest.mark.slow),
    ],
    ids=("float32", "unrolled", "qwen bfloat16", "float16"),
)
def test_logits_of_packed_documents_are_those_of_each_alone(config, roundings, fast_jit):
    model = Llama(config, rngs=nnx.Rngs(0))
    # Attention has more weight than at the start, and is less even.
    model.blocks.attention.query.kernel[...] *= 8
    model.blocks.attention.value.kernel[...] *= 40
    graph, params = nnx.split(model)
    logits = fast_jit(lambda params, tokens: nnx.merge(graph, params)(tokens))
    tokens = packed()
    together = logits(params, tokens)
    crossing = dataclasses.replace(config, document_end=None)
    whole = nnx.graphdef(nnx.eval_shape(lambda: Llama(crossing, rngs=nnx.Rngs(0))))
    mixed = fast_jit(lambda params: nnx.merge(whole, params)(tokens))(params)
    atol = roundings * float(jnp.finfo(config.dtype).eps * jnp.abs(mixed).max())
    assert jnp.abs(together - mixed).max() > 4 * atol
    for row, lengths in enumerate(LENGTHS):
        np.testing.assert_allclose(together[row, : lengths[0]], mixed[row, : lengths[0]], atol=atol)
        begin = 0
        for length in lengths:
            document = slice(begin, begin + length)
            alone = logits(params, tokens[row : row + 1, document])[0]
            np.testing.assert_allclose(together[row, document], alone, atol=atol, rtol=0)
            begin += length


@pytest.mark.parametrize(
    ("axes", "changes", "words"),
    [
        (
            {"data": 2, "sequence": 2},
            {},
            "--document-mask on a mesh with sequence.*leave out --document-mask or sequence",
        ),
        ({"data": 1}, {"attention": "cudnn"}, "--attention cudnn with --document-mask.*auto or xl"),
    ],
)
def test_attention_that_can_not_keep_documents_apart_is_refused(axes, changes, words, make_mesh):
    with pytest.raises(ValueError, match=words):
        Trainer(kind("tiny", **changes), SCHEDULE, make_mesh(**axes))


def test_option_takes_the_end_of_the_corpus():
    tokens = (np.arange(200, dtype=np.uint8),)
    corpus = Corpus("numbers", tokens, end=9)
    assert make_trainer(Options(document_mask=True), corpus).config.document_end == 9
    assert make_trainer(Options(), corpus).config.document_end is None
    words = "--document-mask needs a token after each document, and numbers has none: give a --tok"
    with pytest.raises(ValueError, match=words):
        make_trainer(Options(document_mask=True), Corpus("numbers", tokens))
