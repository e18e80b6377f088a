"""Boundaries of documents in packed rows, so that attention stays inside a document."""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp


class Documents(NamedTuple):
    """The documents in rows of tokens [B, T], packed one after another.

    Attributes:
      numbers: the number of a token's document in its row, int32 [B, T], as `data.segments`.
      positions: the token's position in its document, int32 [B, T].
    """

    numbers: jax.Array
    positions: jax.Array

    @classmethod
    def of(cls, tokens: jax.Array, end: int) -> Self:
        """The documents in tokens [B, T], each of which ends with the token `end`."""
        ends = (tokens == end).astype(jnp.int32)
        numbers = jnp.cumsum(ends, axis=1, dtype=jnp.int32) - ends
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        is_first = jnp.diff(numbers, axis=1, prepend=0) > 0
        starts = jax.lax.cummax(jnp.where(is_first, places, 0), axis=1)
        return cls(numbers, places - starts)

    def mask(self) -> jax.Array:
        """Mask bool [B, T, T]: a query sees the keys of its document up to its own position."""
        is_same = self.numbers[:, :, None] == self.numbers[:, None, :]
        return is_same & jnp.tri(self.numbers.shape[1], dtype=bool)
