"""Comparison of the bits of all replicas of a value, and synchronization with the first one.

Compilers of two vendors round differently (fused multiply-add, their own exp, the order of sums).
So values that every island computes for itself can differ in their last bits, even initial ones.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxhet import _mesh, _session
from jaxhet._errors import ReplicaError, UsageError
from jaxhet._jit import jit

_MOST_SHOWN = 8  # leaves in a message
_TREE = "the array"  # name of the leaf of a tree that is one array
_SEEDS = (np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B))
_AXIS = "device"
_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


@dataclasses.dataclass(frozen=True)
class ReplicaDifference:
    """A leaf whose replicas differ.

    Attributes:
      leaf: Path of the leaf in the tree, in the form of `jax.tree_util.keystr`; empty if the tree
        is one array.
      islands: The islands that hold a replica with other bits than the first one.
      largest: The largest absolute difference of an element from the first replica's, in
        float32 (float64 for arrays of that type); 0 where only signs of zero or bits of NaN differ,
        infinity where one of two is no number.
    """

    leaf: str
    islands: tuple[str, ...]
    largest: float

    def __str__(self) -> str:
        names = ", ".join(self.islands)
        return f"{self.leaf or _TREE} (on {names}; largest difference {self.largest:.3g})"


@dataclasses.dataclass(frozen=True)
class ReplicaReport:
    """The result of `check_replicas`.

    Attributes:
      tree: The given tree; with `on_difference="sync"`, the synchronized tree.
      num_compared: Number of leaves with more than one replica.
      differences: One for each leaf whose replicas differ.
    """

    tree: Any = dataclasses.field(repr=False)
    num_compared: int
    differences: tuple[ReplicaDifference, ...]

    def __str__(self) -> str:
        if not self.differences:
            return f"replicas are equal in all of {self.num_compared} leaves"
        shown = "; ".join(map(str, self.differences[:_MOST_SHOWN]))
        more = len(self.differences) - _MOST_SHOWN
        return (
            f"replicas differ in {len(self.differences)} of {self.num_compared} leaves: {shown}"
            f"{f'; and {more} more' if more > 0 else ''}"
        )


def check_replicas(
    tree: Any, *, on_difference: Literal["raise", "warn", "sync"] = "raise"
) -> ReplicaReport:
    """Compares the bits of all replicas of all arrays of a tree.

    Each device computes a 64-bit digest of each of its shards, in which the place of an element
    counts, and all digests are gathered by one small exchange. The bits count: signs of zero and
    payloads of NaN too. All processes call it at the same point of the program, with the same tree.
    Works without `jaxhet.initialize` too.

    Args:
      tree: Any pytree; only a `jax.Array` over several devices has replicas.
      on_difference: Action if replicas differ: raise a `ReplicaError`, warn, or give every
        replica the bits of the first one.

    Returns:
      The result, which is equal in all processes.

    Raises:
      ReplicaError: Replicas differ, and `on_difference` is "raise".
      UsageError: An array has a sharding other than `NamedSharding` or was donated, the call is
        inside a function that JAX traces, or an option is not known.

    Examples:
      >>> state = {"weights": x}
      >>> report = jaxhet.check_replicas(state, on_difference="warn")
      >>> print(report.num_compared, report.differences)
    """
    if on_difference not in ("raise", "warn", "sync"):
        raise UsageError(f"on_difference={on_difference!r} is not one of raise, warn, sync")
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    values = [value for _, value in leaves]
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    replicated = [i for i, value in enumerate(values) if _is_replicated(names[i], value)]
    differences: list[ReplicaDifference] = []
    for mesh, group in _by_mesh(replicated, values).items():
        raw = {i: _plain(values[i]) for i in group}
        specs = [_spec(value) for value in raw.values()]
        # np.asarray waits for one device only: another one may be under way at jaxhet.shutdown.
        digests = np.asarray(
            jax.block_until_ready(_digest_program(mesh, tuple(specs))(*raw.values()))
        )
        others = {
            i: ranks
            for place, (i, spec) in enumerate(zip(group, specs, strict=True))
            if (ranks := _others(mesh, spec, digests[:, place]))
        }
        if not others:
            continue
        sync = on_difference == "sync"
        wrong = [raw[i] for i in others]
        firsts, found = _first_program(mesh, tuple(map(_spec, wrong)), sync)(*wrong)
        largest = np.asarray(found)
        for number, (i, ranks) in enumerate(others.items()):
            islands = _names_of(mesh.devices.flat[rank] for rank in ranks)
            differences.append(ReplicaDifference(names[i], islands, float(largest[number])))
            if sync:
                values[i] = _as(values[i], firsts[number])
    report = ReplicaReport(
        jax.tree_util.tree_unflatten(structure, values), len(replicated), tuple(differences)
    )
    if differences and on_difference == "raise":
        raise ReplicaError(f"{report}. {_ADVICE}")
    if differences and on_difference == "warn":
        warnings.warn(f"{report}. {_ADVICE}", stacklevel=2)
    return report


_ADVICE = (
    "Islands with unlike arithmetic (jaxhet.unlike_islands) round differently: start from"
    " jaxhet.sync_replicas(state), and shard the optimizer's update over the data axis, so that"
    " each element is computed once"
)


def sync_replicas(tree: Any) -> Any:
    """Gives every replica of every array of a tree the bits of the first one.

    The first replica is on the first device of the array's mesh. Only arrays that differ are
    exchanged; see `check_replicas`.

    Args:
      tree: Any pytree; only a `jax.Array` over several devices is changed.

    Returns:
      The synchronized tree; the given tree is not changed.

    Raises:
      UsageError: `check_replicas` refuses the tree.

    Examples:
      >>> state = jaxhet.sync_replicas(state)
    """
    return check_replicas(tree, on_difference="sync").tree


# --- choice of arrays ---


def _is_replicated(name: str, value: Any) -> bool:
    name = name or _TREE
    if isinstance(value, Tracer):
        raise UsageError(
            f"{name} is a value inside a function that JAX traces (jit, grad, shard_map), where"
            " replicas can't be compared: compare the function's results"
        )
    if isinstance(value, jax.Array) and value.is_deleted():
        raise UsageError(
            f"{name} has no data: it was donated to a function (donate_argnums), or deleted; give"
            " the function's result"
        )
    if not isinstance(value, jax.Array) or len(value.sharding.device_set) == 1 or value.size == 0:
        return False
    if not isinstance(value.sharding, NamedSharding):
        raise UsageError(
            f"{name} has a {type(value.sharding).__name__}, which does not say which of its shards"
            " are replicas; give it a NamedSharding"
        )
    return bool(_replica_axes(value.sharding.mesh, _spec(value)))


def _spec(value: jax.Array) -> P:
    """Partition spec of an array with a `NamedSharding`."""
    assert isinstance(value.sharding, NamedSharding)
    return value.sharding.spec


def _replica_axes(mesh: Any, spec: P) -> tuple[str, ...]:
    """The axes of a mesh, longer than one, over which an array of this spec is replicated."""
    used = {
        name for entry in spec for name in ((entry,) if isinstance(entry, str) else entry or ())
    }
    return tuple(name for name, size in mesh.shape.items() if size > 1 and name not in used)


def _by_mesh(indexes: Sequence[int], values: Sequence[Any]) -> dict[Mesh, list[int]]:
    groups: dict[Mesh, list[int]] = {}
    for i in indexes:
        groups.setdefault(values[i].sharding.mesh, []).append(i)
    return groups


def _plain(value: jax.Array) -> jax.Array:
    """The array, or the numbers that random keys consist of."""
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value


def _as(like: jax.Array, plain: jax.Array) -> jax.Array:
    """The inverse of `_plain`."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(plain, impl=jax.random.key_impl(like))
    return plain


# --- digests ---


def _themselves(*shards: jax.Array) -> Sequence[jax.Array]:
    return shards


@functools.lru_cache(maxsize=32)
def _digest_program(
    mesh: Mesh,
    specs: tuple[P, ...],
    function: Callable[..., Sequence[jax.Array]] = _themselves,
) -> Callable[..., Any]:
    """Program that gives digests of arrays that a function computes of each device's shards.

    They are in the order of the mesh: uint32 [devices, arrays, 2].
    """

    def digests(*shards: jax.Array) -> jax.Array:
        rows = jnp.stack([digest(x) for x in function(*shards)])
        return jax.lax.all_gather(rows, mesh.axis_names)

    return jit(jax.shard_map(digests, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))


def digest(x: jax.Array) -> jax.Array:
    """A digest of the bits of an array, uint32 [2]; each element counts with its place.

    Sums of integers: the same on every device, in whatever order they are added.
    """
    words = _words(x)
    place = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        step = np.uint32(stride % 2**32)
        place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * step
        stride *= words.shape[axis]
    sums = (jnp.sum(_mix(words ^ _mix(place + seed)), dtype=jnp.uint32) for seed in _SEEDS)
    return jnp.stack(list(sums))


def _mix(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3: a bijection of 32 bits that mixes all of them."""
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        x = (x ^ (x >> shift)) * np.uint32(factor)
    return x ^ (x >> 16)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array in words of 32 bits; words of wider elements have a new last axis."""
    x = _bits(x)
    if x.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return x.astype(jnp.uint32)


def _bits(x: jax.Array) -> jax.Array:
    """The bits of an array as unsigned integers.

    Real and imaginary parts of complex numbers have a new last axis.
    """
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype.name in ("int4", "uint4", "int2", "uint2"):
        return x.astype(jnp.uint8)
    if x.dtype.name == "float4_e2m1fn":
        return jax.lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(x, _UINTS[x.dtype.itemsize])


def _from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `_bits`."""
    if dtype == jnp.bool_ or dtype.name in ("int4", "uint4", "int2", "uint2"):
        return bits.astype(dtype)
    if dtype.name == "float4_e2m1fn":
        return jax.lax.bitcast_convert_type(bits.astype(jnp.uint4), dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.float32 if dtype == jnp.complex64 else jnp.float64
        pair = jax.lax.bitcast_convert_type(bits, part)
        return jax.lax.complex(pair[..., 0], pair[..., 1])
    return jax.lax.bitcast_convert_type(bits, dtype)


def _others(mesh: Mesh, spec: P, digests: np.ndarray) -> list[int]:
    """Positions in the mesh whose shard has another digest than its first replica's."""
    axes = _replica_axes(mesh, spec)
    shape = tuple(mesh.shape.values())
    index = tuple(slice(0, 1) if name in axes else slice(None) for name in mesh.axis_names)
    grid = digests.reshape(*shape, -1)
    differs = np.any(grid != grid[index], axis=-1)
    return [int(i) for i in np.flatnonzero(differs.reshape(-1))]


# --- the first replica ---


@functools.lru_cache(maxsize=32)
def _first_program(mesh: Mesh, specs: tuple[P, ...], keeps: bool) -> Callable[..., Any]:
    """Program that gives the largest difference of each array from its first replica.

    With `keeps`, it gives the first replica's bits everywhere too.
    """

    def compared(*shards: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        firsts = [_first(x, _replica_axes(mesh, s)) for x, s in zip(shards, specs, strict=True)]
        pairs = zip(shards, firsts, strict=True)
        largest = jnp.stack([_largest_difference(x, first) for x, first in pairs])
        return firsts if keeps else [], jax.lax.pmax(largest, mesh.axis_names)

    out_specs = (list(specs) if keeps else [], P())
    return jit(
        jax.shard_map(compared, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    )


def _first(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The bits of the first device on these axes, by a sum of integers with zero elsewhere."""
    bits = _bits(x)
    is_first = functools.reduce(jnp.logical_and, [jax.lax.axis_index(name) == 0 for name in axes])
    first = jax.lax.psum(jnp.where(is_first, bits, jnp.zeros_like(bits)), axes)
    return _from_bits(first, x.dtype)


def _largest_difference(x: jax.Array, first: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = [_largest_difference(f(x), f(first)) for f in (jnp.real, jnp.imag)]
        return jnp.maximum(*parts)
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    x, first = x.astype(wide), first.astype(wide)
    same = (x == first) | (jnp.isnan(x) & jnp.isnan(first))
    distance = jnp.abs(x - first)
    distance = jnp.where(jnp.isnan(distance), jnp.inf, distance)
    return jnp.max(jnp.where(same, 0, distance)).astype(jnp.float32)


# --- islands ---


def _names_of(devices: Any) -> tuple[str, ...]:
    """The islands of devices; without a job, their processes."""
    session = _session.current()
    if session is None or not session.islands:
        return tuple(dict.fromkeys(f"process {d.process_index}" for d in devices))
    name_of = {d.id: island.name for island in session.islands for d in island.devices}
    return tuple(dict.fromkeys(name_of[device.id] for device in devices))


def unlike_islands() -> tuple[str, ...]:
    """Differences between islands that can change the bits of results.

    Compares kinds of devices, settings of the compiler, and, if these are equal, the arithmetic:
    each device computes a few functions of the same numbers, and one small exchange compares the
    bits of the results. All processes make the first call at the same point of the program.

    Returns:
      A sentence for each difference; empty if none was found, and in a job of one island.

    Raises:
      UsageError: `jaxhet.initialize` was not called.

    Examples:
      >>> for difference in jaxhet.unlike_islands():
      ...     print(difference)
    """
    session = _session.required()
    if session.unlike is None:
        session.unlike = _find_unlike(session)
    return session.unlike


def _find_unlike(session: _session.Session) -> tuple[str, ...]:
    if len(session.islands) < 2:
        return ()
    kinds = {
        island.name: sorted({f"{island.platform} {d.device_kind}" for d in island.devices})
        for island in session.islands
    }
    if len({tuple(kind) for kind in kinds.values()}) > 1:
        found = "; ".join(f"{name} has {', '.join(kind)}" for name, kind in kinds.items())
        return (f"kinds of devices differ: {found}", *session.settings_differences)
    return (*session.settings_differences, *_arithmetic_differences())


def _arithmetic_differences() -> tuple[str, ...]:
    """A sentence for each island on which functions of equal numbers have other bits."""
    devices = _mesh.ordered_devices()
    mesh = Mesh(np.array(devices, dtype=object), (_AXIS,))
    x = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    everywhere = NamedSharding(mesh, P())
    shared = jax.make_array_from_callback(x.shape, everywhere, lambda index: x[index])
    found = np.asarray(jax.block_until_ready(_digest_program(mesh, (P(),), _probed)(shared)))
    others: dict[str, list[str]] = {}
    for rank in range(1, len(devices)):
        for number, name in enumerate(_PROBES):
            if np.any(found[rank, number] != found[0, number]):
                (island,) = _names_of([devices[rank]])
                functions = others.setdefault(island, [])
                functions += [name] if name not in functions else []
    first = _names_of(devices[:1])[0]
    return tuple(
        f"the arithmetic of {island} is not that of {first}: {', '.join(functions)}"
        for island, functions in others.items()
    )


_PROBES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "multiply and add": lambda x: x * 1.1 + x[::-1] * 0.7,
    "exponential": jnp.exp,
    "logarithm": lambda x: jnp.log(jnp.abs(x) + 1e-3),
    "tanh": jnp.tanh,
    "sine": jnp.sin,
    "reciprocal square root": lambda x: jax.lax.rsqrt(x * x + 1e-5),
    "power": lambda x: jnp.abs(x) ** 1.7,
    "sum": lambda x: jnp.sum(x * x, axis=-1),
    "matrix product": lambda x: x @ x,
    "matrix product of bfloat16": lambda x: x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16).T,
    "normal random numbers": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
}


def _probed(x: jax.Array) -> Sequence[jax.Array]:
    return [function(x) for function in _PROBES.values()]
