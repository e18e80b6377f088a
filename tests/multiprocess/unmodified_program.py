"""A program that knows nothing of jaxhet: plain JAX in several processes, `jit` and `pmap`."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

STEPS = 3


def data(rows: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, 5)).astype(np.float32)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def train_by_jit() -> list[float]:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows = data(4 * mesh.size)
    x = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P("data")), rows.__getitem__)

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w, x)
        return value, w - 0.1 * gradient

    w = jnp.ones((5, 5))
    losses = []
    for _ in range(STEPS):
        value, w = step(w, x)
        losses.append(float(value))
    return losses


def train_by_pmap() -> list[float]:
    local = jax.local_device_count()
    start = jax.process_index() * local
    x = data(4 * jax.device_count()).reshape(-1, 4, 5)[start : start + local]

    @functools.partial(jax.pmap, axis_name="data")
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w, x)
        return jax.lax.pmean(value, "data"), w - 0.1 * jax.lax.pmean(gradient, "data")

    w = jnp.ones((local, 5, 5))
    losses = []
    for _ in range(STEPS):
        value, w = step(w, x)
        losses.append(float(value.addressable_shards[0].data[0]))
    return losses


def main() -> None:
    assert not jax.distributed.is_initialized()
    jax.distributed.initialize()
    assert jax.distributed.is_initialized()
    result = {
        "devices": len(jax.devices()),
        "losses": {"jit": train_by_jit(), "pmap": train_by_pmap()},
        "gathered": multihost_utils.process_allgather(np.int32(jax.process_index())).tolist(),
    }
    print(json.dumps({str(jax.process_index()): result}), flush=True)
    jax.distributed.shutdown()
    assert not jax.distributed.is_initialized()


if __name__ == "__main__":
    main()
