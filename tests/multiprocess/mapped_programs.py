"""Programs by name, more of them: bodies of shard_map, through `jax.jit` and `jaxhet.jit`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from programs import mesh_2d, named, put, values

import jaxhet

AXES = ("data", "model")


def by_both_jits(f: Callable[..., Any], *args: jax.Array, **options: Any) -> dict[str, Any]:
    """The results of `f` with `jax.jit` and with `jaxhet.jit`."""
    return {
        "jax": jax.jit(f, **options)(*args),
        "jaxhet": jaxhet.jit(f, **options)(*args),
    }


def mapped(body: Callable[[jax.Array], Any], rows: int = 2, columns: int = 6) -> dict[str, Any]:
    """Results of a body on a block of each device, with blocks for each device."""
    mesh = mesh_2d()
    x = put(values((mesh.size * rows, columns)), mesh, P(AXES))
    f = jax.shard_map(body, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    return by_both_jits(f, x)


def _ring(axes: Any) -> list[tuple[int, int]]:
    n = jax.lax.axis_size(axes)
    return [(i, (i + 1) % n) for i in range(n)]


@named
def ppermute() -> Any:
    def body(a: jax.Array) -> Any:
        forth = jax.lax.ppermute(a, "data", _ring("data"))
        some = jax.lax.ppermute(forth * 2, AXES, _ring(AXES)[1:])
        return forth, some, jax.lax.pshuffle(some, "data", range(jax.lax.axis_size("data"))[::-1])

    return mapped(body)


@named
def all_to_all() -> Any:
    def body(a: jax.Array) -> Any:
        over_data = jax.lax.all_to_all(a, "data", 0, 1, tiled=True)
        stacked = a.reshape(jax.lax.axis_size(AXES), -1)
        return over_data, jax.lax.all_to_all(stacked, AXES, 0, 0)

    return mapped(body, rows=len(jax.devices()), columns=3)


@named
def psum_scatter() -> Any:
    def body(a: jax.Array) -> Any:
        over_data = jax.lax.psum_scatter(a, "data", scatter_dimension=0, tiled=True)
        return over_data, jax.lax.psum_scatter(a.T, AXES, scatter_dimension=1, tiled=True)

    return mapped(body, rows=len(jax.devices()), columns=5)


@named
def all_gather_tiled() -> Any:
    def body(a: jax.Array) -> Any:
        over_data = jax.lax.all_gather(a, "data", axis=1, tiled=True)
        return over_data, jax.lax.all_gather(a, AXES, tiled=True).sum(0, keepdims=True)

    return mapped(body)


@named
def pmean_pmax_axis_index() -> Any:
    def body(a: jax.Array) -> Any:
        mine = a * (jax.lax.axis_index("data") + 1) - jax.lax.axis_index(AXES)
        return jax.lax.pmean(mine, AXES), jax.lax.pmax(mine, "data"), jax.lax.pmean(mine, "data")

    return mapped(body)


@named
def random_keys() -> Any:
    mesh = mesh_2d()
    split = NamedSharding(mesh, P("data", "model"))

    def sampled(seeds: jax.Array) -> Any:
        keys = jax.vmap(jax.random.key)(seeds)  # one for each row of devices
        rows = jax.vmap(lambda key: jax.random.uniform(key, (12,)))(keys)
        whole = jax.random.uniform(keys[0], (mesh.shape["data"] * 3, 8))
        whole = jax.lax.with_sharding_constraint(whole, split)
        return rows.sum(0), whole.sum(0)

    def in_body(seeds: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(seeds[0]), jax.lax.axis_index(AXES))
        return jax.lax.psum(jax.random.uniform(key, (7,)), AXES)

    seeds = put(np.arange(mesh.shape["data"], dtype=np.uint32), mesh, P("data"))
    body = jax.shard_map(in_body, mesh=mesh, in_specs=P("data"), out_specs=P(AXES), check_vma=False)
    replicated = NamedSharding(mesh, P())
    return by_both_jits(sampled, seeds, out_shardings=replicated), by_both_jits(body, seeds)


@named
def custom_vjp() -> Any:
    """A sum whose gradient is a mean, as the layers of tensor parallelism have it."""

    @jax.custom_vjp
    def total(a: jax.Array) -> jax.Array:
        return jax.lax.psum(a, "data")

    def forward(a: jax.Array) -> tuple[jax.Array, jax.Array]:
        return total(a), a

    def backward(a: jax.Array, g: jax.Array) -> tuple[jax.Array]:
        return (jax.lax.pmean(g * jnp.sign(a), "data"),)

    total.defvjp(forward, backward)
    return mapped(jax.grad(lambda a: jnp.sum(total(a) ** 2)))


@named
def checkpoint_of_collectives() -> Any:
    @jax.checkpoint
    def layer(a: jax.Array) -> jax.Array:
        gathered = jax.lax.all_gather(jnp.tanh(a), "data", tiled=True)
        return jax.lax.psum_scatter(jnp.sin(gathered), "data", tiled=True)

    return mapped(jax.grad(lambda a: jnp.sum(layer(layer(a)) ** 2)))


@named
def nested_scans() -> Any:
    def inner(carry: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        moved = jax.lax.ppermute(carry, "data", _ring("data")) * 0.5
        return moved + i, jax.lax.psum(moved, AXES)[:1]

    def outer(carry: jax.Array, i: jax.Array) -> tuple[jax.Array, Any]:
        carry, sums = jax.lax.scan(inner, carry, jnp.arange(3.0) * i)
        return jax.lax.pmean(carry, "data"), sums

    def body(a: jax.Array) -> Any:
        carry, sums = jax.lax.scan(outer, a, jnp.arange(2.0))
        return carry, sums.reshape(1, -1)

    return mapped(body)


@named
def cond_around_collectives() -> Any:
    def body(a: jax.Array) -> Any:
        is_positive = jax.lax.psum(a.sum(), AXES) > 0
        chosen = [
            jax.lax.cond(
                is_positive == wanted,
                lambda b: jax.lax.psum(jax.lax.ppermute(b, "data", _ring("data")), AXES),
                lambda b: jax.lax.all_gather(b, "data").max(0) * 2,
                a,
            )
            for wanted in (True, False)
        ]
        number = jax.lax.axis_size("data") % 3
        branches = [lambda b: b, lambda b: jax.lax.pmax(b, AXES), lambda b: jax.lax.pmean(b, AXES)]
        return chosen, jax.lax.switch(is_positive + number, branches, a)

    return mapped(body)
