"""Training programs that know nothing of jaxhet: a LLaMA, a model of Flax NNX, and LoRA.

    python -m benchmarks.unmodified {llama,nnx,lora} [--steps 20] [--tiny]

Each joins its world by `jax.distributed.initialize`. Process 0 prints a line of JSON: the losses
and the seconds of a step. `benchmarks/gpu_programs.py` runs them in two worlds and compares.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import plain_llama

PROGRAMS = ("llama", "nnx", "lora")
_WARM_UP = 3
_RANK = 16  # number of columns of LoRA's first matrices
Step = Callable[[jax.Array], jax.Array]  # a batch to its loss; keeps the state


def llama(size: plain_llama.Size, mesh: jax.sharding.Mesh) -> Step:
    """Data parallel, AdamW."""
    whole = NamedSharding(mesh, P())
    state = jax.jit(lambda: plain_llama.init(size, jax.random.key(0)), out_shardings=whole)()
    advance = jax.jit(
        lambda state, tokens: plain_llama.train_step(size, state, tokens), donate_argnums=0
    )

    def step(tokens: jax.Array) -> jax.Array:
        nonlocal state
        state, loss = advance(state, tokens)
        return loss

    return step


def lora(size: plain_llama.Size, mesh: jax.sharding.Mesh) -> Step:
    """Adapters of two matrices of each layer; the frozen weights are sharded over all devices."""

    def shard(x: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*[None] * (x.ndim - 1), "data") if x.ndim > 1 else P())

    make = lambda: plain_llama.init(size, jax.random.key(0))[0]  # noqa: E731
    frozen = jax.jit(make, out_shardings=jax.tree.map(shard, jax.eval_shape(make)))()
    optimizer = optax.adam(1e-3)
    key, shape = jax.random.key(1), (size.layers, size.embed, _RANK)
    adapters: Any = {
        name: (jax.random.normal(key, shape) * 0.02, jnp.zeros((size.layers, _RANK, size.embed)))
        for name in ("q", "v")
    }
    whole = NamedSharding(mesh, P())
    state = jax.jit(lambda: (adapters, optimizer.init(adapters)), out_shardings=whole)()

    def loss(adapters: Any, frozen: Any, tokens: jax.Array) -> jax.Array:
        tuned = {name: frozen[name] + a @ b for name, (a, b) in adapters.items()}
        return plain_llama.loss(size, {**frozen, **tuned}, tokens)

    @jax.jit
    def advance(state: Any, frozen: Any, tokens: jax.Array) -> Any:
        adapters, moments = state
        value, gradients = jax.value_and_grad(loss)(adapters, frozen, tokens)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(adapters, updates), moments), value

    def step(tokens: jax.Array) -> jax.Array:
        nonlocal state
        state, value = advance(state, frozen, tokens)
        return value

    return step


class _Model(nnx.Module):
    """Next token by attention and an MLP."""

    def __init__(self, size: plain_llama.Size, rngs: nnx.Rngs):
        e = size.embed
        self.embed = nnx.Embed(size.vocab, e, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(size.heads, e, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(e, rngs=rngs)
        self.up, self.down = nnx.Linear(e, 4 * e, rngs=rngs), nnx.Linear(4 * e, e, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens))
        return self.embed.attend(x + self.down(nnx.gelu(self.up(x))))


def nnx_model(size: plain_llama.Size, mesh: jax.sharding.Mesh) -> Step:
    """`nnx.jit`, `nnx.value_and_grad` and `nnx.Optimizer`, data parallel."""

    @nnx.jit
    def create() -> tuple[_Model, nnx.Optimizer]:
        model = _Model(size, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        for part in (model, optimizer):
            whole = NamedSharding(mesh, P())
            nnx.update(part, jax.lax.with_sharding_constraint(nnx.state(part), whole))
        return model, optimizer

    @nnx.jit
    def advance(model: _Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        def loss(model: _Model) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(
                model(tokens[:, :-1]), tokens[:, 1:]
            ).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    model, optimizer = create()
    return lambda tokens: advance(model, optimizer, tokens)


def main() -> None:
    """Trains, and prints what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try it on CPUs")
    parser.add_argument("--coordinator-address")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    args = parser.parse_args()
    jax.distributed.initialize(args.coordinator_address, args.num_processes, args.process_id)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    tiny: Any = {"layers": 2, "embed": 64, "heads": 2, "hidden": 96, "vocab": 256}
    size = plain_llama.Size(**(tiny if args.tiny else {}), rows=rows)
    seq, each = (32, 2) if args.tiny else (1024, 4)
    step = {"llama": llama, "nnx": nnx_model, "lora": lora}[args.program](size, mesh)
    shape, random = (each * mesh.size, seq + 1), np.random.default_rng(0)
    batches = [random.integers(size.vocab, size=shape, dtype=np.int32) for _ in range(4)]
    tokens = [jax.make_array_from_callback(shape, rows, lambda at, b=b: b[at]) for b in batches]
    losses, start = [], 0.0
    for number in range(args.steps):
        if number == _WARM_UP:
            jax.block_until_ready(losses)
            start = time.perf_counter()
        losses.append(step(tokens[number % len(tokens)]))
    values = [float(loss) for loss in losses]
    seconds = (time.perf_counter() - start) / (args.steps - _WARM_UP)
    if jax.process_index() == 0:
        print(json.dumps({"losses": values, "step_s": seconds}), flush=True)


if __name__ == "__main__":
    main()
