"""Loss and speed of training over a thin link, by what crosses it. The plain LLaMA in one job.

    jaxhet launch --islands 2 --devices 1 -- python -m benchmarks.thin_links --json runs/thin.json
    python -m benchmarks.thin_links --json runs/thin.json --plot docs/figures/thin-links.svg

Each run trains the same model on the same text (Python's language reference, as bytes), with one
position of the mesh axis "data" per device. A run with rows in other places shows how far rounding
alone leads: its difference is the noise floor. Both vary: take the mean over several `--seed`s. A
loss is the mean of the last tenth of the steps.
`--link` is a text for the table. `--plot` draws a file of `--json` and trains nothing.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from benchmarks import plain_llama, tables
from jaxhet import optim
from models.extras import corpus

SIZES = {
    # The MLP's gradients have 2 MiB in bfloat16. All others are below 1 MiB and not compressed.
    "small": plain_llama.Size(layers=2, embed=512, heads=8, hidden=2048, vocab=256, scan=False),
    # Gradients of 256 MiB in float32, almost all in arrays that are compressed; for GPUs.
    "wide": plain_llama.Size(
        layers=4, embed=1024, heads=8, hidden=4096, vocab=256, scan=False, dtype="float32"
    ),
}
LENGTH = 64  # tokens of a row


@dataclasses.dataclass(frozen=True)
class Row:
    """Result of a method: its loss, tokens in each second, and the loss of each step."""

    name: str
    loss: float
    tokens_per_s: float
    losses: Sequence[float]


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


def batches(steps: int, rows: int, is_swapped: bool, seed: int) -> list[np.ndarray]:
    """Tokens [rows, LENGTH + 1] of each step."""
    text = corpus.open_corpus()
    draw = np.random.default_rng(seed)
    begins = draw.integers(0, text.size - LENGTH - 1, (steps, rows))
    begins = begins[:, ::-1] if is_swapped else begins
    return [
        np.stack([text.read(b, b + LENGTH + 1) for b in row]).astype(np.int32) for row in begins
    ]


def train(method: Method, size: plain_llama.Size, steps: int, rows: int, seed: int) -> Row:
    """Trains with a method. The rate is measured in the second half of the steps."""
    mesh = jax.sharding.get_mesh()
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    tx: Any = method.transform() if method.transform else plain_llama.OPTIMIZER
    of_loss = jax.value_and_grad(functools.partial(plain_llama.loss, size))
    each = jax.vmap(of_loss, in_axes=(0 if method.has_copies else None, 0), spmd_axis_name="data")

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        if method.transform:
            loss, gradients = each(params, tokens.reshape(mesh.size, -1, tokens.shape[1]))
            # One for each position, which stays there: a mean would wait for the link in each step.
            loss = jax.lax.with_sharding_constraint(loss, split)
        else:
            loss, gradients = of_loss(params, tokens)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def init() -> Any:
        params = plain_llama.init(size, jax.random.key(seed))[0]
        if not method.has_copies:
            return params
        return jax.tree.map(lambda x: jnp.stack([x] * mesh.size), params)

    where = split if method.has_copies else whole
    params = jax.jit(init, out_shardings=where)()
    state, losses, halfway = jax.jit(tx.init)(params), [], 0.0
    jitted = jaxhet.jit(step, bridge={"wire": method.wire}, donate_argnums=(0, 1))
    for number, tokens in enumerate(batches(steps, rows, method.is_swapped, seed)):
        if number == steps // 2:
            jax.block_until_ready(params)
            halfway = time.perf_counter()
        there = jax.make_array_from_callback(tokens.shape, split, tokens.__getitem__)
        params, state, loss = jitted(params, state, there)
        losses.append(loss)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - halfway
    means = jaxhet.jit(lambda xs: jnp.stack(xs).reshape(steps, -1).mean(1), out_shardings=whole)
    values = np.asarray(means(losses).addressable_data(0)).tolist()
    loss = float(np.mean(values[-max(steps // 10, 1) :]))
    return Row(method.name, loss, (steps - steps // 2) * rows * LENGTH / seconds, values)


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draws the mean losses of each 20 steps as an SVG: all, and their distances from the first."""
    import matplotlib

    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as text: a small file
    matplotlib.rcParams["svg.hashsalt"] = "thin links"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    means = {
        r.name: np.reshape(r.losses[: len(r.losses) // 20 * 20], (-1, 20)).mean(1) for r in rows
    }
    first = means[rows[0].name]
    for name, mean in means.items():
        steps = 20 * np.arange(1, len(mean) + 1)
        panels[0].plot(steps, mean, label=name, linewidth=1.2)
        panels[1].plot(steps, np.abs(mean - first) + 1e-9, linewidth=1.2)
    panels[0].set(xlabel="step", ylabel="loss (nats per byte)")
    panels[1].set(
        xlabel="step", ylabel=f"distance from {rows[0].name}", yscale="log", ylim=(1e-6, 1)
    )
    panels[0].legend(fontsize="x-small")
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small", help="size of the model")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=16, help="rows of a step, over all devices")
    parser.add_argument("--seed", type=int, default=0, help="parameters and order of the text")
    parser.add_argument("--link", default="this machine")
    parser.add_argument("--only", action="append", help="name of a method; give it again for more")
    parser.add_argument("--json", type=pathlib.Path, help="file for all results")
    parser.add_argument("--plot", type=pathlib.Path, help="file for the figure (.svg)")
    options = parser.parse_args()
    if options.plot:
        return plot(
            [Row(**row) for row in json.loads(options.json.read_text())["rows"]], options.plot
        )
    jaxhet.initialize()
    is_first = jax.process_index() == 0
    facts = {"made": tables.made_at()} | {
        n: getattr(options, n) for n in ("size", "steps", "rows", "seed", "link")
    }
    done: list[Row] = []
    if is_first:
        print("| link | method | tokens/s | loss | difference |\n|---|---|---|---|---|", flush=True)
    with jax.set_mesh(jaxhet.make_mesh({"data": -1})):
        for method in METHODS:
            if options.only and method.name not in options.only:
                continue
            row = train(method, SIZES[options.size], options.steps, options.rows, options.seed)
            done.append(row)
            if is_first:
                cells = options.link, row.name, f"{row.tokens_per_s:.0f}", f"{row.loss:.5f}"
                print(f"| {' | '.join(cells)} | {row.loss - done[0].loss:+.1e} |", flush=True)
                tables.write_json(options.json, facts, done)
    if is_first:
        print(facts["made"], flush=True)
    jaxhet.shutdown()
    return None


if __name__ == "__main__":
    main()
