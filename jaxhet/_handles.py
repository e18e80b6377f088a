"""`jaxhet.start` and `jaxhet.finish`: means over islands that outlive the starting program."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxhet import _session, compiler
from jaxhet._errors import UsageError
from jaxhet._microscaling import Encoded, decode, encode
from jaxhet._options import CODECS

Op = Literal["mean", "sum"]
_WORD = re.compile(r"\w+", re.ASCII)
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handle:
    """Result of `jaxhet.start`: a pytree that programs and checkpoints can hold.

    Attributes:
      parts: the tree, with a tuple for each leaf: the bits that each position has sent, as unsigned
        integers [n, ...] sharded over the axis. With a codec, elements and scales.
      axis: mesh axis.
      op: "mean" or "sum".
      name: name of the exchange.
      wire: codec, or "".
      leaves: shape and dtype of each leaf of the result.
      structure: structure of the result.
    """

    parts: Any
    axis: str = dataclasses.field(metadata={"static": True})
    op: Op = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(metadata={"static": True})
    wire: str = dataclasses.field(metadata={"static": True})
    leaves: tuple[tuple[tuple[int, ...], str], ...] = dataclasses.field(metadata={"static": True})
    structure: Any = dataclasses.field(metadata={"static": True})


def start(tree: Any, axis: str, *, op: Op = "mean", name: str = "handle", wire: str = "") -> Handle:
    """Starts the mean of arrays over a mesh axis, which a later program finishes.

    The engine copies the arrays and exchanges the copies while this program and later programs
    run. The arrays may be donated. Each name has one exchange at a time: call
    `jaxhet.finish`, in the same program or in a later one, before the next start of that name.

    A handle that was saved in a checkpoint can be finished in another job: it holds what each
    position had sent, and `finish` exchanges it then. Where the axis does not cross islands,
    `finish` does all of the work.

    Args:
      tree: a pytree of floats [n, ...], sharded over `axis` along the first dimension: entry i is
        of position i of the axis. Each leaf has elements.
      axis: an axis of the mesh of `jax.set_mesh`, of n positions.
      op: "mean" or "sum" over the positions.
      name: name of the exchange: letters, digits and underscores.
      wire: codec of the exchange: "bf16", "mxfp8", "mxint8" or "mxint4"; "": all bits of the
        arrays.

    Returns:
      The handle. On GPUs its exchange uses memory beside JAX's: n + 1 times the arrays of a device.

    Raises:
      UsageError: an argument is not valid, or the arrays are differentiated; or, when the program
        runs, the exchange that was started before under this name was not finished.

    Examples:
      >>> import numpy as np
      >>> leave = jax.jit(lambda tree: jaxhet.start(tree, "data", name="outer"))
      >>> with jax.set_mesh(jaxhet.make_mesh({"data": 2})):
      ...     handle = leave({"w": np.ones((2, 64, 4), np.float32)})  # then other programs
      ...     average = jax.jit(jaxhet.finish)(handle)
    """
    if op not in ("mean", "sum") or not _WORD.fullmatch(name) or (wire and wire not in CODECS):
        raise UsageError(
            f"jaxhet.start: op={op!r}, name={name!r}, wire={wire!r}: op is 'mean' or 'sum', a name"
            f" has letters, digits and underscores, and codecs are {', '.join(CODECS)}"
        )
    leaves, structure = jax.tree.flatten(tree)
    size = axis_size(axis)
    check_leading(leaves, size, axis)
    if wrong := [x for x in leaves if not jnp.issubdtype(jnp.result_type(x), jnp.floating)]:
        raise UsageError(
            f"jaxhet.start: a leaf has the dtype {jnp.result_type(wrong[0])}; give floats"
        )

    def leave(own: list[jax.Array]) -> tuple[tuple[jax.Array, ...], ...]:
        parts = tuple(_bits(x[0], wire) for x in own)
        if _is_open(size):
            parts = tuple(
                tuple(_in_chain(x, axis, "start", name, first + i) for i, x in enumerate(of_leaf))
                for of_leaf, first in zip(parts, _numbers(parts), strict=True)
            )
        return jax.tree.map(lambda x: x[None], parts)

    parts = over_positions(leave, axis, P(axis))([_without_derivative(x) for x in leaves])
    kinds = tuple((tuple(jnp.shape(x)[1:]), str(jnp.result_type(x))) for x in leaves)
    return Handle(jax.tree.unflatten(structure, parts), axis, op, name, wire, kinds, structure)


def not_started(tree: Any, axis: str, *, name: str, wire: str = "") -> Handle:
    """A handle of zeros with the shapes that `start` would return: the first value of a loop.

    Args:
      tree: The shapes of the arrays.
      axis: The axis, as in `start`.
      name: Name of the exchange.
      wire: Codec of the exchange, or "".
    """
    handle = jax.eval_shape(functools.partial(start, axis=axis, name=name, wire=wire), tree)

    def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
        return split_over(axis, jnp.zeros(x.shape, x.dtype))

    return dataclasses.replace(handle, parts=jax.tree.map(zeros, handle.parts))


def finish(handle: Handle) -> Any:
    """Finishes what `jaxhet.start` has started: waits for the data and combines it.

    All positions add the same values in the same order, so that the result has the same bits
    everywhere.

    Args:
      handle: the handle of the latest start of its name, sharded as start has returned it. Each
        handle is finished once. If the job did not start it, `finish` does the whole exchange.

    Returns:
      The tree of `start`, without the first dimension: the mean or sum, on all positions. NaNs if
      this is not the handle of the latest start.

    Raises:
      UsageError: the mesh of `jax.set_mesh` does not have the axis, or has it with another number
        of positions; or, when the program runs, the handle was finished before, or is not the
        latest start's handle (on CPUs).
    """
    size = axis_size(handle.axis)
    others = {jnp.shape(x)[0] for x in jax.tree.leaves(handle.parts)} - {size}
    if others:
        raise UsageError(
            f"jaxhet.finish: the handle {handle.name!r} is of {others.pop()} positions, and the"
            f" mesh axis {handle.axis!r} has {size}: finish it with as many as at its start"
        )

    def arrive(parts: tuple[tuple[jax.Array, ...], ...]) -> list[jax.Array]:
        return [
            _combined(handle, i, of_leaf, number)
            for i, (of_leaf, number) in enumerate(zip(parts, _numbers(parts), strict=True))
        ]

    parts = tuple(handle.structure.flatten_up_to(handle.parts))
    found = over_positions(arrive, handle.axis, P())(parts)
    return jax.tree.unflatten(handle.structure, found)


@jax.custom_jvp
def _without_derivative(x: jax.Array) -> jax.Array:
    return x


@_without_derivative.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise UsageError(
        "jaxhet.start has no derivative: take the gradient before it, or give it"
        " jax.lax.stop_gradient(tree)"
    )


def _is_open(size: int) -> bool:
    """Whether an exchange between these positions can outlive a program: jaxhet's passes run."""
    session = _session.current()
    return size > 1 and session is not None and len(session.islands) > 1


def _numbers(parts: Sequence[Sequence[Any]]) -> list[int]:
    """The number of each leaf's first part."""
    return [sum(map(len, parts[:i])) for i in range(len(parts))]


def _bits(x: jax.Array, wire: str) -> tuple[jax.Array, ...]:
    """Bits of a leaf for the exchange, as unsigned integers."""
    if wire:
        encoded = encode(x, wire)
        sent = [encoded.elements, *([] if encoded.scales is None else [encoded.scales])]
        return tuple(lax.bitcast_convert_type(y, _unsigned(y)) for y in sent)
    if x.dtype == jnp.float64:
        return (lax.bitcast_convert_type(x, jnp.uint32),)  # [..., 2]
    return (lax.bitcast_convert_type(x, _unsigned(x)),)


def _unsigned(x: jax.Array) -> Any:
    return _UNSIGNED[x.dtype.itemsize]


def _floats(parts: Sequence[jax.Array], handle: Handle, leaf: int) -> jax.Array:
    """The values of one position."""
    shape, dtype = handle.leaves[leaf]
    if not handle.wire:
        return lax.bitcast_convert_type(parts[0], dtype)
    elements, scales = parts[0], parts[1] if len(parts) > 1 else None
    if handle.wire == "mxint8":
        elements = lax.bitcast_convert_type(elements, jnp.int8)
    return decode(Encoded(elements, scales), handle.wire, shape)


def _in_chain(x: jax.Array, axis: str, half: str, name: str, number: int) -> jax.Array:
    """Returns x, marked for the passes as a start or a finish (`jaxhet/compiler/halves.py`)."""
    pairs = [(i, i + 1) for i in range(lax.axis_size(axis) - 1)]
    return _permuted(x, axis, pairs, compiler.scope(half, name, number))


def _permuted(x: jax.Array, axis: str, pairs: Sequence[tuple[int, int]], scope: str) -> jax.Array:
    """A permute in a function of this name.

    Programs with other names are other programs, but caches of executables ignore named scopes.
    """

    def permute(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, axis, pairs)

    permute.__name__ = permute.__qualname__ = scope
    return jax.jit(permute)(x)


def _combined(handle: Handle, leaf: int, parts: Sequence[jax.Array], number: int) -> jax.Array:
    """The mean or sum of a leaf; each part holds the bits of one position [1, ...]."""
    size, dtype = lax.axis_size(handle.axis), jnp.dtype(handle.leaves[leaf][1])
    arrived = [_arrived(x[0], handle, number + i) for i, x in enumerate(parts)]
    is_latest = [rows[0] == x[0] for rows, x in zip(arrived, parts, strict=True)]
    if len(parts) > 1:  # blocks of elements, whose NaN is the scale
        is_latest = [is_latest[0].all(-1) & is_latest[1]]
    nan = jnp.array(-1).astype(parts[-1].dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    values: list[jax.Array] = []
    for position in range(size):
        row = [of_position(rows, position, handle.axis) for rows in arrived]
        row[-1] = jnp.where(is_latest[0], row[-1], nan)
        values.append(_floats(row, handle, leaf).astype(wide))
    total = values[0]
    for value in values[1:]:
        total = total + value
    return (total / size if handle.op == "mean" else total).astype(dtype)


def _arrived(x: jax.Array, handle: Handle, number: int) -> list[jax.Array]:
    """Arrays that have arrived: entry k is from the position k before this one."""
    axis = handle.axis
    own = _in_chain(x, axis, "finish", handle.name, number) if _is_open(lax.axis_size(axis)) else x
    scope = compiler.scope("finish", handle.name, number)
    return [own, *from_others(x, axis, functools.partial(_permuted, scope=scope))[1:]]


# --- arrays with a leading dimension for the positions of an axis ---


def over_positions(function: Callable[..., Any], axis: str, results: Any) -> Any:
    """Applies a function of one position (leaves [1, ...]) to all positions (leaves [n, ...])."""
    return jax.shard_map(
        function,
        in_specs=P(axis),
        out_specs=results,
        axis_names={axis},
        check_vma=False,
    )


def split_over(axis: str, x: jax.Array) -> jax.Array:
    """x, sharded over the axis along its first dimension; XLA shards the others."""
    spec = P(axis, *[P.UNCONSTRAINED] * (x.ndim - 1))
    return lax.with_sharding_constraint(x, spec)


def axis_size(axis: str) -> int:
    """Number of positions of an axis of the mesh of `jax.set_mesh`.

    Raises:
      UsageError: The mesh lacks the axis.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    if axis not in sizes:
        raise UsageError(
            f"no axis {axis!r} in the mesh {sizes}: give the mesh by jax.set_mesh, and one of its"
            " axes"
        )
    return sizes[axis]


def check_leading(tree: Any, size: int, axis: str) -> None:
    """Checks that each leaf has elements, and the positions of an axis as its first dimension.

    Raises:
      UsageError: A leaf has another first dimension, or no elements.
    """
    shapes = {jnp.shape(x) for x in jax.tree.leaves(tree)}
    if wrong := [shape for shape in shapes if shape[:1] != (size,)]:
        raise UsageError(
            f"a leaf has the shape {wrong[0]}: each begins with {size}, the positions of the mesh"
            f" axis {axis!r}"
        )
    if empty := [shape for shape in shapes if 0 in shape]:  # XLA would end by a segmentation fault
        raise UsageError(f"a leaf has the shape {empty[0]}: leave out leaves without elements")


# --- in a `jax.shard_map` over an axis ---


def from_others(x: jax.Array, axis: str, permute: Callable[..., jax.Array]) -> list[jax.Array]:
    """Arrays of all positions: entry k is from the position k before this one.

    Unlike a gather, permutes leave x split over other axes of the mesh as it is.

    Args:
      x: The array of this position.
      axis: The axis.
      permute: `lax.ppermute`, or a function with its arguments.
    """
    size = lax.axis_size(axis)
    shifts = (((i, (i + shift) % size) for i in range(size)) for shift in range(1, size))
    return [x, *(permute(x, axis, list(pairs)) for pairs in shifts)]


def of_position(arrived: Sequence[jax.Array], position: int, axis: str) -> jax.Array:
    """The array of a position, from those that `from_others` gives."""
    size, row = len(arrived), arrived[0]
    for shift in range(1, size):
        is_from = lax.axis_index(axis) == (position + shift) % size
        row = jnp.where(is_from, arrived[shift], row)
    return row
