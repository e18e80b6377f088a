"""A program that knows nothing of jaxhet: Flax and Optax, data parallel over all devices."""

import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

STEPS = 10


class Classifier(nn.Module):
    """Two layers with a layer norm between them."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4)(nn.relu(nn.LayerNorm()(nn.Dense(32)(x))))


def main() -> None:
    jax.distributed.initialize()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rng = np.random.default_rng(0)
    images = rng.standard_normal((8 * mesh.size, 16)).astype(np.float32)
    labels = rng.integers(0, 4, 8 * mesh.size)
    rows = NamedSharding(mesh, P("data"))
    x, y = (jax.make_array_from_callback(a.shape, rows, a.__getitem__) for a in (images, labels))
    model, optimizer = Classifier(), optax.adamw(1e-2)

    def init(key: jax.Array) -> tuple[Any, optax.OptState]:
        params = model.init(key, jnp.zeros((1, 16)))
        return params, optimizer.init(params)

    @jax.jit
    def step(
        params: Any, state: optax.OptState, x: jax.Array, y: jax.Array
    ) -> tuple[Any, optax.OptState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            logits: Any = model.apply(params, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params, state = jax.jit(init, out_shardings=NamedSharding(mesh, P()))(jax.random.key(0))
    losses = []
    for _ in range(STEPS):
        params, state, value = step(params, state, x, y)
        losses.append(float(value))
    print(json.dumps({str(jax.process_index()): {"losses": {"adamw": losses}}}), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
