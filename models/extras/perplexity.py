"""How well a model predicts a text: `python -m models.extras.perplexity --help`.

Tokens are predicted in rows of `--seq`. Every token but the first is predicted once, from the
tokens before it in its row; tokens at the begin of a row have little context. Perplexity is e to
the power of the mean cross-entropy.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

import jaxhet
from models.configs import DTYPES, Config
from models.extras.ahead import wait_for_earlier
from models.extras.corpus import Corpus, open_corpus
from models.extras.text import find_tokenizer
from models.extras.usage import HelpFormatter
from models.huggingface import Params, config_json, load
from models.llama import Llama
from models.pretrain import parse_mesh
from models.sharding import activation_sharding, batch_axes

PROGRAM = "python -m models.extras.perplexity"

# Target after the end of a text in its last row.
_NONE = -1


@dataclasses.dataclass(frozen=True)
class Measured:
    """The cross-entropy of `tokens` tokens, the mean in nats."""

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Euler's number to the power of the mean cross-entropy."""
        return math.exp(self.nats)


def rows(corpus: Corpus, positions: int, number: int) -> Iterator[npt.NDArray[np.int32]]:
    """A corpus as arrays [number, positions + 1], `_NONE` behind its end.

    The last token of a row is the first one of the next: it is predicted in the one and given in
    the other.

    Args:
      corpus: The corpus.
      positions: Number of predicted tokens in a row.
      number: Number of rows in an array.
    """
    for first in range(0, corpus.size - 1, positions * number):
        tokens = corpus.read(first, min(first + positions * number + 1, corpus.size))
        padded = np.full(positions * number + 1, _NONE, np.int32)
        padded[: tokens.size] = tokens
        begins = positions * np.arange(number)[:, None]
        yield padded[begins + np.arange(positions + 1)]


def measure(
    config: Config, params: Params, corpus: Corpus, mesh: jax.sharding.Mesh, seq: int, batch: int
) -> Measured:
    """Measures a model on all tokens of a corpus.

    Args:
      config: Config of the model.
      params: Parameters of the model, which lie on `mesh`.
      corpus: The corpus.
      mesh: The mesh.
      seq: Number of positions of a row.
      batch: Number of rows that are computed at a time.

    Raises:
      ValueError: the corpus has less than two tokens, or some that the model does not know; or the
        mesh can't split the batch.
    """
    if corpus.size < 2:
        raise ValueError(f"{corpus.name} has {corpus.size} tokens: give at least 2.")
    devices = math.prod(mesh.shape[name] for name in batch_axes(mesh.shape))
    if batch % devices:
        raise ValueError(
            f"--batch {batch} can't be split over {devices} devices: choose a multiple of that."
        )
    if corpus.vocab > config.vocab:
        raise ValueError(
            f"the data has tokens up to {corpus.vocab - 1}, and the model has {config.vocab} rows "
            "of embeddings: give the model's own tokenizer (--tokenizer), or shards that it made."
        )
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))

    def total(params: Params, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        given, labels = jnp.maximum(tokens[:, :-1], 0), tokens[:, 1:]
        return model.loss(model.hidden(given), labels) * labels.size

    program = jaxhet.jit(total)
    sharding = activation_sharding("tokens", mesh)
    with jax.set_mesh(mesh):
        totals: list[jax.Array] = []
        for tokens in rows(corpus, seq, batch):
            totals.append(program(params, jax.device_put(tokens, sharding)))
            wait_for_earlier(totals)
    count = corpus.size - 1
    return Measured(math.fsum(float(x) for x in totals) / count, count)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Measure how well a model predicts a text.",
        formatter_class=HelpFormatter,
    )

    def add(name: str, default: Any, text: str, **how: Any) -> None:
        parser.add_argument(name, default=default, help=text, **how)

    parser.add_argument("folder", type=Path, help="Hugging Face's folder")
    add("--data", None, "data, as for models.pretrain; default: Python's language reference")
    add("--tokenizer", None, "tokenizer.json; default: the model's, else bytes")
    add("--tokens", 0, "first tokens of the data that are used; 0: all", type=int)
    add("--seq", 512, "positions in a row, in tokens", type=int)
    add("--batch", 4, "rows that are computed together", type=int)
    add("--mesh", None, "mesh axes, for example model=2; -1: all devices; default: one device")
    add("--dtype", None, "type to compute in; default: the model's", choices=(*DTYPES,))
    options = parser.parse_args(arguments)
    if min(options.seq, options.batch) < 1 or options.tokens < 0:
        parser.error("--seq and --batch must be at least 1, and --tokens at least 0")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exits with one line of text for an input that can't be used."""
    options = _options(arguments)
    try:
        config_json(options.folder)  # refuses a folder without a model before the data is read
        tokenizer = options.tokenizer or find_tokenizer(options.folder)
        corpus = open_corpus(options.data, str(tokenizer) if tokenizer else None)
        if options.tokens:
            corpus = corpus.head(options.tokens)
        mesh = jaxhet.make_mesh({"model": 1}, devices=jax.devices()[:1])
        if options.mesh:
            mesh = jaxhet.make_mesh(parse_mesh(options.mesh))
        changes = {"dtype": options.dtype} if options.dtype else {}
        config, params = load(options.folder, mesh, **changes)
        measured = measure(config, params, corpus, mesh, options.seq, options.batch)
    except (ValueError, OSError, jaxhet.UsageError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    print(
        f"{measured.nats:.5f} nats per token, perplexity {measured.perplexity:.4f}, "
        f"{measured.tokens} tokens predicted"
    )


if __name__ == "__main__":
    main()
