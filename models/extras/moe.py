"""A mixture of experts: each token uses few of many feed-forward layers (arXiv:2101.03961).

Shapes: N tokens of a device, k experts of each token, X experts, n devices on the mesh axis
`expert`, C the room of an expert for one device's tokens, E embed, F hidden.

A device routes its own tokens, so that the order of tokens in an expert depends on no other device.
Its tokens for each expert go to the device that holds it by one all-to-all of fixed shape, and come
back by another.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from models.configs import DTYPES, Config
from models.extras.dtypes import at_least_float32
from models.layers import linear, residual_stddev, start_values
from models.sharding import free_axes, token_axes, token_spec


class Experts(nnx.Module):
    """Routed feed-forward layers (SwiGLU), `config.experts` of them."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        wide = jnp.dtype(at_least_float32(DTYPES[config.dtype])).name
        routing = dataclasses.replace(config, dtype=wide)
        self.router = linear(routing, config.embed, config.experts, rngs=rngs)
        inner = (config.experts, config.embed, config.hidden)
        outer = (config.experts, config.hidden, config.embed)
        self.gate = nnx.Param(start_values(config, inner, rngs=rngs))
        self.up = nnx.Param(start_values(config, inner, rngs=rngs))
        self.down = nnx.Param(
            start_values(config, outer, stddev=residual_stddev(config), rngs=rngs)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, E] to the experts' output, [B, T, E]; zeros for a token that found no room."""
        weights = jax.nn.softmax(self.router(x.astype(at_least_float32(x.dtype))))
        dtype = DTYPES[self.config.dtype]
        kernels = tuple(p[...].astype(dtype) for p in (self.gate, self.up, self.down))
        free = free_axes()
        axes, spec = token_axes(free), token_spec(free)
        if not axes:
            return _routed(x, weights, kernels, config=self.config, axis=None)
        axis = "expert" if "expert" in axes else None
        return jax.shard_map(
            partial(_routed, config=self.config, axis=axis),
            in_specs=(spec, spec, P(axis)),
            out_specs=spec,
            axis_names=set(axes),
        )(x, weights, kernels)


def room(config: Config, tokens: int) -> int:
    """Number of tokens that an expert takes of a device's `tokens`: C, at most all of them."""
    share = tokens * config.experts_per_token / config.experts
    return math.ceil(min(tokens, config.capacity_factor * share))


def _routed(
    x: jax.Array,
    weights: jax.Array,
    kernels: tuple[jax.Array, ...],
    *,
    config: Config,
    axis: str | None,
) -> jax.Array:
    tokens = x.reshape(-1, x.shape[-1])
    chosen, experts = jax.lax.top_k(weights.reshape(-1, config.experts), config.experts_per_token)
    if config.normalize_experts:
        chosen /= jnp.sum(chosen, axis=-1, keepdims=True)
    gate, up, down = kernels
    capacity = room(config, len(tokens))
    slots = _slots(experts, config.experts, capacity)
    source = jnp.full(config.experts * capacity, len(tokens))
    source = source.at[slots].set(jnp.arange(len(tokens))[:, None], mode="drop")
    sent = tokens.at[source].get(mode="fill", fill_value=0)
    sent = sent.reshape(config.experts, capacity, -1)
    come = _all_to_all(sent, axis, split=0, concat=1)
    hidden = jax.nn.silu(jnp.einsum("xce,xef->xcf", come, gate))
    done = jnp.einsum("xcf,xfe->xce", hidden * jnp.einsum("xce,xef->xcf", come, up), down)
    back = _all_to_all(done, axis, split=1, concat=0)
    parts = back.reshape(len(source), -1).at[slots].get(mode="fill", fill_value=0)
    return jnp.einsum("nk,nke->ne", chosen.astype(x.dtype), parts).reshape(x.shape)


def _slots(experts: jax.Array, num_experts: int, capacity: int) -> jax.Array:
    """Place in [X * C] of each choice [N, k]; X * C and above for one that finds no room.

    First choices come before second ones, and earlier tokens before later ones.
    """
    order = experts.T.reshape(-1)
    before = jnp.cumsum(jax.nn.one_hot(order, num_experts, dtype=jnp.int32), axis=0)
    place = jnp.take_along_axis(before, order[:, None], axis=1)[:, 0] - 1
    slot = jnp.where(place < capacity, order * capacity + place, num_experts * capacity)
    return slot.reshape(experts.shape[::-1]).T


def _all_to_all(x: jax.Array, axis: str | None, *, split: int, concat: int) -> jax.Array:
    if axis is None:
        return x
    return jax.lax.all_to_all(x, axis, split_axis=split, concat_axis=concat, tiled=True)
