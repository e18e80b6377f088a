"""Loss and speed of training over a thin link, by what crosses it. The plain LLaMA in one job.

    jaxhet launch --islands 2 --devices 1 -- python -m benchmarks.thin_links

Each run trains the same model on the same text (this project's documents, as bytes), with one
position of the mesh axis "data" per device. A run with rows in other places shows how far rounding
alone leads. A loss is the mean of the last tenth of the steps. `--link` is a text for the table.
"""

import argparse
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from benchmarks import plain_llama
from jaxhet import optim

# The MLP's gradients have 2 MiB in bfloat16. All others are below 1 MiB and not compressed.
SIZE = plain_llama.Size(layers=2, embed=512, heads=8, hidden=2048, vocab=256, scan=False)
LENGTH = 64  # tokens of a row


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train; `transform` has gradients of each position as `jaxhet.optim` does."""

    name: str
    wire: str = ""
    is_swapped: bool = False
    transform: Callable[[], Any] | None = None
    has_copies: bool = False


def _diloco(**options: Any) -> Callable[[], Any]:
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    inner = plain_llama.OPTIMIZER
    return lambda: optim.diloco(inner, outer, "data", every=20, fragments=2, **options)


METHODS = (
    Method("f32"),
    Method("f32, rows swapped", is_swapped=True),
    Method("mxint8", "mxint8"),
    Method("mxfp8", "mxfp8"),
    Method("mxint4", "mxint4"),
    Method(
        "mxint4 with error feedback",
        transform=lambda: optim.error_feedback(plain_llama.OPTIMIZER, "data", "mxint4"),
    ),
    Method("DiLoCo", transform=_diloco(), has_copies=True),
    Method("DiLoCo mxint4", transform=_diloco(wire="mxint4"), has_copies=True),
    Method("DiLoCo mxint4, delay 5", transform=_diloco(wire="mxint4", delay=5), has_copies=True),
)


def batches(steps: int, rows: int, is_swapped: bool) -> list[np.ndarray]:
    """Tokens [rows, LENGTH + 1] of each step."""
    folder = pathlib.Path(__file__).parents[1] / "docs"
    text = np.frombuffer(b"".join(f.read_bytes() for f in sorted(folder.rglob("*.md"))), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - LENGTH - 1, (steps, rows, 1))
    starts = starts[:, ::-1] if is_swapped else starts
    return list(text[starts + np.arange(LENGTH + 1)].astype(np.int32))


def train(method: Method, steps: int, rows: int) -> tuple[float, float]:
    """The loss, and tokens in each second of the second half of the steps."""
    mesh = jax.sharding.get_mesh()
    split = NamedSharding(mesh, P("data"))
    tx: Any = method.transform() if method.transform else plain_llama.OPTIMIZER
    of_loss = jax.value_and_grad(functools.partial(plain_llama.loss, SIZE))
    each = jax.vmap(of_loss, in_axes=(0 if method.has_copies else None, 0), spmd_axis_name="data")

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        if method.transform:
            losses, gradients = each(params, tokens.reshape(mesh.size, -1, tokens.shape[1]))
            loss = losses.mean()
        else:
            loss, gradients = of_loss(params, tokens)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def init() -> Any:
        params = plain_llama.init(SIZE, jax.random.key(0))[0]
        if not method.has_copies:
            return params
        return jax.tree.map(lambda x: jax.numpy.stack([x] * mesh.size), params)

    where = split if method.has_copies else NamedSharding(mesh, P())
    params = jax.jit(init, out_shardings=where)()
    state, losses, halfway = jax.jit(tx.init)(params), [], 0.0
    jitted = jaxhet.jit(step, bridge={"wire": method.wire}, donate_argnums=(0, 1))
    for number, tokens in enumerate(batches(steps, rows, method.is_swapped)):
        if number == steps // 2:
            jax.block_until_ready(params)
            halfway = time.perf_counter()
        there = jax.make_array_from_callback(tokens.shape, split, tokens.__getitem__)
        params, state, loss = jitted(params, state, there)
        losses.append(loss)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - halfway
    last = losses[-max(steps // 10, 1) :]
    loss = float(np.mean([float(x.addressable_data(0)) for x in last]))
    return loss, (steps - steps // 2) * rows * LENGTH / seconds


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--link", default="this machine")
    parser.add_argument("--only", default="", help="names of methods that begin so")
    options = parser.parse_args()
    jaxhet.initialize()
    first = 0.0
    if jax.process_index() == 0:
        print("| link | method | tokens/s | loss | difference |\n|---|---|---|---|---|", flush=True)
    with jax.set_mesh(jaxhet.make_mesh({"data": -1})):
        for method in METHODS:
            if not method.name.startswith(options.only):
                continue
            loss, rate = train(method, options.steps, options.rows)
            first = first or loss
            if jax.process_index() == 0:
                cells = options.link, method.name, f"{rate:.0f}", f"{loss:.5f}"
                print(f"| {' | '.join(cells)} | {loss - first:+.1e} |", flush=True)
    jaxhet.shutdown()


if __name__ == "__main__":
    main()
