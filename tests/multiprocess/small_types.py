"""Collectives of types of less than a byte across islands, against those in wide types.

Run by two islands of two CPU devices; the last line is "all are right".
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (dtype names)
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet

DTYPES = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")
COLUMNS = 6


def _collectives(axis: str | tuple[str, ...], size: int) -> dict[str, Callable[..., jax.Array]]:
    ring = [(i, (i + 1) % size) for i in range(size)]
    return {
        "gather": lambda x: lax.all_gather(x, axis, axis=1, tiled=True),
        "gather_odd": lambda x: lax.all_gather(x[0, :3], axis),
        "all_to_all": lambda x: lax.all_to_all(jnp.tile(x, (1, 2)), axis, 1, 0, tiled=True),
        "permute": lambda x: lax.ppermute(x, axis, ring),
        "sum": lambda x: lax.psum(x, axis),
        "sum_of_two": lambda x: jnp.concatenate(lax.psum((x, x[:, :1]), axis), 1),
        "max": lambda x: lax.pmax(x, axis),
        "min": lambda x: lax.pmin(x, axis),
        "scatter": lambda x: lax.psum_scatter(
            jnp.tile(x, (1, 2)), axis, scatter_dimension=1, tiled=True
        ),
    }


def _run(mesh: Mesh, value: np.ndarray, dtype: str, wide: str) -> dict[str, jax.Array]:
    """The results of all collectives of values of `dtype`, done in the type `wide`."""

    def body(x: jax.Array) -> dict[str, jax.Array]:
        return {
            f"{name} over {axis}": f(x.astype(wide)).astype(dtype).astype("float32")
            for axis in ("x", ("x", "y"))
            for name, f in _collectives(axis, 4 if len(axis) == 2 else 2).items()
        }

    spec = P(("x", "y"))
    sharding = NamedSharding(mesh, spec)
    x = jax.make_array_from_callback(value.shape, sharding, lambda i: value[i].astype(dtype))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped)(x)


def main() -> None:
    jaxhet.initialize()
    mesh = jaxhet.make_mesh({"x": 2, "y": 2})
    for dtype in DTYPES:
        bits = int(dtype[-1]) if "int" in dtype else 1
        low = -1 << bits - 1 if dtype[0] == "i" else 0
        values = np.random.default_rng(0).integers(low, low + (1 << bits), (4, COLUMNS))
        narrow = _run(mesh, values, dtype, dtype)
        wide = _run(mesh, values, dtype, "int32" if "int" in dtype else "float32")
        for name, result in narrow.items():
            for mine, theirs in zip(
                result.addressable_shards, wide[name].addressable_shards, strict=True
            ):
                np.testing.assert_array_equal(mine.data, theirs.data, err_msg=f"{dtype} {name}")
    jaxhet.shutdown()
    print("all are right")
