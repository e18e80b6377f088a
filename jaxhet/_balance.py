"""Gradients of a batch of which islands compute unequal shares, and the sizes of these shares.

A batch is cut into microbatches of one shape. Each island computes as many as its speed allows, so
that all islands reach the exchange at the same time.
"""

import functools
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxhet._errors import UsageError
from jaxhet._per_platform import per_platform

Loss = Callable[[Any, Any], tuple[Any, Any]]
Sums = Callable[[Any, Any], Any]
Gradients = Callable[[Any, Any, Any], tuple[jax.Array, Any]]


def balanced_value_and_grad(
    loss: Loss | Mapping[str, Loss],
    *,
    axis: str,
    mesh: Mesh | None = None,
    parts: Mapping[str, int] | None = None,
) -> Gradients:
    """Mean loss and gradients of a batch of which each island computes a share of its own.

    Along the mesh axis `axis`, n positions each have room for m microbatches of one shape, and
    position i computes its first `counts[i]`. The counts are values, not shapes: a program is
    compiled once for all shares. `loss` returns a sum of losses l and a sum of weights w for each
    microbatch. The result is the mean Σ l / Σ w over all microbatches of all positions, and its
    gradients. Each token has the same weight, in whichever microbatch it is.

    Sums are kept in float32 at least. Loss, weights and gradients are summed over `axis` once in a
    step. The last microbatch of each position is computed outside of the loop over the others, so
    that the exchange of a gradient can overlap with the rest of its backward pass.

    Other mesh axes may split parameters and rows as usual (FSDP, tensor parallelism). Their
    collectives run inside the loop, so the devices of one position should be in one island. Over
    `axis` itself parameters are whole while gradients are computed. The optimizer's update is the
    caller's. On islands of unlike arithmetic, shard the update over `axis` to keep replicas equal.

    The island with the most memory decides how large a microbatch is. An island with less memory
    can compute it in several `parts`, one after the other. It can also keep less of it for the
    backward pass: `loss` is then a mapping of functions that return the same values, one of them
    under `jax.checkpoint`. Each island compiles its own form (`jaxhet.per_platform`), and all of
    them exchange the same arrays.

    Args:
      loss: function of parameters and one microbatch, whose results are scalars: the sum of the
        losses and the sum of their weights, for example the number of tokens. `jax.value_and_grad`
        must be able to differentiate the first one. It must not communicate over `axis`, where
        positions call it different numbers of times. Or a mapping of such functions, by name of
        an island or platform as in `jaxhet.per_platform`; the name "" is for all others.
      axis: mesh axis whose positions have shares of their own, for example "data".
      mesh: the mesh; None: the mesh of `jax.set_mesh`.
      parts: number of parts of a microbatch, by name of an island or platform; 1 for all others.
        It divides the rows of a microbatch, the third dimension of `batch`.

    Returns:
      A function of `params`, `batch` and `counts`, to be called inside `jax.jit`. `params` is a
      pytree of floating-point arrays. Each leaf of `batch` has the shape [n, m, ...], and should be
      sharded over `axis` along its first dimension; microbatches behind the counts are not used.
      `counts` is an integer array [n] of values from 0 to m. A position with 0 computes one
      microbatch and drops it. The results are the mean loss, float32 or wider, and the gradients,
      with the tree, shapes and dtypes of `params`. If a count is out of range, or all weights are
      0, both are NaN.

    Raises:
      UsageError: the mesh does not have the axis; or, in a call of the result, batch, counts or
        the results of `loss` have other shapes, or a microbatch can't be divided into parts.

    Examples:
      >>> import jax.numpy as jnp, numpy as np
      >>> params = np.zeros(3, np.float32)  # two islands have room for three microbatches of 4 rows
      >>> batch = {"x": np.ones((2, 3, 4, 3), np.float32), "y": np.ones((2, 3, 4), np.float32)}
      >>> batch["mask"] = np.ones((2, 3, 4), np.float32)
      >>> mesh = jaxhet.make_mesh({"data": 2})
      >>> def loss(params, batch):
      ...     errors = (batch["x"] @ params - batch["y"]) ** 2
      ...     return jnp.sum(errors * batch["mask"]), jnp.sum(batch["mask"])
      >>> balanced = jaxhet.balanced_value_and_grad(loss, axis="data", mesh=mesh)
      >>> value, gradients = jaxhet.jit(balanced)(params, batch, np.array([3, 1]))
    """
    of_part = _each_island(loss, parts or {})

    def value_and_grad(params: Any, batch: Any, counts: Any) -> tuple[jax.Array, Any]:
        counts = jnp.asarray(counts)
        size = _axis_size(axis, mesh)
        most = _check_shapes(size, axis, batch, counts)

        def local(params: Any, batch: Any, counts: jax.Array) -> tuple[jax.Array, Any]:
            own = jax.tree.map(lambda x: x[0], batch)
            sums = _sums(of_part, params, own, counts[0], most)
            # XLA refuses sums over an axis of one position beside axes that it partitions itself.
            (value, weight), gradients = lax.psum(sums, axis) if size > 1 else sums
            return value / weight, jax.tree.map(
                lambda x, param: (x / weight).astype(param.dtype), gradients, params
            )

        if size == 1:
            return local(params, batch, counts)
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P(axis), P(axis)),
            out_specs=P(),
            axis_names={axis},
            check_vma=False,  # so that `loss` may be any function
        )(params, batch, counts)

    return value_and_grad


def _each_island(loss: Loss | Mapping[str, Loss], parts: Mapping[str, int]) -> Sums:
    """Sums and gradients of a microbatch, in the form of this process's island."""
    losses = loss if isinstance(loss, Mapping) else {"": loss}
    default: Any = losses.get("")
    if default is None and (lacking := sorted(parts.keys() - losses.keys())):
        raise UsageError(
            f"jaxhet.balanced_value_and_grad has parts for {', '.join(lacking)}, and no loss: name"
            " it among the losses, or give one with the name ''"
        )
    forms = {
        name: functools.partial(_in_parts, losses.get(name) or default, parts.get(name, 1))
        for name in {*losses, *parts} - {""}
    }
    others = functools.partial(_in_parts, default, 1) if default else None
    return per_platform(others, **forms) if forms or others is None else others


def _in_parts(loss: Any, parts: int, params: Any, batch: Any) -> Any:
    """Sums (loss, weight) of a microbatch and their gradients, computed in so many parts."""
    gradients = jax.value_and_grad(_checked(loss), has_aux=True)
    if parts == 1:
        return gradients(params, batch)

    def divide(x: jax.Array) -> jax.Array:
        if not x.ndim or parts < 1 or x.shape[0] % parts:
            raise UsageError(
                f"jaxhet.balanced_value_and_grad: a microbatch of shape {list(x.shape)} can't be"
                f" computed in {parts} parts on an island; choose parts that divide its rows"
            )
        # Neighbours in different parts, so that each part lies on all devices of the rows.
        return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        return _added(sums, gradients(params, part)), None

    divided = jax.tree.map(divide, batch)
    shapes = jax.eval_shape(gradients, params, jax.tree.map(lambda x: x[0], divided))
    sums = lax.scan(add, jax.tree.map(_zeros, shapes), divided)[0]
    return jax.tree.map(lambda x, like: x.astype(like.dtype), sums, shapes)


def _added(sums: Any, more: Any) -> Any:
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, more)


def _sums(sums_of: Sums, params: Any, batch: Any, count: jax.Array, most: int) -> Any:
    """Sums over the first `count` microbatches: (loss, weight), gradients."""

    def of_part(i: Any) -> Any:
        part = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), batch)
        return sums_of(params, part)

    def add(i: Any, sums: Any) -> Any:
        return _added(sums, of_part(i))

    scalars, shapes = jax.eval_shape(of_part, 0)
    zeros: Any = (
        jax.tree.map(_zeros, scalars),
        jax.tree.map(functools.partial(_zeros_like, count < 0), shapes, params),
    )
    last = jnp.clip(count - 1, 0, most - 1)
    others = lax.fori_loop(0, last, add, zeros)
    used = count > 0
    (value, weight), gradients = jax.tree.map(
        lambda total, x: jnp.where(used, total, x), add(last, others), zeros
    )
    return (value, jnp.where((count >= 0) & (count <= most), weight, jnp.nan)), gradients


def _checked(loss: Loss) -> Loss:
    def run(params: Any, part: Any) -> tuple[Any, Any]:
        results = loss(params, part)
        is_pair = isinstance(results, tuple) and len(results) == 2
        if not is_pair or any(jnp.ndim(x) for x in jax.tree.leaves(results)):
            raise UsageError(
                "the loss of jaxhet.balanced_value_and_grad has other results than two scalars:"
                " return the sum of the losses and the sum of their weights, such as the number of"
                f" tokens; found {jax.tree.map(jax.typeof, results)}"
            )
        return results[0], jnp.asarray(results[1])

    return run


def _zeros(x: Any) -> jax.Array:
    """Zeros of a type in which many values can be added."""
    return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))


def _zeros_like(never: jax.Array, x: Any, param: jax.Array) -> jax.Array:
    """`_zeros` with the sharding of a parameter, which a select with it gives them.

    Otherwise XLA would keep the sums whole on every device of a position.
    """
    zeros = _zeros(x)
    return jnp.where(never, param.astype(zeros.dtype), zeros)


def _axis_size(axis: str, mesh: Mesh | None) -> int:
    sizes = dict((mesh or jax.sharding.get_abstract_mesh()).shape)
    if axis not in sizes:
        raise UsageError(
            f"jaxhet.balanced_value_and_grad: no axis {axis!r} in the mesh {sizes}: give the mesh"
            " as an argument or by jax.set_mesh, and one of its axes"
        )
    return sizes[axis]


def _check_shapes(size: int, axis: str, batch: Any, counts: jax.Array) -> int:
    """Checks shapes; returns the largest number of microbatches of a position."""
    if counts.shape != (size,) or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise UsageError(
            f"counts are {counts.dtype}{list(counts.shape)}: give one integer for each of the"
            f" {size} positions of the mesh axis {axis!r}"
        )
    shapes = [jnp.shape(x) for x in jax.tree.leaves(batch)]
    leading = {shape[:2] for shape in shapes}
    if len(leading) != 1 or any(len(s) < 2 or s[0] != size or not s[1] for s in leading):
        raise UsageError(
            f"leaves of the batch have the shapes {sorted(set(shapes))}: each begins with"
            f" [{size}, m], the positions of the mesh axis {axis!r} and the microbatches"
            " of each"
        )
    ((_, most),) = leading
    return most


def balanced_split(
    total: int,
    seconds: Sequence[float],
    *,
    fixed: Sequence[float] | None = None,
    most: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The numbers of microbatches with which unequal islands finish a step first.

    With t and c the `seconds` and the `fixed` of an island, k microbatches take it c + k t. The
    result minimizes the largest of these times: without rounding k = (T - c) / t, where T is equal
    for all islands. Each island has at least one microbatch. Pure: no island is asked.

    Args:
      total: number of microbatches of a step, over all islands.
      seconds: time of a microbatch on each island, in any unit. Measure it without the exchange
        between islands, for example with `balanced_value_and_grad` on a mesh of one island's
        devices, with two counts.
      fixed: time that each island needs in a step for everything else, in the same unit; default 0.
      most: largest number of microbatches of each island; default: no limit.

    Returns:
      The number of microbatches of each island, whose sum is `total`. Of islands that would finish
      at the same time, the first has more.

    Raises:
      UsageError: a time is not a positive number, `total` is smaller than the number of islands, or
        the islands have no room for `total`.

    Examples:
      >>> jaxhet.balanced_split(16, [0.10, 0.21])
      (11, 5)
    """
    num = len(seconds)
    fixed = [0.0] * num if fixed is None else fixed
    most = [total] * num if most is None else most
    _check_split(total, seconds, fixed, most)
    counts = [1] * num
    # The first to finish gets the next one: no other split has a smaller largest time.
    ends = [(fixed[i] + 2 * seconds[i], i) for i in range(num) if most[i] > 1]
    heapq.heapify(ends)
    for _ in range(total - num):
        end, i = ends[0]
        counts[i] += 1
        if counts[i] < most[i]:
            heapq.heapreplace(ends, (end + seconds[i], i))
        else:
            heapq.heappop(ends)
    return tuple(counts)


def _check_split(
    total: int, seconds: Sequence[float], fixed: Sequence[float], most: Sequence[int]
) -> None:
    num = len(seconds)
    if not num or len(fixed) != num or len(most) != num:
        raise UsageError(
            f"balanced_split: {num} seconds, {len(fixed)} fixed and {len(most)} most; give one of"
            " each for every island"
        )
    for i in range(num):
        if not (math.isfinite(seconds[i]) and seconds[i] > 0):
            raise UsageError(
                f"balanced_split: seconds[{i}] is {seconds[i]}; a microbatch takes a time above 0"
            )
        if not (math.isfinite(fixed[i]) and fixed[i] >= 0):
            raise UsageError(f"balanced_split: fixed[{i}] is {fixed[i]}; give a time of at least 0")
        if most[i] < 1:
            raise UsageError(
                f"balanced_split: most[{i}] is {most[i]}, and each island computes at least one"
                " microbatch: choose smaller microbatches, or leave the island out of the job"
            )
    if total < num:
        raise UsageError(
            f"balanced_split: {total} microbatches for {num} islands, and each island computes at"
            " least one: choose smaller microbatches or a larger batch"
        )
    if sum(most) < total:
        raise UsageError(
            f"balanced_split: {total} microbatches, and the islands have room for"
            f" {' + '.join(map(str, most))}: choose a smaller batch"
        )
