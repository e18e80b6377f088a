"""One process of the all-reduce benchmark."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from jaxhet import testing


@functools.cache
def _prepared(dtype: str, num_bytes: int) -> tuple[Any, jax.Array]:
    """A compiled all-reduce of `num_bytes` per device, checked once, and its operand."""
    mesh = jaxhet.make_mesh({"x": -1})
    num_elements = num_bytes // jnp.dtype(dtype).itemsize
    host = (np.arange(num_elements) % 61).astype(dtype)

    def rows(where: tuple[slice, ...] | None) -> np.ndarray:
        assert where is not None
        return np.stack([host * (1 + i) for i in np.arange(mesh.size)[where[0]]]).astype(dtype)

    sharding = NamedSharding(mesh, P("x"))
    x = jax.make_array_from_callback((mesh.size, num_elements), sharding, rows)
    psum = jax.jit(
        jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    )
    out = np.asarray(psum(x).addressable_shards[0].data, np.float64)[0]
    expected = host.astype(np.float64) * sum(1 + i for i in range(mesh.size))
    np.testing.assert_allclose(out, expected, rtol=1e-2 if dtype == "bfloat16" else 1e-6)
    return psum, x


def _all_reduce(dtype: str, num_bytes: int, iterations: int) -> list[float]:
    psum, x = _prepared(dtype, num_bytes)
    psum(x).block_until_ready()
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        psum(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return times


def _unrelated(repeat: int) -> dict[str, float]:
    """Compile and run times of a program without collectives, in seconds.

    A new program for each repeat.
    """

    def f(x: jax.Array) -> jax.Array:
        for i in range(30):
            x = jnp.tanh(x @ x) + (repeat + i)
        return x

    device = jax.local_devices()[0]
    x = jax.device_put(np.ones((128, 128), np.float32), device)
    start = time.perf_counter()
    compiled = jax.jit(f).lower(x).compile()
    compile_s = time.perf_counter() - start
    runs = []
    for _ in range(30):
        start = time.perf_counter()
        compiled(x).block_until_ready()
        runs.append(time.perf_counter() - start)
    return {"compile_s": compile_s, "run_s": float(np.median(runs))}


def _answer(request: dict[str, Any]) -> Any:
    if "unrelated" in request:
        return _unrelated(request["unrelated"])
    return _all_reduce(request["dtype"], request["bytes"], request["iterations"])


if __name__ == "__main__":
    testing.serve(_answer)
