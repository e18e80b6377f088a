"""One process of the collectives' matrix: runs them and compares its own devices with numpy."""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from jaxhet import testing

assert ml_dtypes.bfloat16  # registers the names of the small float types with numpy

MOVES = ("gather", "all_to_all", "permute", "one_pair")
SUMS = ("sum", "sum_scatter")
ORDERS = ("max", "min")
NOT_EMPTY = ("gather", "sum_scatter")  # JAX does not lower them for blocks of no elements


def operations(dtype: str) -> tuple[str, ...]:
    """Collectives that make sense for a dtype, and that JAX lowers for the platform."""
    moves = (*MOVES, "broadcast") if jax.default_backend() == "gpu" else MOVES
    if dtype == "bool":
        return moves
    return (*SUMS, *moves) if dtype.startswith("complex") else (*SUMS, *ORDERS, *moves)


def given(dtype: str, rank: int, count: int) -> np.ndarray:
    """Operand of a rank: whole numbers whose sums even the small types hold."""
    rng = np.random.default_rng([rank, count])
    values = rng.integers(0, 2 if dtype == "bool" or "float8" in dtype else 7, count)
    return values.astype(dtype)


def factor(operation: str, n: int) -> int:
    """Blocks that a rank gives."""
    return n if operation in ("all_to_all", "sum_scatter") else 1


def expected(operation: str, blocks: list[np.ndarray], rank: int) -> np.ndarray:
    """Result of a rank, computed by numpy from the operands of all ranks."""
    n = len(blocks)
    parts = [block.reshape(n, -1)[rank] if block.size % n == 0 else block for block in blocks]
    before = blocks[(rank - 1) % n]
    by_name = {
        "sum": lambda: sum(blocks[1:], blocks[0]),
        "max": lambda: np.maximum.reduce(blocks),
        "min": lambda: np.minimum.reduce(blocks),
        "sum_scatter": lambda: sum(parts[1:], parts[0]),
        "gather": lambda: np.concatenate(blocks),
        "all_to_all": lambda: np.concatenate(parts),
        "permute": lambda: before,
        "broadcast": lambda: blocks[-1],
        "one_pair": lambda: blocks[-1] if rank == 0 else np.zeros_like(before),
    }
    return by_name[operation]()


def run(operation: str, x: jax.Array, n: int) -> jax.Array:
    """The collective on a rank's operand."""
    ring = [(i, (i + 1) % n) for i in range(n)]
    by_name = {
        "sum": lambda: jax.lax.psum(x, "x"),
        "max": lambda: jax.lax.pmax(x, "x"),
        "min": lambda: jax.lax.pmin(x, "x"),
        "sum_scatter": lambda: jax.lax.psum_scatter(x, "x", tiled=True),
        "gather": lambda: jax.lax.all_gather(x, "x", tiled=True),
        "all_to_all": lambda: jax.lax.all_to_all(x, "x", 0, 0, tiled=True),
        "permute": lambda: jax.lax.ppermute(x, "x", ring),
        "broadcast": lambda: jax.lax.pbroadcast(x, "x", n - 1),
        "one_pair": lambda: jax.lax.ppermute(x, "x", [(n - 1, 0)]),
    }
    return by_name[operation]()


def _put(mesh: jax.sharding.Mesh, blocks: list[np.ndarray]) -> jax.Array:
    """A block of equal shape for each rank, the first axes one after the other."""
    rows = np.concatenate(blocks)
    return jax.make_array_from_callback(
        rows.shape, NamedSharding(mesh, P("x")), lambda index: rows[index]
    )


def _mapped(mesh: jax.sharding.Mesh, body: Any, *args: Any) -> Any:
    """`body` on every rank; the results of all ranks, one after the other."""
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return jax.jit(mapped)(*args)


def _matrix(dtype: str, sizes: list[int], names: Sequence[str]) -> dict[str, Any]:
    """Errors on this process's devices, by operation and size; empty if there are none."""
    mesh = jaxhet.make_mesh({"x": -1})
    n = mesh.size
    position = {device: i for i, device in enumerate(mesh.devices.flat)}
    cases = [(o, size) for o in names for size in sizes if size or o not in NOT_EMPTY]
    blocks = {
        (op, size): [given(dtype, rank, size * factor(op, n)) for rank in range(n)]
        for op, size in cases
    }
    operands = [_put(mesh, blocks[case]) for case in cases]

    def body(*xs: jax.Array) -> list[jax.Array]:
        return [run(op, x, n) for (op, _), x in zip(cases, xs, strict=True)]

    wrong: dict[str, Any] = {}
    for case, result in zip(cases, _mapped(mesh, body, *operands), strict=True):
        texts = []
        for shard in result.addressable_shards:
            want = expected(case[0], blocks[case], position[shard.device])
            got = np.asarray(shard.data)
            if got.dtype != want.dtype or got.tobytes() != want.tobytes():
                texts.append(f"rank {position[shard.device]}: {got[:8]} is not {want[:8]}")
        wrong[f"{case[0]} {case[1]}"] = texts
    return wrong


def _precision(count: int, width: int) -> dict[str, list[str]]:
    """By program, a digest of each local device's copy of a sum, after a check against numpy.

    Each tempts a compiler to keep more bits of a rank's own bf16 value than it has sent.
    """
    mesh = jaxhet.make_mesh({"x": -1})
    n = mesh.size
    rng = np.random.default_rng(0)
    a, b = (
        [rng.standard_normal((count, width)).astype(jnp.bfloat16) for _ in range(n)]
        for _ in range(2)
    )

    def wide(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32)

    def body(a: jax.Array, b: jax.Array) -> dict[str, jax.Array]:
        product = a * b
        dot = (a.T @ b).astype(jnp.bfloat16)
        return {
            "wide sum of products": jax.lax.psum(wide(product), "x"),
            "sum of products, widened": wide(jax.lax.psum(product, "x")),
            "sum and own product": wide(jax.lax.psum(product + product, "x")) * 0.5,
            "sum of dots, widened": wide(jax.lax.psum(dot, "x")),
            "wide sum of dots": jax.lax.psum(wide(dot), "x"),
        }

    wide_a, wide_b = (np.stack(x).astype(np.float64) for x in (a, b))
    products = (wide_a * wide_b).sum(0)
    dots = np.einsum("rci,rcj->ij", wide_a, wide_b)
    digests = {}
    for name, result in _mapped(mesh, body, _put(mesh, a), _put(mesh, b)).items():
        want = dots if "dots" in name else products
        copies = [np.asarray(shard.data) for shard in result.addressable_shards]
        for copy in copies:
            np.testing.assert_allclose(copy, want, rtol=0, atol=n * 2**-8 * np.abs(want).max())
        digests[name] = [hashlib.sha256(copy.tobytes()).hexdigest() for copy in copies]
    return digests


def _answer(request: dict[str, Any]) -> Any:
    if "stats" in request:
        return jaxhet.stats()
    if "precision" in request:
        return _precision(*request["precision"])
    # XLA's CPU compiler crashes where it combines collectives of no elements with others.
    dtype, sizes = request["dtype"], request["sizes"]
    found: dict[str, Any] = {}
    for part in ([s for s in sizes if s], [s for s in sizes if not s]):
        try:
            found |= _matrix(dtype, part, request.get("operations", operations(dtype)))
        except Exception as error:  # one program must not hide what the others do
            found[f"program {part}"] = [f"{type(error).__name__}: {error}"]
    return found


if __name__ == "__main__":
    testing.serve(_answer)
