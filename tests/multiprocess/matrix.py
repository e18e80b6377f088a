"""Every collective on many dtypes, over groups of one form.

But for collective-broadcast: `jax.lax.pbroadcast` has no lowering for CPUs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (dtype names of f8 and int4)
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet

DTYPES = (
    *("bool", "int4", "uint4", "int8", "uint8", "int16", "uint16"),
    *("int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)


@dataclasses.dataclass(frozen=True)
class Form:
    """A mesh, and the axes that collectives are over.

    Attributes:
      order: The mesh "x", "y" of device positions.
      axes: The axes.
      index_groups: `axis_index_groups` of the only axis, or None.
    """

    order: np.ndarray
    axes: tuple[str, ...]
    index_groups: list[list[int]] | None = None

    @property
    def groups(self) -> np.ndarray:
        """A row of device positions for each group."""
        if self.index_groups is not None:
            return self.order.ravel()[np.array(self.index_groups)]
        over = [("x", "y").index(axis) for axis in self.axes]
        kept = [axis for axis in (0, 1) if axis not in over]
        return self.order.transpose(kept + over).reshape(-1, self.size)

    @property
    def size(self) -> int:
        """Members of a group."""
        if self.index_groups is not None:
            return len(self.index_groups[0])
        return int(np.prod([self.order.shape[("x", "y").index(axis)] for axis in self.axes]))


def _num_groups(devices: tuple[int, ...]) -> int:
    return 1 if sum(devices) % 2 or sum(devices) == 2 else 2


def _all(devices: tuple[int, ...]) -> Form:
    return Form(np.arange(sum(devices))[:, None], ("x",))


def _halves(devices: tuple[int, ...]) -> Form:
    """Pairs with one device in each half of the devices; one group has an odd number."""
    n = sum(devices)
    return Form(np.arange(n).reshape(n if n % 2 else 2, -1).T, ("y",))


def _alternate(devices: tuple[int, ...]) -> Form:
    """Every other device, in two groups."""
    return Form(np.arange(sum(devices)).reshape(-1, _num_groups(devices)), ("x",))


def _columns_first(devices: tuple[int, ...]) -> Form:
    """One group, in another order than in its mesh."""
    return Form(np.arange(sum(devices)).reshape(-1, 2 - sum(devices) % 2), ("y", "x"))


def _permuted(devices: tuple[int, ...]) -> Form:
    """Groups of random members."""
    order = np.random.default_rng(1).permutation(sum(devices))
    return Form(order.reshape(-1, _num_groups(devices)), ("x",))


def _subset(devices: tuple[int, ...]) -> Form:
    """Every device but the first one of each process that has more, backwards."""
    ends = np.cumsum(devices)
    kept = [range(end - max(n - 1, 1), end) for end, n in zip(ends, devices, strict=True)]
    return Form(np.concatenate(kept)[::-1, None], ("x",))


def _index_groups(devices: tuple[int, ...]) -> Form:
    """Groups of one axis."""
    groups = _permuted(tuple(reversed(devices))).groups
    return Form(np.arange(sum(devices))[:, None], ("x",), groups[:, ::-1].tolist())


# Name to the form on processes with these numbers of devices.
FORMS: dict[str, Callable[[tuple[int, ...]], Form]] = {
    "all": _all,
    "halves": _halves,
    "alternate": _alternate,
    "columns_first": _columns_first,
    "permuted": _permuted,
    "subset": _subset,
    "index_groups": _index_groups,
}


def put(value: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """A global array from the same host value on all processes; moves nothing between processes."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def host_values(dtype: str, ranks: int, rows: int, columns: int) -> np.ndarray:
    """Random numbers; of the small types whose sums would round, at most four ones in a sum."""
    shape = (ranks, rows, columns)
    kind = np.dtype(dtype)
    rng = np.random.default_rng(0)
    if "float8" in dtype or "float4" in dtype:
        first = np.arange(rows * columns).reshape(1, rows, columns)
        values = (np.arange(ranks)[:, None, None] + first) % ranks < 4
    elif kind.kind in "fc" or dtype == "bfloat16":
        values = rng.standard_normal(shape)
        if kind.kind == "c":
            values = values + 1j * rng.standard_normal(shape)
    elif dtype == "bool":
        values = rng.integers(0, 2, shape)
    else:
        bits = 4 if dtype.endswith("int4") else kind.itemsize * 8
        low, high = (0, 1 << bits) if dtype[0] == "u" else (-1 << bits - 1, 1 << bits - 1)
        values = rng.integers(low, high, shape, np.uint64 if dtype == "uint64" else np.int64)
    return values.astype(kind).reshape(ranks * rows, columns)


def _results(x: jax.Array, form: Form, dim: int) -> list[tuple[str, jax.Array]]:
    """By name, the result of each collective, along a dimension of the block."""
    axes, n, groups = form.axes, form.size, form.index_groups
    row = x[:1]
    results = [("sum", jax.lax.psum(row, axes, axis_index_groups=groups))]
    if x.dtype.kind != "c":
        results += [
            ("max", jax.lax.pmax(row, axes, axis_index_groups=groups)),
            ("min", jax.lax.pmin(row, axes, axis_index_groups=groups)),
        ]
    named = {"axis_index_groups": groups, "tiled": True}
    if x.dtype != np.bool_:
        scattered = jax.lax.psum_scatter(x, axes, scatter_dimension=dim, **named)
        results.append(("sum_scatter", scattered))
    results += [
        ("gather", jax.lax.all_gather(row, axes, axis=dim, **named)),
        ("all_to_all", jax.lax.all_to_all(x, axes, dim, 1 - dim, **named)),
    ]
    if groups is not None or list(axes) != sorted(axes):  # which JAX refuses for what follows
        return results
    ring = [(i, (i + 1) % n) for i in range(n)]
    pairs = ring if dim else [(n - 1, 0)]
    return [*results, ("permute", jax.lax.ppermute(row, axes, pairs))]


def run(request: dict[str, Any]) -> Any:
    """Pairs of name and dtype to results, sharded over all devices of the form."""
    form = FORMS[request["form"]](request["devices"])
    devices = jaxhet.make_mesh({"all": -1}).devices.ravel()
    mesh = Mesh(devices[form.order], ("x", "y"))
    spec, n = P(("x", "y")), form.size
    args = [
        put(host_values(dtype, form.order.size, n, 3 * n), mesh, spec)
        for dtype in request["dtypes"]
    ]

    def body(*args: jax.Array) -> dict[str, jax.Array]:
        return {
            f"{dtype} {name}": result
            for dtype, x in zip(request["dtypes"], args, strict=True)
            for name, result in _results(x, form, DTYPES.index(dtype) % 2)
        }

    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped)(*args)
