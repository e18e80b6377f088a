"""Continues texts with a model: `python -m models.generate --help`.

A prompt is computed in one program, which keeps each layer's keys and values. Each new token is
then computed of the one before and these. Shapes: B texts, T positions, V vocabulary.
"""

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxhet
from models.configs import DTYPES, Config
from models.extras.agreement import Agreement, parameters
from models.extras.ahead import wait_for_earlier
from models.extras.text import Codec, find_tokenizer
from models.extras.usage import HelpFormatter
from models.huggingface import Params, config_json, load, read_config
from models.layers import Past
from models.llama import Llama
from models.pretrain import in_job, parse_mesh
from models.sharding import BATCH, SEQUENCE, constrain, free_axes

PROGRAM = "python -m models.generate"


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Choice of a token: the likeliest one if `temperature` is 0, at random otherwise.

    Logits are divided by `temperature`; the choice is among the fewest tokens that have together at
    least the probability `top_p` (arXiv:1904.09751).

    Raises:
      ValueError: `temperature` is negative or not finite, or `top_p` is not in (0, 1].
    """

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature {self.temperature} can't divide logits: give 0 for the likeliest "
                "token, or a finite number above 0."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top-p {self.top_p} is not a probability to choose among: give a number above 0 "
                "and at most 1."
            )

    def __call__(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """Logits [B, V] to tokens [B], int32."""
        if not self.temperature:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        descending = -jnp.sort(-logits, axis=-1)
        shares = jax.nn.softmax(descending, axis=-1)
        is_kept = jnp.cumsum(shares, axis=-1) - shares < self.top_p
        least = jnp.min(jnp.where(is_kept, descending, jnp.inf), axis=-1, keepdims=True)
        chosen = jax.random.categorical(key, jnp.where(logits < least, -jnp.inf, logits))
        return chosen.astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Continuation:
    """New tokens [B, number]; seconds to the first token of all texts, and for the others."""

    tokens: np.ndarray
    first_s: float
    others_s: float

    @property
    def tokens_per_s(self) -> float:
        """Rate of the tokens after the first ones, over all texts."""
        return self.tokens[:, 1:].size / self.others_s if self.others_s else 0.0


def empty_past(config: Config, batch: int, positions: int) -> Past:
    """Room for the keys and values of texts, in all layers.

    Args:
      config: Config of the model.
      batch: Number of texts.
      positions: Largest number of positions of a text.
    """
    shape = (config.layers, batch, positions, config.kv_heads, config.head_dim)
    zeros = constrain(jnp.zeros(shape, DTYPES[config.dtype]), "past")
    return zeros, zeros


def prefill(
    model: Llama, tokens: jax.Array, lengths: jax.Array, room: int
) -> tuple[jax.Array, Past]:
    """Logits [B, V] after each text, and its past.

    Args:
      model: The model.
      tokens: Tokens [B, T]; text b is in the first `lengths[b]` positions. The positions after
        them have no effect.
      lengths: Lengths [B] of the texts.
      room: Number of positions of the past.
    """
    past = empty_past(model.config, len(tokens), room)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, past = model.decode(tokens, past, positions)
    x = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    return model.logits(x)[:, 0], past


def decode(
    model: Llama, tokens: jax.Array, past: Past, lengths: jax.Array
) -> tuple[jax.Array, Past]:
    """Logits [B, V] after one more token of each text, and the new past.

    Args:
      model: The model.
      tokens: New tokens [B].
      past: Keys and values of the texts.
      lengths: Lengths [B] of the texts without the new tokens.
    """
    x, past = model.decode(tokens[:, None], past, lengths[:, None])
    return model.logits(x)[:, 0], past


def generate(
    config: Config,
    params: Params,
    texts: Sequence[Sequence[int]],
    number: int,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> Continuation:
    """Continues texts.

    On a mesh (`jax.set_mesh`) it runs where the parameters lie, over islands too: then all
    processes call it alike, and all have the result. A mesh that splits the texts computes the
    first one several times if they can't be split evenly. Times are those of the programs, not of
    their compilation.

    Args:
      config: Config of the model.
      params: Parameters of the model.
      texts: Tokens of each text.
      number: Number of new tokens of each text.
      sampling: Random choice of tokens; None: the most likely token.
      seed: Seed of the random choice.

    Raises:
      ValueError: there is no text, or one is empty or has a token that is not in the vocabulary; or
        the mesh splits positions.
    """
    _check(config, texts, number)
    count = len(texts)
    split = math.prod(size for name, size in free_axes().items() if name in BATCH)
    texts = [*texts, *[texts[0]] * (-count % split)]
    lengths = np.array([len(text) for text in texts], np.int32)
    tokens = np.zeros((len(texts), lengths.max()), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    # Host arrays, equal on all processes: a program over several processes needs them so.
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(seed), number)))
    first, following = _programs(config, sampling or Sampling(), tokens.shape[1] + number)
    begin = jaxhet.jit(first).lower(params, tokens, lengths, keys[0]).compile()
    start = time.perf_counter()
    chosen, past = jaxhet.block_until_ready(begin(params, tokens, lengths, keys[0]))
    first_s = time.perf_counter() - start
    results = [chosen]
    advance = jaxhet.jit(following, donate_argnums=1)
    advance = advance.lower(params, past, chosen, lengths, keys[0]).compile()
    start = time.perf_counter()
    for index in range(1, number):
        chosen, past = advance(params, past, chosen, lengths + np.int32(index - 1), keys[index])
        results.append(chosen)
        wait_for_earlier(results)
    values = np.stack(jaxhet.block_until_ready(results), axis=1)[:count]
    return Continuation(values, first_s, time.perf_counter() - start)


def _programs(config: Config, choose: Sampling, room: int) -> tuple[Any, Any]:
    """Functions for the first token of each text with its KV cache, and for the next tokens."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))

    def chosen(logits: jax.Array, key: Any) -> jax.Array:
        logits = constrain(logits, "last")
        return constrain(choose(logits, jax.random.wrap_key_data(key)), "chosen")

    def first(params: Params, tokens: Any, lengths: Any, key: Any) -> Any:
        logits, past = prefill(nnx.merge(graph, params), tokens, lengths, room)
        return chosen(logits, key), past

    def following(params: Params, past: Past, tokens: Any, lengths: Any, key: Any) -> Any:
        logits, past = decode(nnx.merge(graph, params), tokens, past, lengths)
        return chosen(logits, key), past

    return first, following


def _check(config: Config, texts: Sequence[Sequence[int]], number: int) -> None:
    if number < 1:
        raise ValueError(f"can't continue by {number} tokens: ask for 1 or more.")
    if SEQUENCE in free_axes():
        raise ValueError(
            f"a mesh with {SEQUENCE}: texts grow by one position at a time, which can't be split; "
            f"leave {SEQUENCE} out."
        )
    if not texts or not all(texts):
        raise ValueError(
            "a text has no token: give each at least one, as the one that begins texts."
        )
    wrong = [token for text in texts for token in text if not 0 <= token < config.vocab]
    if wrong:
        raise ValueError(f"token {wrong[0]} is not in the vocabulary of {config.vocab}.")


def _numbers(text: str) -> list[int]:
    """`1,15,7` as numbers."""
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"text {text!r} is not of the form 1,15,7.")
    return [int(part) for part in parts]


def _codec(folder: Path, is_tokens: bool) -> Codec:
    """Codec of the command line's texts."""
    if is_tokens:
        return Codec(_numbers, lambda tokens: ",".join(map(str, tokens)))
    found = find_tokenizer(folder)
    if found is None:
        config_json(folder)  # the error of a folder without a model says more
        raise ValueError(
            f"{folder} has no tokenizer.json: give numbers of tokens as 1,15,7, with --tokens."
        )
    codec, ends = Codec.load(found), _ends(folder)
    return Codec(
        codec.encode,
        lambda tokens: codec.decode(list(itertools.takewhile(lambda t: t not in ends, tokens))),
    )


def _ends(folder: Path) -> set[int]:
    """The tokens that end a text, as the folder's files say."""
    special = folder / "generation_config.json"
    for contents in (
        json.loads(special.read_text()) if special.exists() else {},
        config_json(folder),
    ):
        found = contents.get("eos_token_id")
        if found is not None:
            return set(found if isinstance(found, list) else [found])
    return set()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Continue texts with a model in Hugging Face's format.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="config.json, safetensors files and tokenizer.json",
    )
    parser.add_argument("texts", nargs="+", help="texts to continue")
    parser.add_argument(
        "--tokens", action="store_true", help="read and print token numbers, for example 1,15,7"
    )
    parser.add_argument("--number", type=int, default=64, help="new tokens of each text")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="temperature of the sampling; 0: the likeliest token",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample among the likeliest tokens that have this probability together",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of random choices")
    parser.add_argument(
        "--mesh",
        help="mesh axes, such as model=2; -1: all devices; default: one device, in a job data=-1",
    )
    parser.add_argument(
        "--dtype", choices=(*DTYPES,), help="type to compute in; default: the model's"
    )
    return parser.parse_args(arguments)


def _mesh(text: str | None) -> jax.sharding.Mesh:
    """The mesh of `--mesh`; without it, one device, or all texts over all devices of a job."""
    if text is None and not in_job():
        return jaxhet.make_mesh({"model": 1}, devices=jax.devices()[:1])
    return jaxhet.make_mesh(parse_mesh(text or "data=-1"))


def _agreed(options: argparse.Namespace, texts: list[list[int]]) -> dict[str, str]:
    """Texts that all processes of a job must have in common; the folder may have another path."""
    given = {name: x for name, x in vars(options).items() if name not in ("folder", "texts")}
    found = {
        **{f"--{name.replace('_', '-')}": value for name, value in given.items()},
        "the texts": texts,
        "the config": read_config(options.folder),
        "the parameters": parameters(str(options.folder)),
    }
    return {name: str(value) for name, value in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exits with one line of text for an input that can't be used."""
    options = _options(arguments)
    if in_job():
        jaxhet.initialize()
    try:
        codec = _codec(options.folder, options.tokens)
        texts = [codec.encode(text) for text in options.texts]
        mesh = _mesh(options.mesh)
        Agreement().require(_agreed(options, texts))
        changes = {"dtype": options.dtype} if options.dtype else {}
        sampling = Sampling(options.temperature, options.top_p)
        config, params = load(options.folder, mesh, **changes)
        with jax.set_mesh(mesh):
            result = generate(
                config, params, texts, options.number, sampling=sampling, seed=options.seed
            )
    except (ValueError, OSError, jaxhet.UsageError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    if jax.process_index() == 0:
        for row in result.tokens:
            print(codec.decode(row.tolist()))
        times = f"{1e3 * result.first_s:.1f} ms, then {result.tokens_per_s:.1f} tokens/s"
        print(f"first token after {times}", file=sys.stderr)
    if in_job():
        jaxhet.shutdown()


if __name__ == "__main__":
    main()
