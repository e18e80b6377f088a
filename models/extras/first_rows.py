"""The first layers of a stack, as many as a stage of a pipeline has.

`jax.lax.cond` around each layer would cost a GPU a wait of the host per layer. Its gradient would
keep the parameters as well. So one branch has all layers of a stage, and keeps the values that
`jax.checkpoint`'s policy names. Rows that a stage lacks are filled up with zeros there.
Gradients of the parameters are added row by row to sums that the caller hands in, so that the
rows of a stage that has few layers cost no time: they would be written and added as zeros.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

# A layer: from its parameters, activations, and arrays without gradient, to activations.
Layer = Callable[[Any, jax.Array, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class FirstRows:
    """Number of computed layers of a stack.

    Attributes:
      counts: Numbers of layers, one of which applies.
      index: Function without arguments that returns the place of that number, int32.
      unroll: Whether XLA sees each layer, and not a loop.
    """

    counts: tuple[int, ...]
    index: Callable[[], jax.Array]
    unroll: bool = False


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_first(
    layer: Layer, rows: FirstRows, params: Any, sums: Any, x: jax.Array, fixed: Any
) -> tuple[Any, jax.Array]:
    """`sums`, and the result of the first layers.

    Keeps for the backward pass the input of each layer, and what a policy of `layer` says. That
    pass adds gradients of `params` to the gradient of `sums`, in place, and has none for `params`.

    Args:
      layer: A layer. Its collectives must join devices that agree on the number of layers.
      rows: Number of layers.
      params: Parameters of all layers, stacked along the first axis.
      sums: Arrays with the shapes of `params`, floats.
      x: Activations.
      fixed: Further arguments of each layer, without gradient.
    """
    return _forward(layer, rows, params, sums, x, fixed)[0]


def _forward(
    layer: Layer, rows: FirstRows, params: Any, sums: Any, x: jax.Array, fixed: Any
) -> Any:
    most = len(jax.tree.leaves(params)[0])

    def first(count: int, params: Any, x: jax.Array, fixed: Any) -> Any:
        def step(x: jax.Array, own: Any) -> Any:
            y, pull = _vjp(layer, own, x, fixed)
            return y, (x, pull.opaque_residuals)

        own = jax.tree.map(lambda row: row[:count], params)
        x, kept = jax.lax.scan(step, x, own, unroll=count if rows.unroll else 1)
        return x, _filled(kept, most)

    branches = [partial(first, count) for count in rows.counts]
    x, kept = jax.lax.switch(rows.index(), branches, params, x, fixed)
    return (sums, x), (params, kept, fixed)


def _backward(layer: Layer, rows: FirstRows, all_: Any, gradients: tuple[Any, jax.Array]) -> Any:
    params, kept, fixed = all_

    def first(count: int, params: Any, kept: Any, fixed: Any, gradients: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            sums, gradient = carry
            number, own, (x, residuals) = row
            # XLA drops the forward pass, because nothing uses its results.
            pull = _vjp(layer, own, x, fixed)[1].replace(opaque_residuals=residuals)
            of_own, gradient = pull(gradient)
            sums = jax.tree.map(lambda s, g: s.at[number].add(g.astype(s.dtype)), sums, of_own)
            return (sums, gradient), None

        own = (jnp.arange(count), *jax.tree.map(lambda row: row[:count], (params, kept)))
        unroll = count if rows.unroll else 1
        return jax.lax.scan(step, gradients, own, reverse=True, unroll=unroll)[0]

    branches = [partial(first, count) for count in rows.counts]
    sums, gradient = jax.lax.switch(rows.index(), branches, params, kept, fixed, gradients)
    return None, sums, gradient, None


run_first.defvjp(_forward, _backward)


def _vjp(layer: Layer, own: Any, x: jax.Array, fixed: Any) -> Any:
    return jax.vjp(lambda own, x: layer(own, x, fixed), own, x)


def _filled(tree: Any, most: int) -> Any:
    """Arrays with `most` rows, the further ones 0."""
    return jax.tree.map(lambda x: jnp.pad(x, [(0, most - len(x)), *[(0, 0)] * (x.ndim - 1)]), tree)
