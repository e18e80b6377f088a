"""Every collective over groups of devices, on every data type, compared with numpy.

Processes of a job on CPUs or on GPUs call `found` and `precision`.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (dtype names of f8 and int4)
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet

DTYPES = (
    *("bool", "int4", "uint4", "int8", "uint8", "int16", "uint16"),
    *("int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)
# Types of less than a byte.
SMALL = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")
# Relative error of sums that round: a few roundings of the working precision.
_TOLERANCE = {
    "bfloat16": 3e-2,
    "float16": 4e-3,
    "float32": 2e-6,
    "float64": 1e-14,
    "complex64": 2e-6,
    "complex128": 1e-14,
}
# Results that all members of a group share.
SAME_IN_GROUP = frozenset(("sum", "max", "min", "gather"))
NOT_EMPTY = ("gather", "sum_scatter")  # JAX does not lower them for blocks of no elements

# --- groups ---


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
        size = int(np.prod([self.order.shape[axis] for axis in over]))
        return self.order.transpose(kept + over).reshape(-1, size)


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

# --- collectives ---


class Case(NamedTuple):
    """A collective, the type and shape of each device's block, and the dimension that it is along.

    The values are whole numbers whose sums are exact, or numbers whose sums round.
    """

    operation: str
    dtype: str
    shape: tuple[int, ...]
    dim: int = 0
    is_whole: bool = True

    def __str__(self) -> str:
        return f"{self.operation} {self.dtype}[{','.join(map(str, self.shape))}]"


def operations(dtype: str, form: Form | None = None) -> tuple[str, ...]:
    """Collectives that make sense for a dtype, and that JAX lowers for such groups."""
    names = ("gather", "all_to_all")
    if form is None or (form.index_groups is None and list(form.axes) == sorted(form.axes)):
        names += ("permute", "one_pair")
    if dtype != "bool":
        names += ("sum", "sum_scatter")
    return names if dtype.startswith("complex") else (*names, "max", "min")


def factor(operation: str, size: int) -> int:
    """Number of equal parts of the block of a device in a group of `size`."""
    return size if operation in ("all_to_all", "sum_scatter") else 1


def given(case: Case, position: int, count: int) -> np.ndarray:
    """The block of one of `count` devices. Of small floats, a sum has at most four ones."""
    rng = np.random.default_rng([position, *case.shape])
    kind = np.dtype(case.dtype)
    if case.dtype == "bool" or re.match("float[48]_", case.dtype):
        few = (position + np.arange(np.prod(case.shape)).reshape(case.shape)) % count < 4
        values = rng.integers(0, 2, case.shape) * few
    elif kind.kind in "fc" or case.dtype == "bfloat16":
        draw = functools.partial(rng.integers, 0, 7) if case.is_whole else rng.standard_normal
        values = draw(size=case.shape)
        if kind.kind == "c":
            values = values + 1j * draw(size=case.shape)
    else:
        bits, is_signed = int(re.sub(r"\D", "", case.dtype)), case.dtype[0] == "i"
        low, high = (-1 << bits - 1, 1 << bits - 1) if is_signed else (0, 1 << bits)
        values = rng.integers(low, high, case.shape, np.int64 if is_signed else np.uint64)
    return values.astype(kind)


def _other_dim(case: Case) -> int:
    return 1 - case.dim if len(case.shape) > 1 else 0


def collective(case: Case, x: jax.Array, form: Form) -> jax.Array:
    """The collective on a device's block."""
    axes, groups, dim = form.axes, form.index_groups, case.dim
    size = form.groups.shape[1]
    named = {"axis_index_groups": groups, "tiled": True}
    ring = [(i, (i + 1) % size) for i in range(size)]
    match case.operation:
        case "sum":
            return lax.psum(x, axes, axis_index_groups=groups)
        case "max":
            return lax.pmax(x, axes, axis_index_groups=groups)
        case "min":
            return lax.pmin(x, axes, axis_index_groups=groups)
        case "sum_scatter":
            return lax.psum_scatter(x, axes, scatter_dimension=dim, **named)
        case "gather":
            return lax.all_gather(x, axes, axis=dim, **named)
        case "all_to_all":
            return lax.all_to_all(x, axes, dim, _other_dim(case), **named)
        case "broadcast":
            return lax.pbroadcast(x, axes, size - 1)
        case _:
            return lax.ppermute(x, axes, ring if case.operation == "permute" else [(size - 1, 0)])


def _sum(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """The sum, rounded once; integers wrap around."""
    kind = blocks[0].dtype.kind
    name = blocks[0].dtype.name
    wide = {"c": np.complex128, "f": np.float64, "i": np.int64, "u": np.uint64}.get(kind)
    if wide is None:  # a type of ml_dtypes
        wide = np.float64 if "float" in name else np.int64
    return np.sum([block.astype(wide) for block in blocks], axis=0).astype(blocks[0].dtype)


def expected(case: Case, blocks: Sequence[np.ndarray], index: int) -> np.ndarray:
    """Result of a group's member, by numpy from the blocks of all members."""
    size = len(blocks)
    match case.operation:
        case "sum":
            return _sum(blocks)
        case "max":
            return functools.reduce(np.maximum, blocks).astype(case.dtype)
        case "min":
            return functools.reduce(np.minimum, blocks).astype(case.dtype)
        case "sum_scatter":
            return np.split(_sum(blocks), size, case.dim)[index]
        case "gather":
            return np.concatenate(blocks, case.dim)
        case "all_to_all":
            parts = [np.split(block, size, case.dim)[index] for block in blocks]
            return np.concatenate(parts, _other_dim(case))
        case "broadcast":
            return blocks[-1]
        case "permute":
            return blocks[index - 1]
        case _:
            return blocks[-1] if index == 0 else np.zeros_like(blocks[0])


def _difference(case: Case, got: np.ndarray, want: np.ndarray) -> str:
    """The difference of a result from the right one; "" for none."""
    is_same = (got.dtype, got.shape) == (want.dtype, want.shape)
    if is_same and got.tobytes() == want.tobytes():
        return ""
    tolerance = 0.0 if case.is_whole else _TOLERANCE.get(case.dtype, 0.0)
    if is_same and tolerance and "sum" in case.operation:
        wide = np.complex128 if got.dtype.kind == "c" else np.float64
        x, y = got.astype(wide), want.astype(wide)
        if np.allclose(x, y, tolerance, tolerance * np.max(np.abs(y), initial=0)):
            return ""
    return f"{got.dtype}{got.shape} {got.ravel()[:8]} is not {want.ravel()[:8]}"


# --- programs ---

# By case and position of a device: the difference from numpy, and a digest of the result.
Found = dict[str, dict[int, tuple[str, str]]]


def _mapped(mesh: Mesh, body: Any, blocks: Sequence[Sequence[np.ndarray]]) -> Any:
    """`body` on every device's blocks of several arrays; the results of all devices."""
    spec = P(("x", "y"))
    sharding = NamedSharding(mesh, spec)
    arrays = [np.concatenate(each) for each in blocks]
    args = [jax.make_array_from_callback(a.shape, sharding, a.__getitem__) for a in arrays]
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped)(*args)


def _mesh(form: Form) -> Mesh:
    return Mesh(jaxhet.make_mesh({"all": -1}).devices.ravel()[form.order], ("x", "y"))


def _found(form: Form, cases: Sequence[Case]) -> Found:
    """Runs cases as one program; the results of this process's devices."""
    mesh, positions = _mesh(form), form.order.ravel().tolist()
    position_of = dict(zip(mesh.devices.flat, positions, strict=True))
    blocks = [{p: given(case, p, len(positions)) for p in positions} for case in cases]

    def body(*xs: jax.Array) -> list[jax.Array]:
        return [collective(case, x, form) for case, x in zip(cases, xs, strict=True)]

    results = _mapped(mesh, body, [list(each.values()) for each in blocks])
    outcomes: Found = {str(case): {} for case in cases}
    for case, own, result in zip(cases, blocks, results, strict=True):
        for shard in result.addressable_shards:
            position = position_of[shard.device]
            (group,) = (g for g in form.groups.tolist() if position in g)
            want = expected(case, [own[p] for p in group], group.index(position))
            got = np.asarray(shard.data)
            digest = hashlib.sha256(got.tobytes()).hexdigest()
            outcomes[str(case)][position] = _difference(case, got, want), digest
    return outcomes


def in_loops(layers: int = 9, width: int = 34) -> list[str]:
    """Wrong results of loops that store a collective's result, or gather, by iteration.

    On GPUs these collectives move to a neighbouring iteration.
    """
    mesh = _mesh(_all((jax.device_count(),)))
    n = mesh.size
    rng = np.random.default_rng(layers)
    x, w = (rng.integers(0, 97, shape).astype(np.int32) for shape in ((n, width), (n, layers, 3)))

    def body(x: jax.Array, w: jax.Array) -> dict[str, jax.Array]:
        found = {}
        for is_reversed in (False, True):

            def step(x: jax.Array, w: jax.Array) -> Any:
                weights = lax.all_gather(w, "x", tiled=True)
                x = (x + weights.sum(dtype=x.dtype)) % 97
                scattered = lax.psum_scatter(jnp.tile(x[0], n), "x", tiled=True)
                return x, (lax.pmax(x, "x"), lax.psum(x, "x"), scattered)

            last, stored = lax.scan(step, x, w[0], reverse=is_reversed)
            names = ("last", "max", "sum", "scattered sum")
            for name, value in zip(names, (last, *stored), strict=True):
                found[f"{name}{', reversed' * is_reversed}"] = value[None]
        return found

    wrong: list[str] = []
    for name, got in _mapped(mesh, body, [list(x[:, None]), list(w[:, None])]).items():
        at, stored = x, np.zeros((layers, n, width), np.int64)
        for layer in range(layers)[:: -1 if "reversed" in name else 1]:
            at = (at + w[:, layer].sum()) % 97
            combined = at.max(0) if "max" in name else at.sum(0)
            stored[layer] = combined
        for shard in got.addressable_shards:
            position = shard.index[0].start or 0
            want = at[position] if "last" in name else stored[:, position]
            if not np.array_equal(np.asarray(shard.data).reshape(want.shape), want):
                wrong.append(f"{name}: {np.asarray(shard.data).ravel()} is not {want.ravel()}")
    return wrong


def precision(count: int, width: int) -> dict[str, list[str]]:
    """By program, a digest of each local device's copy of a sum, after a check against numpy.

    Each tempts a compiler to keep more bits of a rank's own bf16 value than it has sent.
    """
    mesh = _mesh(_all((jax.device_count(),)))
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
            "wide sum of products": lax.psum(wide(product), "x"),
            "sum of products, widened": wide(lax.psum(product, "x")),
            "sum and own product": wide(lax.psum(product + product, "x")) * 0.5,
            "sum of dots, widened": wide(lax.psum(dot, "x")),
            "wide sum of dots": lax.psum(wide(dot), "x"),
        }

    wide_a, wide_b = (np.stack(x).astype(np.float64) for x in (a, b))
    products = (wide_a * wide_b).sum(0)
    dots = np.einsum("rci,rcj->ij", wide_a, wide_b)
    digests = {}
    for name, result in _mapped(mesh, body, [a, b]).items():
        want = dots if "dots" in name else products
        copies = [np.asarray(shard.data) for shard in result.addressable_shards]
        for copy in copies:
            np.testing.assert_allclose(copy, want, rtol=0, atol=n * 2**-8 * np.abs(want).max())
        digests[name] = [hashlib.sha256(copy.tobytes()).hexdigest() for copy in copies]
    return digests


def merged(answers: Sequence[Found]) -> Found:
    """The results of all processes."""
    whole: Found = {}
    for answer in answers:
        for name, of_devices in answer.items():
            whole.setdefault(name, {}).update(of_devices)
    return whole


def found(name: str, devices: tuple[int, ...], cases: Sequence[Case]) -> Found:
    """Results of cases over groups of a form, in a job whose processes have these devices."""
    before = jaxhet.stats()["exchanges_started"]
    results: Found = {}
    # XLA's CPU compiler crashes where it combines collectives of no elements with others.
    for is_empty in (False, True):
        some = [case for case in cases if (0 in case.shape) == is_empty]
        try:
            results |= _found(FORMS[name](devices), some) if some else {}
        except Exception as error:  # one program must not hide what the others do
            results[str(some)] = {jax.process_index(): (f"{type(error).__name__}: {error}", "")}
    if jaxhet.stats()["exchanges_started"] == before:
        results["exchanges"] = {jax.process_index(): ("there was none", "")}
    return results
