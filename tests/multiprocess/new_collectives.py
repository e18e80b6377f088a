"""Collectives with a start and a done, unreduced arrays, and `jax.sharding.no_collectives`.

For `jax_api_worker.py`. All values are integers, so that sums are exact in any order.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_put_cases import put, shards
from jax._src.lax import parallel
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import jaxhet

# jax.lax has it since 0.12, and the others not yet.
psum_scatter_start: Any = getattr(jax.lax, "psum_scatter_start", parallel.psum_scatter_start)
BOTH = ("x", "y")


def _mesh(*axes: str, kind: AxisType = AxisType.Explicit) -> Mesh:
    """All devices along "x", which crosses islands, and "y"; further axes have one."""
    devices = jaxhet.make_mesh({"x": -1, "y": 2}).devices
    names = (*BOTH, *axes)
    return Mesh(devices.reshape(*devices.shape, *[1] * len(axes)), names, (kind,) * len(names))


def _put(shape: tuple[int, int], mesh: Mesh, *spec: Any) -> jax.Array:
    value = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    return put(value, NamedSharding(mesh, P(*spec)))


def started_collectives() -> Any:
    """Each kind, over all devices and over an axis, with work between start and done."""
    n = jax.device_count()
    mesh = _mesh(kind=AxisType.Auto)
    array = _put((n * n, 6), mesh, BOTH)
    ring = [(i, (i + 1) % n) for i in range(n)]

    def with_work(a: jax.Array) -> jax.Array:
        started = psum_scatter_start(a, BOTH, tiled=True)
        work = 3 * a[:1] + 1
        return started.done() + work

    bodies: dict[str, Callable[[jax.Array], jax.Array]] = {
        "psum_scatter": lambda a: psum_scatter_start(a, BOTH, tiled=True).done(),
        "psum": lambda a: jax.lax.pcast(parallel.psum_start(a, "x").done(), "x", to="varying"),
        "all_gather": lambda a: parallel.all_gather_start(a, BOTH, tiled=True).done(),
        "all_to_all": lambda a: parallel.all_to_all_start(a, BOTH, 0, 1, tiled=True).done(),
        "ppermute": lambda a: parallel.ppermute_start(a, BOTH, ring).done(),
        "with_work": with_work,
    }
    specs: dict[str, Any] = {"mesh": mesh, "in_specs": P(BOTH), "out_specs": P(BOTH)}
    return {
        name: shards(jax.jit(jax.shard_map(body, **specs))(array)) for name, body in bodies.items()
    }


def unreduced_arrays() -> Any:
    """Products whose sum over devices is left for later, with Explicit axes."""
    mesh = _mesh()

    def product(u: jax.Array, v: jax.Array, *axes: str) -> jax.Array:
        return jnp.einsum("ij,jk->ik", u, v, out_sharding=P(None, None, unreduced=frozenset(axes)))

    def gradient(v: jax.Array, u: jax.Array) -> jax.Array:
        def loss(v: jax.Array) -> jax.Array:
            return jnp.sum((u @ reshard(v, P(None, None, reduced=frozenset({"x"})))) ** 2) / 2

        return jax.grad(loss)(v)

    columns, rows = _put((6, 12), mesh, None, BOTH), _put((12, 2), mesh, BOTH, None)
    batch, whole = _put((6, 12), mesh, "x", None), _put((12, 2), mesh)
    with jax.set_mesh(mesh):
        unreduced = jax.jit(lambda u, v: product(u, v, *BOTH))(columns, rows)
        return {
            "result": shards(jax.jit(lambda w: reshard(w, P(None, None)))(unreduced)),
            "split": shards(
                jax.jit(lambda u, v: reshard(product(u, v, *BOTH), P("x", None)))(columns, rows)
            ),
            "gradient": shards(jax.jit(gradient)(whole, batch)),
        }


def no_collectives() -> Any:
    """Sums over one axis while others are forbidden, and what JAX says of a forbidden one."""
    from jax.sharding import no_collectives  # pyright: ignore[reportAttributeAccessIssue]

    mesh = _mesh("z", "w")
    array = _put((12, 6), mesh, "x", "y")

    def summed(axis: str) -> Any:
        body = jax.shard_map(
            lambda a: jax.lax.psum(a, axis), in_specs=P("x", "y"), out_specs=P(None, "y")
        )
        return shards(jax.jit(body)(array))

    with jax.set_mesh(mesh), no_collectives({"y", "z", "w"}):
        found = summed("x")
        try:
            summed("y")
        except Exception as error:
            return found, type(error).__name__, str(error)
    return found


NAMED: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (started_collectives, unreduced_arrays, no_collectives)
}
