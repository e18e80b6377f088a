"""Random shard_map programs: collectives of all kinds over random axes of a random mesh."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from programs import put

import jaxhet


def _reduce(x: jax.Array, reducer: str, axes: tuple[str, ...]) -> jax.Array:
    """A maximum or minimum.

    In one world it is taken of gathered values: XLA's CPU runtime drops NaN or keeps it as the
    threads happen to come, while HLO's `maximum` and `minimum`, which jaxhet uses, keep it. The
    barrier keeps XLA from making an all-reduce.
    """
    if len(jax.devices()) == jax.local_device_count():
        rows = jax.lax.optimization_barrier(jax.lax.all_gather(x, axes))
        return functools.reduce(jnp.maximum if reducer == "max" else jnp.minimum, list(rows))
    return (jax.lax.pmax if reducer == "max" else jax.lax.pmin)(x, axes)


def _apply(x: jax.Array, kind: str, axes: tuple[str, ...], details: Sequence[Any]) -> jax.Array:
    """One step of a program; `details` are dimensions, or the pairs of a permute."""
    match kind:
        case "sum":
            return jax.lax.psum(x, axes)
        case "max" | "min":
            return _reduce(x, kind, axes)
        case "gather":
            return jax.lax.all_gather(x, axes, axis=details[0], tiled=True)
        case "stack":
            return jax.lax.all_gather(x, axes, axis=details[0])
        case "scatter":
            return jax.lax.psum_scatter(x, axes, scatter_dimension=details[0], tiled=True)
        case "all_to_all":
            return jax.lax.all_to_all(x, axes, details[0], details[1], tiled=True)
        case _:
            return jax.lax.ppermute(x, axes, details)


def special_values(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Random values with NaN, ±0, infinities and denormals (floats), or the whole range (ints)."""
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)
    plain = rng.standard_normal(shape)
    if dtype.kind == "c":
        return (plain + 1j * rng.standard_normal(shape)).astype(dtype)
    out = plain.astype(dtype)
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    special = np.array([np.nan, 0.0, -0.0, np.inf, -np.inf, tiny, -tiny], np.float64).astype(dtype)
    where = rng.random(shape) < 0.2
    return np.where(where, rng.choice(special, shape), out).astype(dtype)


def order(program: dict[str, Any], num_devices: int) -> np.ndarray:
    """The positions of the devices in the mesh."""
    positions = np.arange(num_devices)
    if program["permute"]:
        positions = np.random.default_rng(program["seed"]).permutation(num_devices)
    return positions.reshape([size for _, size in program["mesh"]])


def run(program: dict[str, Any]) -> list[jax.Array]:
    """Runs a program of the strategy in test_random.py."""
    sizes = dict(program["mesh"])
    devices = jaxhet.make_mesh({"all": -1}).devices.ravel()
    mesh = Mesh(devices[order(program, len(devices))], tuple(sizes))
    spec = P(tuple(sizes))
    arrays = [
        put(
            special_values((len(devices), *shape), np.dtype(dtype), program["seed"] + i),
            mesh,
            spec,
        )
        for i, (shape, dtype) in enumerate(program["arrays"])
    ]

    def body(*blocks: jax.Array) -> list[jax.Array]:
        results = [block[0] for block in blocks]
        for target, kind, axes, details in program["steps"]:
            results[target] = _apply(results[target], kind, axes, details)
        return [result[None] for result in results]

    f = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(f)(*arrays)
