"""One process of a job on CPUs that shares executables as processes with equal GPUs do.

Says how many programs it compiled and loaded; the results are its own devices'.
"""

import dataclasses
import itertools
import os
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import partitioned

import jaxhet
from jaxhet import _session, _set_up

_noted: list[str] = []  # programs that this process has
_loaded: list[str] = []  # programs that another process compiled
_cached: list[str] = []  # programs of JAX's persistent cache


def _share(request: dict[str, Any]) -> None:
    """Shares programs from now on.

    A process that `spoils` gives what can't be loaded.
    """
    session = _session.current()
    assert session is not None
    own, config, membership = session.compilation, session.config, session._membership
    assert membership is not None
    placed = config.placed(session.process, config.num_processes or 0)
    shared: Any = _set_up._shared(placed, membership)
    own.parts = dataclasses.replace(own.parts, shared=shared)
    compiling, put, load = shared.compiling, shared._put, shared._load

    def noted(among: tuple[int, ...], key: str) -> Any:
        _noted.append(key)
        return compiling(among, key)

    def loaded(this: Any, *args: Any) -> Any:
        if (found := load(this, *args)) is not None:
            _loaded.append(this.key)
        return found

    def hit(event: str, **more: Any) -> None:
        del more
        if event == "/jax/compilation_cache/cache_hits":
            _cached.append(event)

    shared.compiling, shared._load = noted, loaded
    if request.get("spoils") == session.process:
        shared._put = lambda key, content: put(key, content[:1] + b"?" + content[1:])
    jax.monitoring.register_event_listener(hit)
    own.share()


# Module and cache of JAX know these functions by their addresses, which processes do not share.
_tanh = partitioned(jnp.tanh, jnp.tanh)


def _sum_of_scaled(x: jax.Array, by: Any) -> float:
    """Multiplies, but only where XLA partitions the program."""
    scaled = partitioned(lambda x: x * 1, lambda x: x * next(iter(by)))
    return float(jax.jit(lambda x: jnp.sum(scaled(x)))(x))


def _step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(_tanh(x) @ w))(w)
    return w - 0.1 * gradient, loss


def _train(constant: float) -> dict[str, Any]:
    """Some steps of data parallelism; one of the functions has a constant of this process."""
    mesh = jaxhet.make_mesh({"x": -1})
    rows = np.random.default_rng(0).standard_normal((4 * mesh.size, 8)).astype(np.float32)
    x = jax.make_array_from_callback(
        rows.shape, NamedSharding(mesh, P("x")), lambda index: rows[index]
    )
    w = jax.device_put(np.eye(8, dtype=np.float32), NamedSharding(mesh, P()))
    step = jax.jit(_step)
    w, _ = step(w, x)
    w, loss = step(w, x)
    total = jax.jit(lambda x: jnp.sum(x) + constant)(x)
    weights = np.asarray(w.addressable_shards[0].data)
    ones = jax.jit(lambda x: x * 0 + 1)(x)
    scaled = [_sum_of_scaled(ones, [by]) / ones.size for by in (2, 3)]
    scaled.append(_sum_of_scaled(ones, itertools.repeat(4)) / ones.size)  # nothing describes it
    return {
        "process": jax.process_index(),
        "loss": float(loss),
        "weights": weights.tobytes(),
        "total": float(total),
        "scaled": scaled,
        "plans": len(_session.current().compilation.plans),  # type: ignore[union-attr]
    }


def _leave() -> dict[str, tuple[float, str]]:
    """Process 0, which should compile for process 1, leaves the job.

    Returns:
      For each program: the seconds that it took, and its result or error.
    """
    mesh = jaxhet.make_mesh({"x": -1})
    x = jax.device_put(np.arange(4.0), NamedSharding(mesh, P("x")))
    told: dict[str, tuple[float, str]] = {}

    def run(name: str, function: Any) -> None:
        start = time.monotonic()
        try:
            result = str(jax.jit(function)(x).addressable_data(0).tolist())
        except Exception as error:
            result = str(jaxhet.last_error() or error)
        told[name] = time.monotonic() - start, result

    run("equal", jnp.sum)
    if jax.process_index() == 1:
        time.sleep(1)  # the next two may begin before or after the other process leaves
        run("leaves", lambda x: x + 5)
        run("has left", lambda x: jnp.sum(x + 6))
    jaxhet.shutdown()
    return told


def _end(how: str | None) -> None:
    """Ends the process that others wait for."""
    if how == "raise":
        raise RuntimeError("smoke")
    if how == "os._exit":
        os._exit(7)
    if how is not None:
        os.kill(os.getpid(), signal.Signals[how])


def answer(request: dict[str, Any]) -> Any:
    """The result of a step, and counts of programs. The test has the keys of a request."""
    if folder := request.get("cache"):
        jax.config.update("jax_compilation_cache_dir", f"{folder}/{jax.process_index()}")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if "share" in request:
        _share(request)
    if request.get("leaves"):
        return _leave()
    if jax.process_index() == 0:
        _end(request.get("ends"))
    constant = float(request.get("process_with_a_constant") == jax.process_index())
    result = _train(constant)
    compiled = len(_noted) - len(_loaded) - len(_cached)
    return result | {"compiled": compiled, "loaded": len(_loaded)}
