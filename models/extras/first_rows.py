"""The first layers of a stack, as many as a value says: neither the others nor zeros for them.

A layer that `jax.lax.cond` skips would still write zeros for everything that a layer keeps for its
backward pass. On CPU that takes as long as the layer itself. So only inputs of layers are kept.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

# A layer: from its parameters, activations, and arrays without gradient, to activations.
Layer = Callable[[Any, jax.Array, Any], jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_first(
    layer: Layer, unroll: bool, params: Any, x: jax.Array, count: jax.Array, fixed: Any
) -> jax.Array:
    """The result of the first layers.

    Keeps the input of each layer for the backward pass, which computes the rest again.

    Args:
      layer: A layer. Its collectives must join devices that agree on `count`.
      unroll: Whether XLA sees each layer, and not a loop.
      params: Parameters of all layers, stacked along the first axis.
      x: Activations.
      count: Number of layers that are computed.
      fixed: Further arguments of each layer, without gradient.
    """
    return _forward(layer, unroll, params, x, count, fixed)[0]


def _forward(
    layer: Layer, unroll: bool, params: Any, x: jax.Array, count: jax.Array, fixed: Any
) -> Any:
    def step(x: jax.Array, row: Any) -> Any:
        i, own = row
        return jax.lax.cond(i < count, lambda x: layer(own, x, fixed), lambda x: x, x), x

    rows = len(jax.tree.leaves(params)[0])
    x, inputs = jax.lax.scan(step, x, (jnp.arange(rows), params), unroll=rows if unroll else 1)
    return x, (params, inputs, count, fixed)


def _backward(layer: Layer, unroll: bool, kept: Any, gradient: jax.Array) -> Any:
    params, inputs, count, fixed = kept

    def step(gradient: jax.Array, row: Any) -> Any:
        i, own, x = row

        def pull(gradient: jax.Array) -> Any:
            return jax.vjp(lambda own, x: layer(own, x, fixed), own, x)[1](gradient)

        def skip(gradient: jax.Array) -> Any:
            return jax.tree.map(jnp.zeros_like, own), gradient

        of_own, gradient = jax.lax.cond(i < count, pull, skip, gradient)
        return gradient, of_own

    rows = len(inputs)
    numbered = jnp.arange(rows), params, inputs
    gradient, gradients = jax.lax.scan(
        step, gradient, numbered, reverse=True, unroll=rows if unroll else 1
    )
    return gradients, gradient, None, None


run_first.defvjp(_forward, _backward)
