"""Ring attention: causal attention over positions that are split over the mesh axis `sequence`.

Each device holds the queries of its positions. Keys and values move from device to device, and the
softmax is completed with a running maximum and sum (arXiv:2310.01889). The backward pass computes
the weights again from the logarithm of that sum (arXiv:2205.14135), so that a device never holds
scores of more than its own queries and one shard of keys.

The alternative is an all-to-all from positions to heads and back (arXiv:2309.14509). It needs
a number of key and value heads that `sequence` times `model` divides; models with grouped queries
have 2 to 8. A ring works with any number, and sends the key and value heads only.

A causal ring is open: a shard moves to later positions only, and each of its gradients is sent
straight home. Every device computes with equally many shards, unseen ones too. The time
of a step is that of the last positions, which see all.

Shapes in docstrings: n devices along `sequence`, B batch, T positions, S = T/n positions of a
shard, H query heads, K key and value heads, G = H/K, D head dimension.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from models.extras.dtypes import at_least_float32
from models.sharding import SEQUENCE

# Queries, keys, values and their gradients: [B, T, …]; normalizers: [B, K, G, T].
_BY_POSITION = P(None, SEQUENCE)
_NORMALIZERS = P(None, None, None, SEQUENCE)


@jax.custom_vjp
def ring_attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention [B, T, H, D] over whole rows.

    Query t sees keys 0 … t. Each key and value head serves H/K neighbouring query heads. Scores,
    weights and all sums are float32, or float64 for float64; products are of the type of their
    operands. `sequence` must be an axis of the mesh of `jax.set_mesh`, and must divide T.

    Args:
      query: Queries [B, T, H, D].
      key: Keys [B, T, K, D].
      value: Values [B, T, K, D].
    """
    return _forward(query, key, value)[0]


def _forward(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, Any]:
    on_ring = _on_ring(_attend, (_BY_POSITION,) * 3, (_BY_POSITION, _NORMALIZERS))
    mixed, normalizer = on_ring(query, key, value)
    return mixed, (query, key, value, mixed, normalizer)


def _backward(kept: Any, gradient: jax.Array) -> Any:
    inputs = (*(_BY_POSITION,) * 4, _NORMALIZERS, _BY_POSITION)
    return _on_ring(_gradients, inputs, (_BY_POSITION,) * 3)(*kept, gradient)


ring_attend.defvjp(_forward, _backward)


def _on_ring(local: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
    """Runs `local` on each shard of positions; XLA partitions over the other axes of the mesh."""
    return jax.shard_map(local, in_specs=inputs, out_specs=outputs, axis_names={SEQUENCE})


class _Constants(NamedTuple):
    """Operands of a device beside its queries, keys and values.

    Attributes:
      is_seen: for each hop, bool [], whether the keys that it brings are earlier ones.
      rows: numbers of a shard's positions, int32 [S].
      zero, hidden, scale: float32 [], or float64 for float64; `hidden` is the score of a key that
        is not seen.
    """

    is_seen: list[jax.Array]
    rows: jax.Array
    zero: jax.Array
    hidden: jax.Array
    scale: jax.Array

    @classmethod
    def of(cls, query: jax.Array) -> "_Constants":
        """The constants for a shard's queries [B, S, H, D], available once these are.

        The barrier keeps them in the loop over layers. Without it JAX would compute masks of the
        size of scores before the loop, and keep them for the backward pass.
        """
        place = jax.lax.axis_index(SEQUENCE)
        scalar = partial(jnp.asarray, dtype=at_least_float32(query.dtype))
        constants = cls(
            is_seen=[place >= hop for hop in range(jax.lax.axis_size(SEQUENCE))],
            rows=jnp.arange(query.shape[1], dtype=jnp.int32),
            zero=scalar(0),
            hidden=scalar(-jnp.inf),
            scale=scalar(query.shape[-1] ** -0.5),
        )
        return jax.lax.optimization_barrier((constants, query))[0]


def _attend(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention of a shard's queries [B, S, H, D]; also log-sum-exp of their scores [B, K, G, S].

    The first shard is the device's own, where each query sees a key: the maximum is finite.
    """
    constants = _Constants.of(query)
    grouped = _grouped(query, key)
    largest, total, mixed = constants.hidden, constants.zero, constants.zero
    for hop, (keys, values) in enumerate(_arrivals(key, value)):
        scores = _scores(grouped, keys, hop, constants)
        before, largest = largest, jnp.maximum(largest, jnp.max(scores, axis=-1))
        weights, kept = jnp.exp(scores - largest[..., None]), jnp.exp(before - largest)
        total = total * kept + jnp.sum(weights, axis=-1)
        added = _product("bkgqs,bskd->bkgqd", weights.astype(values.dtype), values)
        mixed = mixed * kept[..., None] + added
    mixed = jnp.einsum("bkgqd->bqkgd", mixed / total[..., None])
    return mixed.astype(query.dtype).reshape(query.shape), largest + jnp.log(total)


def _gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mixed: jax.Array,
    normalizer: jax.Array,
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of a shard's queries, keys and values, from the gradient of its result `mixed`.

    With weights P = exp(scores - normalizer) and dP = gradient · value, the gradient of scores is
    P (dP - sum(gradient * mixed)) (arXiv:2205.14135, appendix B.4).
    """
    constants = _Constants.of(query)
    grouped, given = _grouped(query, key), _grouped(gradient, key)
    dtype = at_least_float32(gradient.dtype)
    products = gradient.astype(dtype) * mixed.astype(dtype)
    means = jnp.einsum("bqkg->bkgq", jnp.sum(_grouped(products, key), axis=-1))
    by_query = by_pair = constants.zero
    for hop, (keys, values) in enumerate(_arrivals(key, value)):
        scores = _scores(grouped, keys, hop, constants)
        weights = jnp.exp(scores - normalizer[..., None])
        by_weights = _product("bqkgd,bskd->bkgqs", given, values)
        by_scores = weights * (by_weights - means[..., None]) * constants.scale
        by_scores = by_scores.astype(query.dtype)
        by_query = by_query + _product("bkgqs,bskd->bqkgd", by_scores, keys)
        by_keys = _product("bkgqs,bqkgd->bskd", by_scores, grouped)
        by_values = _product("bkgqs,bqkgd->bskd", weights.astype(query.dtype), given)
        by_pair = by_pair + _sent_home(jnp.stack((by_keys, by_values)), hop)
    by_query = by_query.reshape(query.shape).astype(query.dtype)
    return by_query, by_pair[0].astype(key.dtype), by_pair[1].astype(value.dtype)


def _arrivals(key: jax.Array, value: jax.Array) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Keys and values of a device's own shard, then of those before it, the nearest one first.

    They move together, so that a hop is one exchange. The first devices receive zeros when no shard
    is left before theirs.
    """
    pair = jnp.stack((key, value))
    size = jax.lax.axis_size(SEQUENCE)
    for hop in range(size):
        if hop:
            pair = jax.lax.ppermute(pair, SEQUENCE, [(i, i + 1) for i in range(hop - 1, size - 1)])
        yield pair[0], pair[1]


def _sent_home(x: jax.Array, hop: int) -> jax.Array:
    """`x` of the device `hop` places further along the ring; zeros where no device is."""
    if not hop:
        return x
    size = jax.lax.axis_size(SEQUENCE)
    return jax.lax.ppermute(x, SEQUENCE, [(i, i - hop) for i in range(hop, size)])


def _scores(grouped: jax.Array, keys: jax.Array, hop: int, constants: _Constants) -> jax.Array:
    """Scores [B, K, G, S, S] of queries and the keys after `hop` hops; -inf for an unseen key."""
    scores = _product("bqkgd,bskd->bkgqs", grouped, keys) * constants.scale
    rows = constants.rows
    is_seen = constants.is_seen[hop] if hop else rows[:, None] >= rows
    return jnp.where(is_seen, scores, constants.hidden)


def _grouped(x: jax.Array, key: jax.Array) -> jax.Array:
    """[B, S, H, D] as [B, S, K, G, D]."""
    return x.reshape(*x.shape[:2], key.shape[2], -1, x.shape[3])


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = at_least_float32(jnp.result_type(a, b))
    return jnp.einsum(equation, a, b, preferred_element_type=dtype)
