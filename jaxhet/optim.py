"""Optax transformations for islands with a thin link between them. Needs the package `optax`.

Both have arrays with a leading dimension: entry i belongs to position i of a mesh axis, whose
positions should be islands. Within a position, other mesh axes may split everything as usual.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxhet._errors import UsageError
from jaxhet._handles import (
    Handle,
    axis_size,
    check_leading,
    finish,
    from_others,
    not_started,
    of_position,
    over_positions,
    split_over,
    start,
)
from jaxhet._microscaling import decode, encode
from jaxhet._options import CODECS
from jaxhet.compiler.codecs import LEAST_BYTES


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`.

    Attributes:
      inner_state: State of the transformation that gets the mean.
      residual: By leaf, float32 [n, ...]: the part of each position that has not been sent yet.
    """

    inner_state: Any
    residual: Any


class DiLoCoState(NamedTuple):
    """State of `diloco`; the names are MaxText's.

    Attributes:
      inner_state: State of the inner optimizer, with a leading dimension [n] in each leaf.
      params: The outer parameters, without that dimension; equal on all positions.
      outer_opt_state: For each fragment, the state of the outer optimizer, whose parameters are a
        dict by the leaf's place in `jax.tree.leaves(params)`: "0", "1" and so on.
      step: Number of updates, int32.
      in_flight: With a delay, for each fragment the handle of its latest exchange; else empty.
    """

    inner_state: Any
    params: Any
    outer_opt_state: tuple[Any, ...]
    step: jax.Array
    in_flight: tuple[Handle, ...] = ()


_KEPT = 0.5  # share of its own parameters that a position keeps where a fragment arrives late


def error_feedback(
    tx: optax.GradientTransformation, axis: str, wire: str
) -> optax.GradientTransformation:
    """Averages gradients over a mesh axis in few bits, and sends what was lost in the next step.

    Each position adds its residual to its gradient, encodes the sum, and keeps the difference as
    its next residual. All positions add the same encoded values in the same order, so the mean has
    the same bits everywhere. What rounding drops in one step is sent in a later one. It has the
    codecs of the option `wire`, and ignores the option itself. Leaves that have less than 1 MiB in
    float32 are sent exactly.

    Args:
      tx: transformation that gets the mean gradients, such as `optax.adamw(1e-3)`.
      axis: axis of the mesh of `jax.set_mesh` to average over, of n positions.
      wire: codec: "bf16", "mxfp8", "mxint8" or "mxint4".

    Returns:
      A transformation whose `update` is to be called inside `jax.jit`. It takes gradients with one
      more dimension than the parameters: leaves are floats [n, ...], sharded over `axis` along the
      first one, as from `jax.vmap(jax.grad(loss), in_axes=(None, 0), spmd_axis_name=axis)`. The
      updates have the shapes of the parameters. The state is an `ErrorFeedbackState` of arrays;
      its residuals are sharded over `axis`.

    Raises:
      UsageError: the codec is not known; or, in a call, the mesh does not have the axis, or a leaf
        has another leading dimension or no elements.

    Examples:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> mesh = jaxhet.make_mesh({"data": 2})
      >>> params = {"w": np.ones((64, 4), np.float32)}
      >>> batch = np.ones((2, 8, 64), np.float32)  # 8 rows for each of two positions
      >>> def loss(params, x):
      ...     return jnp.mean((x @ params["w"]) ** 2)
      >>> from jaxhet import optim
      >>> tx = optim.error_feedback(optax.sgd(0.1), "data", "mxint4")
      >>> def step(params, state, batch):
      ...     own = jax.vmap(jax.grad(loss), in_axes=(None, 0), spmd_axis_name="data")
      ...     updates, state = tx.update(own(params, batch), state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> with jax.set_mesh(mesh):
      ...     params, state = jax.jit(step)(params, jax.jit(tx.init)(params), batch)
    """
    _check_codec(wire)

    def init(params: Any) -> ErrorFeedbackState:
        size = axis_size(axis)

        def zeros(x: Any) -> jax.Array:
            return split_over(axis, jnp.zeros((size, *jnp.shape(x)), jnp.float32))

        return ErrorFeedbackState(tx.init(params), jax.tree.map(zeros, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        check_leading(updates, axis_size(axis), axis)

        def send(own: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
            wanted = own[0].astype(jnp.float32) + residual[0]
            mean, sent = _gathered(wanted, axis, wire if wanted.nbytes >= LEAST_BYTES else "")
            lost = wanted - sent
            lost = jnp.where(jnp.isfinite(lost), lost, 0.0)  # NaN is told once, in the mean
            return mean.astype(own.dtype), lost[None]

        def send_all(own: list[jax.Array], rest: list[jax.Array]) -> Any:
            return tuple(zip(*map(send, own, rest), strict=True))

        own, structure = jax.tree.flatten(updates)
        means, residual = over_positions(send_all, axis, (P(), P(axis)))(
            own, jax.tree.leaves(state.residual)
        )
        means, residual = (jax.tree.unflatten(structure, x) for x in (means, residual))
        means, inner_state = tx.update(means, state.inner_state, params)
        return means, ErrorFeedbackState(inner_state, residual)

    return optax.GradientTransformation(init, update)


def diloco(  # noqa: PLR0913 (the parameters of the method)
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    axis: str,
    *,
    every: int,
    fragments: int = 1,
    delay: int = 0,
    wire: str = "",
) -> optax.GradientTransformation:
    """DiLoCo: positions of a mesh axis train on their own and are averaged every few steps.

    Each position has parameters of its own and applies `inner` to them in each step. After `every`
    steps the mean over all positions of (outer parameters - own parameters) is the gradient of
    `outer`, which updates the outer parameters. All positions go on from these (arXiv:2311.08105).
    With several `fragments`, leaves are dealt to fragments of about equal size, which are exchanged
    in turn, each every `every` steps. With a `delay`, an exchange that one step starts is finished
    that many steps later, and the steps in between do not wait for it (`jaxhet.start`). Positions
    continue in the middle between the outer parameters and their own (arXiv:2501.18512). A
    checkpoint may be saved meanwhile: the job that restores it repeats the exchange.

    `optax.MultiSteps` drops the states of most of its steps: give it as `inner`. Around a `diloco`
    with a delay it loses handles, so that the next start raises an error.

    Args:
      inner: optimizer of each position, such as `optax.adamw(3e-4)`. It sees one position only.
      outer: optimizer of the outer parameters; the paper has
        `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
      axis: axis of the mesh of `jax.set_mesh`, of n positions; "diloco" in MaxText.
      every: number of steps from one exchange of a fragment to its next, at least 1.
      fragments: number of fragments, from 1 to `every`.
      delay: number of steps from the start of an exchange to its finish, below `every`; 0: it ends
        in the step that starts it. One such transformation can run in a job.
      wire: codec of the outer gradients: "bf16", "mxfp8", "mxint8" or "mxint4"; "": float32.

    Returns:
      A transformation whose `init` and `update` are to be called inside `jax.jit`. Parameters,
      gradients and updates have leaves [n, ...], floats, sharded over `axis` along the first
      dimension. `init` takes n equal copies. The state is a `DiLoCoState` of arrays. Its `params`
      are the model to evaluate or save. After an exchange without delay, each position has these
      parameters up to the rounding of `optax.apply_updates`.

    Raises:
      UsageError: an argument is not valid; or, in a call, the mesh does not have the axis, or a
        leaf has another leading dimension or no elements.

    Examples:
      >>> tx = optim.diloco(
      ...     optax.adamw(1e-2), optax.sgd(0.7, momentum=0.9, nesterov=True), "data",
      ...     every=8, fragments=2, wire="mxint4",
      ... )
      >>> def step(params, state, batch):
      ...     gradients = jax.vmap(jax.grad(loss), spmd_axis_name="data")(params, batch)
      ...     updates, state = tx.update(gradients, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> with jax.set_mesh(mesh):
      ...     copies = {"w": np.ones((2, 64, 4), np.float32)}
      ...     copies, state = jax.jit(step)(copies, jax.jit(tx.init)(copies), batch)
    """
    if wire:
        _check_codec(wire)
    if not 1 <= fragments <= every or not 0 <= delay < every:
        raise UsageError(
            f"jaxhet.optim.diloco: every={every}, fragments={fragments} and delay={delay}; give at"
            " least one step for each of at least one fragment, and a delay below every"
        )

    def init(params: Any) -> Any:
        check_leading(params, axis_size(axis), axis)
        copies = jax.tree.map(lambda x: x[0], params)
        leaves = jax.tree.leaves(copies)
        parts = [_at(part, leaves) for part in _dealt(leaves, fragments)]
        own = jax.vmap(inner.init, spmd_axis_name=axis)(params)
        size, in_flight = axis_size(axis), ()
        if delay:

            def distance(x: jax.Array) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct((size, *x.shape), jnp.float32)

            in_flight = tuple(
                not_started(jax.tree.map(distance, part), axis, name=f"diloco{number}", wire=wire)
                for number, part in enumerate(parts)
            )
        states = tuple(outer.init(part) for part in parts)
        return DiLoCoState(own, copies, states, jnp.zeros((), jnp.int32), in_flight)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        check_leading(updates, axis_size(axis), axis)
        updates, own = jax.vmap(inner.update, spmd_axis_name=axis)(
            updates, state.inner_state, params
        )
        step = state.step + 1
        moved, structure = jax.tree.flatten(updates)
        before, copies = jax.tree.leaves(params), jax.tree.leaves(state.params)
        outer_states, in_flight = list(state.outer_opt_state), list(state.in_flight)
        for number, part in enumerate(_dealt(copies, fragments)):
            due = (number + 1) * every // fragments
            fragment = _Fragment(outer, axis, wire, number, _at(part, before))
            of_part = _at(part, moved), _at(part, copies), outer_states[number]
            if delay:
                is_back = (step >= due + delay) & (step % every == (due + delay) % every)
                found = _if(is_back, fragment.finished, *of_part, in_flight[number])
                is_due = step % every == due % every
                in_flight[number] = lax.cond(
                    is_due, fragment.started, lambda *xs: xs[-1], *found[:2], in_flight[number]
                )
            else:
                found = _if(step % every == due % every, fragment.exchanged, *of_part)
            for i in part:
                moved[i], copies[i] = found[0][str(i)], found[1][str(i)]
            outer_states[number] = found[2]
        outer_params = jax.tree.unflatten(structure, copies)
        state = DiLoCoState(own, outer_params, tuple(outer_states), step, tuple(in_flight))
        return jax.tree.unflatten(structure, moved), state

    return optax.GradientTransformation(init, update)


def _if(condition: jax.Array, function: Callable[..., Any], *args: Any) -> Any:
    """The function's results, or its first three arguments."""
    return lax.cond(condition, function, lambda *unchanged: unchanged[:3], *args)


_Leaves = dict[str, jax.Array]
_Found = tuple[_Leaves, _Leaves, Any]


class _Fragment(NamedTuple):
    """Leaves that are exchanged together: the parameters of all positions before the update.

    Methods take the updates of these parameters, the outer parameters, and the state of the outer
    optimizer; and return them.
    """

    outer: optax.GradientTransformation
    axis: str
    wire: str
    number: int
    before: _Leaves

    def exchanged(self, updates: _Leaves, copies: _Leaves, state: Any) -> _Found:
        """Updates to the new outer parameters."""

        def mean(parts: _Leaves) -> _Leaves:
            def one(x: jax.Array) -> jax.Array:
                return _mean(x[0].astype(jnp.float32), self.axis, self.wire).astype(x.dtype)

            return jax.tree.map(one, parts)

        gradient = over_positions(mean, self.axis, P())(self._distance(updates, copies))
        copies, state = self._outer_step(gradient, copies, state)
        return jax.tree.map(jnp.subtract, copies, self.before), copies, state

    def started(self, updates: _Leaves, copies: _Leaves, _: Handle) -> Handle:
        """The handle of the exchange."""
        distance = jax.tree.map(lambda x: x.astype(jnp.float32), self._distance(updates, copies))
        return start(distance, self.axis, name=f"diloco{self.number}", wire=self.wire)

    def finished(self, updates: _Leaves, copies: _Leaves, state: Any, handle: Handle) -> _Found:
        """Updates to the middle between the new outer parameters and the own ones."""
        gradient = jax.tree.map(lambda g, x: g.astype(x.dtype), finish(handle), copies)
        copies, state = self._outer_step(gradient, copies, state)
        mixed = jax.tree.map(
            lambda copy, own, update: (1 - _KEPT) * (copy - own) + _KEPT * update,
            copies,
            self.before,
            updates,
        )
        return mixed, copies, state

    def _distance(self, updates: _Leaves, copies: _Leaves) -> _Leaves:
        return jax.tree.map(lambda c, own, update: c - (own + update), copies, self.before, updates)

    def _outer_step(self, gradient: Any, copies: Any, state: Any) -> tuple[Any, Any]:
        steps, state = self.outer.update(gradient, state, copies)
        return optax.apply_updates(copies, steps), state


def _dealt(leaves: list[Any], count: int) -> list[list[int]]:
    """Indices of leaves in `count` parts of about equal size, largest leaves first."""
    parts: list[list[int]] = [[] for _ in range(count)]
    sizes = [0] * count
    for i in sorted(range(len(leaves)), key=lambda i: -leaves[i].size):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(i)
        sizes[smallest] += leaves[i].size
    return parts


def _at(places: list[int], leaves: list[jax.Array]) -> _Leaves:
    return {str(i): leaves[i] for i in places}


def _mean(x: jax.Array, axis: str, wire: str) -> jax.Array:
    """The mean of float32 arrays over an axis of `jax.shard_map`."""
    if wire:
        return _gathered(x, axis, wire)[0]
    size = lax.axis_size(axis)
    return (lax.psum(x, axis) if size > 1 else x) / size


def _gathered(x: jax.Array, axis: str, wire: str) -> tuple[jax.Array, jax.Array]:
    """The mean of what each position sends, and the part of this position."""

    def value(row: Any) -> jax.Array:
        return decode(row, wire, x.shape) if wire else row

    size, encoded = lax.axis_size(axis), encode(x, wire) if wire else x
    parts, structure = jax.tree.flatten(encoded)
    arrived = [from_others(part, axis, lax.ppermute) for part in parts]
    rows = [[of_position(xs, i, axis) for xs in arrived] for i in range(size)]
    total, *others = (value(jax.tree.unflatten(structure, row)) for row in rows)
    for other in others:
        total = total + other
    return total / size, value(encoded)


def _check_codec(wire: str) -> None:
    if wire not in CODECS:
        raise UsageError(f"jaxhet.optim: wire={wire!r} is not valid; codecs: {', '.join(CODECS)}")
