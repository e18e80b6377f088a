"""One collective as a program: compiled, checked and timed, by every process of a job."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxhet
from benchmarks.collectives import Case, num_elements

# Operands repeat after this number of elements. Blocks begin at powers of two, not at multiples.
_PERIOD = 7

Block = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A case whose program has run once.

    Attributes:
      case: Collective, size and type.
      program: The compiled function.
      operands: Arguments of `program`.
      num_wrong: Wrong elements of the result on this process's devices.
    """

    case: Case
    program: Callable[..., jax.Array]
    operands: tuple[jax.Array, ...]
    num_wrong: int

    def times(self, iterations: int, warmup: int = 1) -> list[float]:
        """Seconds until the result is ready, of a call or of each link of a chain."""
        for _ in range(warmup):
            jax.block_until_ready(self.program(*self.operands))
        seconds = []
        for _ in range(iterations):
            start = time.perf_counter()
            jax.block_until_ready(self.program(*self.operands))
            seconds.append((time.perf_counter() - start) / max(self.case.links, 1))
        return seconds


def prepare(case: Case) -> Prepared:
    """Compiles, runs and checks a case; all processes of the job do so at the same time."""
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
    check = _mapped(lambda y: _num_wrong(case, y, want())[None], P("x"), out_specs=P("x"))
    shards = check(program(*operands)).addressable_shards
    return Prepared(case, program, operands, sum(int(shard.data[0]) for shard in shards))


def chained(links: Sequence[tuple[Callable[[jax.Array], jax.Array], jax.Array]]) -> jax.Array:
    """Runs functions in order, each on its operand; returns the last element of each result.

    For use in a traced function. Barriers keep the order: only one element is copied between two
    links, and no compiler may merge or simplify the links.
    """
    ends: list[jax.Array] = []
    for run, operand in links:
        x = operand
        if ends:
            x, ends[-1] = jax.lax.optimization_barrier((operand, ends[-1]))
        y = jax.lax.optimization_barrier(run(x))
        ends.append(y[-1:])
    return jnp.concatenate(ends)


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
    """Elements [first, first + count) of the pattern, times `factor`."""
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
    """Expected result of the calling rank, computed from the pattern alone."""
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


def _num_wrong(case: Case, found: jax.Array, want: jax.Array) -> jax.Array:
    """Number of elements that differ; sums of floats may differ by as much as they round."""
    dtype = jnp.dtype(case.dtype)
    is_sum = case.collective in ("all_reduce", "reduce_scatter")
    if not is_sum or not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.sum(found != want.astype(dtype))
    wide = jnp.promote_types(dtype, jnp.float32)
    roundings = float(jnp.finfo(dtype).eps) * _mesh().size * max(case.links, 1)
    limit = roundings * jnp.abs(want.astype(wide))
    return jnp.sum(~(jnp.abs(found.astype(wide) - want.astype(wide)) <= limit))


def _sums_in_place(case: Case) -> tuple[Any, Any]:
    """Chain of all-reduces, each on the result of the one before, and the expected result.

    XLA's all-reduce overwrites its operand: one that is needed again would be copied first.
    """
    run, n = _collective(case), _mesh().size

    def body() -> jax.Array:
        x = _pattern(0, _elements(case), case.dtype, jax.lax.axis_index("x") + 1)
        for _ in range(case.links):
            x = run(jax.lax.optimization_barrier(x))
        return x[-1:]

    return _mapped(body, out_specs=P("x")), lambda: _expected(case)[-1] * n ** (case.links - 1.0)
