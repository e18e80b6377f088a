"""The first layers of a stack, as many as a value says: neither the others nor zeros for them.

Under `jax.lax.cond` a layer that is skipped would still write zeros for everything that a layer
keeps for its backward pass. On CPU that takes as long as the layer itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

# A layer: from its parameters, activations, and arrays without gradient, to activations.
Layer = Callable[[Any, jax.Array, Any], jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_first(layer: Layer, params: Any, x: jax.Array, count: jax.Array, fixed: Any) -> jax.Array:
    """The result of the first layers.

    Keeps the input of each layer for the backward pass, which computes the rest again.

    Args:
      layer: A layer. Its collectives must join devices that agree on `count`.
      params: Parameters of all layers, stacked along the first axis.
      x: Activations.
      count: Number of layers that are computed.
      fixed: Further arguments of each layer, without gradient.
    """
    return _forward(layer, params, x, count, fixed)[0]


def _forward(layer: Layer, params: Any, x: jax.Array, count: jax.Array, fixed: Any) -> Any:
    def step(i: Any, carry: Any) -> Any:
        x, inputs = carry
        return layer(_row(params, i), x, fixed), _with_row(inputs, x, i)

    rows = len(jax.tree.leaves(params)[0])
    x, inputs = jax.lax.fori_loop(0, count, step, (x, jnp.broadcast_to(x, (rows, *x.shape))))
    return x, (params, inputs, count, fixed)


def _backward(layer: Layer, kept: Any, gradient: jax.Array) -> Any:
    params, inputs, count, fixed = kept

    def step(done: Any, carry: Any) -> Any:
        gradient, gradients = carry
        i = count - 1 - done
        pull = jax.vjp(lambda own, x: layer(own, x, fixed), _row(params, i), inputs[i])[1]
        own, gradient = pull(gradient)
        return gradient, jax.tree.map(lambda all_, x: _with_row(all_, x, i), gradients, own)

    zeros = jax.tree.map(jnp.zeros_like, params)
    gradient, gradients = jax.lax.fori_loop(0, count, step, (gradient, zeros))
    return gradients, gradient, None, None


run_first.defvjp(_forward, _backward)


def _row(tree: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _with_row(rows: jax.Array, row: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(rows, row, i, 0)
