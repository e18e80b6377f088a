"""Programs by name: plain JAX, the same on islands and in one world."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (dtype names of f8 and int4)
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet

NAMED: dict[str, Callable[[], Any]] = {}


def named(function: Callable[[], Any]) -> Callable[[], Any]:
    """Registers a program under its name."""
    NAMED[function.__name__] = function
    return function


def mesh_2d() -> Mesh:
    """A mesh whose first axis crosses islands; the second one has 2 devices if there are enough."""
    n = len(jax.devices())
    inner = 2 if n % 2 == 0 and n > 2 else 1
    return jaxhet.make_mesh({"data": n // inner, "model": inner})


def put(value: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """A global array from the same host value on all processes; moves nothing between processes."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def values(shape: tuple[int, ...], seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """Standard normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _psum_over(axes: Any) -> Any:
    mesh = mesh_2d()
    n, m = mesh.devices.shape
    x = put(values((n * 3, m * 5)), mesh, P("data", "model"))
    f = jax.shard_map(
        lambda a: jax.lax.psum(a * a, axes),
        mesh=mesh,
        in_specs=P("data", "model"),
        out_specs=P(*(None if a in axes else a for a in ("data", "model"))),
    )
    return jax.jit(f)(x)


@named
def psum_one_axis() -> Any:
    return _psum_over(("data",))


@named
def psum_two_axes() -> Any:
    return _psum_over(("data", "model"))


@named
def psum_large() -> Any:
    mesh = mesh_2d()
    x = put(values((mesh.shape["data"], 300_001)), mesh, P("data"))
    return jax.jit(
        jax.shard_map(
            lambda a: jax.lax.psum(a, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
    )(x)


@named
def psum_tree_of_dtypes() -> Any:
    mesh = mesh_2d()
    tree = {
        "a": values((mesh.shape["data"] * 2, 3)),
        "b": values((mesh.shape["data"], 40_000), 1),
        "c": np.arange(mesh.shape["data"] * 7, dtype=np.int32),
        "d": values((mesh.shape["data"], 5), 2, np.float16),
    }
    x = jax.tree.map(lambda v: put(v, mesh, P("data")), tree)
    return jax.jit(
        jax.shard_map(
            lambda t: jax.lax.psum(t, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
    )(x)


@named
def pmax_pmin_pmean() -> Any:
    mesh = mesh_2d()
    x = put(values((mesh.shape["data"] * 2, 9)), mesh, P("data"))
    f = lambda a: (jax.lax.pmax(a, "data"), jax.lax.pmin(a, "data"), jax.lax.pmean(a, "data"))  # noqa: E731
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P()))(x)


@named
def values_that_are_not_finite() -> Any:
    """Sums of each pair of NaN, infinities, zeros, a tiny and a huge number."""
    mesh = mesh_2d()
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -3e38, 1.0], np.float32)
    n = mesh.shape["data"]
    rows = np.stack([np.repeat(special, 8), *[np.tile(special, 8)] * (n - 1)])

    def f(a: jax.Array) -> Any:
        ring = [(i, (i + 1) % n) for i in range(n)]
        moved = jax.lax.ppermute(a, "data", ring), jax.lax.all_gather(a, "data")
        return (jax.lax.psum(a, "data"), *moved)

    specs = {"in_specs": P("data"), "out_specs": (P(), P("data"), P())}
    x = put(rows, mesh, P("data"))
    return jax.jit(jax.shard_map(f, mesh=mesh, check_vma=False, **specs))(x)


@named
def sharding_constraint() -> Any:
    mesh = mesh_2d()
    x = put(values((mesh.shape["data"] * 4, 8)), mesh, P("data"))

    def f(a: jax.Array) -> jax.Array:
        b = jax.lax.with_sharding_constraint(a * 2, NamedSharding(mesh, P("data", "model")))
        return jax.lax.with_sharding_constraint(b.sum(0), NamedSharding(mesh, P("model")))

    return jax.jit(f, out_shardings=NamedSharding(mesh, P("model")))(x)


def _loss(params: list[jax.Array], x: jax.Array, layer: Callable[..., jax.Array]) -> jax.Array:
    for w in params:
        x = layer(w, x)
    return jnp.mean(x**2)


def _train(layer: Callable[..., jax.Array], dtype: Any = np.float32, **jit_options: Any) -> Any:
    mesh = mesh_2d()
    params = [put(values((32, 32), i, dtype) * dtype(0.2), mesh, P()) for i in range(3)]
    x = put(values((mesh.shape["data"] * 4, 32), 9, dtype), mesh, P("data"))

    def step(params: list[jax.Array], x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(functools.partial(_loss, layer=layer))(params, x)
        return [
            w - jnp.asarray(0.1, w.dtype) * g for w, g in zip(params, grads, strict=True)
        ], value

    same = NamedSharding(mesh, P())
    jitted = jax.jit(step, out_shardings=([same] * 3, same), **jit_options)
    params, value = jitted(params, x)
    for _ in range(2):
        params, value = jitted(params, x)
    return params, value


@named
def grad_step() -> Any:
    return _train(lambda w, x: jnp.tanh(x @ w))


@named
def grad_step_donated() -> Any:
    return _train(lambda w, x: jnp.tanh(x @ w), donate_argnums=0)


@named
def grad_step_remat() -> Any:
    return _train(jax.checkpoint(lambda w, x: jnp.tanh(x @ w)))


@named
def grad_step_bfloat16() -> Any:
    return _train(lambda w, x: jnp.tanh(x @ w), jnp.bfloat16)


@named
def grad_step_float16() -> Any:
    return _train(lambda w, x: jnp.tanh(x @ w), np.float16)


@named
def scan_of_psums() -> Any:
    mesh = mesh_2d()
    x = put(values((mesh.shape["data"], 17)), mesh, P("data"))

    def body(carry: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = jax.lax.psum(carry * (i + 1), "data")
        return carry * 0.5 + total * 0.01, total

    def f(a: jax.Array) -> Any:
        carry, totals = jax.lax.scan(body, a[0], jnp.arange(6.0))
        return carry[None], totals

    shard = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P()))
    return jax.jit(shard)(x)


@named
def vmap_of_psum() -> Any:
    mesh = mesh_2d()
    x = put(values((mesh.shape["data"], 4, 6)), mesh, P("data"))
    f = jax.vmap(lambda row: jax.lax.psum(jnp.sin(row), "data"), in_axes=1, out_axes=1)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P()))(x)


@named
def permuted_mesh() -> Any:
    devices = list(jaxhet.make_mesh({"all": -1}).devices.flat)
    mesh = Mesh(np.array(devices[::-1]), ("x",))
    x = put(values((len(devices) * 2, 3)), mesh, P("x"))
    return jax.jit(
        jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    )(x)


def unequal_groups(n: int) -> list[list[list[int]]]:
    """Divisions of n devices into groups of unequal size."""
    return [
        [list(range(n - 1)), [n - 1]],
        [[0], list(range(1, n))],
        [[0, n - 1], *([i] for i in range(1, n - 1))],
    ]


@named
def sums_over_unequal_groups() -> Any:
    """For each division, the sum of long rows and the greatest of short bf16 rows."""
    mesh = jaxhet.make_mesh({"x": -1})
    n = mesh.shape["x"]
    x = put(values((n, 30_001)), mesh, P("x"))

    def body(a: jax.Array) -> Any:
        short = a[:, :7].astype(jnp.bfloat16)
        return [
            (
                jax.lax.psum(a, "x", axis_index_groups=groups),
                jax.lax.pmax(short, "x", axis_index_groups=groups),
            )
            for groups in unequal_groups(n)
        ]

    f = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return jax.jit(f)(x)


@named
def axis_index_groups() -> Any:
    mesh = jaxhet.make_mesh({"x": -1})
    n = mesh.shape["x"]
    groups = [[i, n - 1 - i] for i in range(n // 2)] if n % 2 == 0 else [list(range(n))]
    x = put(values((n, 11)), mesh, P("x"))
    f = jax.shard_map(
        lambda a: jax.lax.psum(a, "x", axis_index_groups=groups),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=False,
    )
    return jax.jit(f)(x)
