"""Programs whose plans are compared with the engine's counters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet

_STEPS = 3
Program = tuple[Any, tuple[Any, ...]]


def answer(name: str) -> dict[str, Any]:
    """Plan of a program, and the bytes that a run of it moved in each step.

    The plan is asked for before the program has run, after it has, and when JAX takes it from its
    persistent compilation cache.
    """
    jitted, args = PLANNED[name]()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in args]
    reports: list[jaxhet.PlanReport] = []
    counted: dict[str, float] = {}
    for moment in ("new", "run", "cached"):  # on one line: where a program is called is in the key
        if moment == "run":
            jax.block_until_ready(jitted(*args))
            before = jaxhet.stats()
            for _ in range(_STEPS):
                jax.block_until_ready(jitted(*args))
            counted = {k: (v - before[k]) / _STEPS for k, v in jaxhet.stats().items()}
        if moment == "cached":
            jax.clear_caches()
            _hits.clear()
        reports.append(jaxhet.plan(jitted, *shapes))
    return {
        "reports": reports,
        "hits": len(_hits),
        "exchanges": counted["exchanges_completed"],
        "bytes": sum(
            count
            for key, count in counted.items()
            if key.startswith("bytes_sent_") and key != "bytes_sent_local"
        ),
    }


def _listen(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _hits.append(event)


_hits: list[str] = []
jax.monitoring.register_event_listener(_listen)


def _mesh() -> Mesh:
    """A mesh whose first axis crosses islands."""
    return jaxhet.make_mesh({"data": -1, "model": 2})


def _values(shape: tuple[int, ...], mesh: Mesh, spec: P) -> jax.Array:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), values.__getitem__)


def _scan() -> Program:
    """Two loops, one inside the other."""
    mesh = _mesh()
    x = _values((mesh.shape["data"], 7), mesh, P("data"))

    def inner(c: jax.Array, _: Any) -> Any:
        return jax.lax.psum(c, "data") * 0.5, None

    def outer(c: jax.Array, _: Any) -> Any:
        c = jax.lax.scan(inner, c, None, length=3)[0]
        return c + jax.lax.pmax(c, "data"), None

    def f(a: jax.Array) -> jax.Array:
        return jax.lax.scan(outer, a, None, length=5)[0]

    specs = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": False}
    return jax.jit(jax.shard_map(f, mesh=mesh, **specs)), (x,)


def _train_step() -> Program:
    """Gradients large enough for a two-shot all-reduce, through `jaxhet.jit`."""
    mesh = _mesh()
    x = _values((mesh.size * 4, 200), mesh, P(("data", "model")))
    w = _values((200, 200), mesh, P())

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    return jaxhet.jit(step, out_shardings=NamedSharding(mesh, P())), (w, x)


def _local() -> Program:
    """Nothing that crosses islands."""
    return jax.jit(lambda a: a * 2), (jax.device_put(np.ones(3), jax.local_devices()[0]),)


PLANNED: dict[str, Callable[[], Program]] = {
    "scan": _scan,
    "train_step": _train_step,
    "local": _local,
}
