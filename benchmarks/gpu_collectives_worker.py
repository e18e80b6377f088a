"""One process of the collectives benchmark: compiles, checks and times cases; times copies."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

import jaxhet
from benchmarks.collectives import Case, num_elements
from benchmarks.on_devices import chained, facts
from tests.support import jobs

# Sums of values below it are whole numbers in bfloat16 up to 8 ranks; powers of two, at which
# blocks begin, are no multiples of it.
_PERIOD = 7
_COPIES = 5

Block = Callable[[jax.Array], jax.Array]


@functools.cache
def _mesh() -> jax.sharding.Mesh:
    return jaxhet.make_mesh({"x": -1})


def _mapped(body: Callable[..., Any], *in_specs: Any, out_specs: Any) -> Any:
    mapped = jax.shard_map(
        body, mesh=_mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(mapped)


def _elements(case: Case) -> int:
    return num_elements(case.num_bytes, jnp.dtype(case.dtype).itemsize, _mesh().size)


def _pattern(first: Any, count: int, dtype: str, factor: Any) -> jax.Array:
    """Elements [first, first + count) of what a rank gives, times `factor`."""
    return ((first + jnp.arange(count)) % _PERIOD * factor).astype(dtype)


@functools.cache
def _operand(count: int, dtype: str) -> jax.Array:
    """`count` elements on each device, made there: rank r has the pattern r + 1 times."""

    def body() -> jax.Array:
        return _pattern(0, count, dtype, jax.lax.axis_index("x") + 1)

    return _mapped(body, out_specs=P("x"))()


def _collective(case: Case) -> Block:
    """The collective on a rank's block; the result has one axis, too."""
    n = _mesh().size
    ring = [(i, (i + 1) % n) for i in range(n)]
    by_name: dict[str, Block] = {
        "all_reduce": lambda x: jax.lax.psum(x, "x"),
        "all_gather": lambda x: jax.lax.all_gather(x, "x", tiled=True),
        "reduce_scatter": lambda x: jax.lax.psum_scatter(x, "x", tiled=True),
        "all_to_all": lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True),
        "permute": lambda x: jax.lax.ppermute(x, "x", ring),
    }
    return by_name[case.collective]


def _expected(case: Case) -> jax.Array:
    """What the calling rank should get, of the pattern alone."""
    n, count = _mesh().size, _elements(case)
    rank, part = jax.lax.axis_index("x"), count // n
    total = n * (n + 1) // 2
    if case.collective == "all_reduce":
        return _pattern(0, count, case.dtype, total)
    if case.collective == "reduce_scatter":
        return _pattern(rank * part, part, case.dtype, total)
    if case.collective == "permute":
        return _pattern(0, count, case.dtype, (rank - 1) % n + 1)
    first = 0 if case.collective == "all_gather" else rank * part
    return jnp.concatenate([_pattern(first, part, case.dtype, r + 1) for r in range(n)])


def _sums_in_place(case: Case) -> tuple[Any, Any]:
    """As `chained`, of all-reduces: each takes the result of the one before, and what it should be.

    XLA's all-reduce overwrites its operand: one that is needed again would be copied first.
    """
    run, n = _collective(case), _mesh().size

    def body() -> jax.Array:
        x = _pattern(0, _elements(case), case.dtype, jax.lax.axis_index("x") + 1)
        for _ in range(case.links):
            x = run(jax.lax.optimization_barrier(x))
        return x[-1:]

    return _mapped(body, out_specs=P("x")), lambda: _expected(case)[-1] * n ** (case.links - 1.0)


@functools.cache
def _prepared(case: Case) -> tuple[Any, tuple[jax.Array, ...]]:
    """The case's program, compiled, run and checked once, and its operands."""
    count, run = _elements(case), _collective(case)
    parts = _mesh().size if case.collective == "all_gather" else 1
    operands = (_operand(count // parts, case.dtype),)
    if case.links and case.collective == "all_reduce":
        (program, want), operands = _sums_in_place(case), ()
    elif case.links:
        program = _mapped(lambda x: chained([(run, x)] * case.links), P("x"), out_specs=P("x"))
        want = lambda: _expected(case)[-1]  # noqa: E731
    else:
        program, want = _mapped(run, P("x"), out_specs=P("x")), lambda: _expected(case)
    check = _mapped(lambda y: jnp.all(y == want())[None], P("x"), out_specs=P("x"))
    right = [bool(s.data[0]) for s in check(program(*operands)).addressable_shards]
    assert all(right), f"{case}: wrong numbers on local devices {np.flatnonzero(~np.array(right))}"
    return program, operands


def _failure(case: Case) -> str:
    """Prepares a case; what is wrong with it, or nothing."""
    try:
        _prepared(case)
    except Exception as error:  # one case must not hide the others
        return f"{type(error).__name__}: {error}"
    return ""


def _times(case: Case, iterations: int) -> list[float]:
    """Seconds of each collective: of a call, or of a link of the chain."""
    program, operands = _prepared(case)
    if iterations > 1:  # else it takes long, and a little more at its begin does not count
        jax.block_until_ready(program(*operands))
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        jax.block_until_ready(program(*operands))
        times.append((time.perf_counter() - start) / max(case.links, 1))
    return times


def _copies(num_bytes: int) -> dict[str, float]:
    """GB/s between the memory of this process's devices, all at once, and pinned host memory."""
    devices = jax.local_devices()
    here = [SingleDeviceSharding(d, memory_kind="pinned_host") for d in devices]
    there = [SingleDeviceSharding(d) for d in devices]
    given = [jax.jit(lambda: jnp.ones(num_bytes // 4), out_shardings=s)() for s in there]
    rates = {}
    for name, targets in (("to_host", here), ("to_device", there)):
        # A program's copy: XLA hands it to the driver as it is.
        copies = [jax.jit(lambda x, s=s: jax.device_put(x, s), out_shardings=s) for s in targets]
        copied = [copy(x) for copy, x in zip(copies, given, strict=True)]
        jax.block_until_ready(copied)
        seconds = []
        for _ in range(_COPIES):
            start = time.perf_counter()
            jax.block_until_ready([copy(x) for copy, x in zip(copies, given, strict=True)])
            seconds.append(time.perf_counter() - start)
        given = copied
        rates[name] = num_bytes / float(np.median(seconds)) / 1e9
    return rates


def _answer(request: dict[str, Any]) -> Any:
    match request:
        case {"prepare": cases}:
            return [_failure(case) for case in cases]
        case {"time": case, "iterations": iterations}:
            return _times(case, iterations)
        case {"copies": num_bytes}:
            return _copies(num_bytes)
    return facts()


if __name__ == "__main__":
    jobs.serve(_answer)
