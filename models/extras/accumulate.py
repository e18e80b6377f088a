"""Gradients of a batch in parts, one after the other: the memory of one, one exchange for all."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxhet
from models.extras.dtypes import at_least_float32
from models.sharding import BATCH, constrain, free_axes


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """The number of parts of a batch, and the mesh axes over which gradients are summed last.

    `axes` split the batch and, in the usual case, cross islands: over them loss and gradients are
    summed once for a step. Parameters are whole over these axes while the parts are computed.
    Over the other axes that split the batch XLA sums the gradients of each part.
    """

    parts: int
    axes: tuple[str, ...] = ()

    def value_and_grad(
        self, loss: Callable[[Any, jax.Array], jax.Array], params: Any, tokens: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Loss and gradients of a batch; each predicted token counts alike.

        Args:
          loss: Mean loss over the tokens that it is given, from parameters and tokens.
          params: Parameters, a tree of arrays.
          tokens: Tokens [batch, positions + 1].

        Raises:
          ValueError: The batch can't be divided into the parts.
        """
        axes = free_axes()
        split = math.prod(axes[name] for name in BATCH if name in axes)
        if len(tokens) % (split * self.parts):
            raise ValueError(
                f"a batch of {len(tokens)} can't be divided into {self.parts} parts (--accumulate) "
                f"on a mesh {axes}: choose a multiple of {split * self.parts}."
            )

        def local(params: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
            if self.axes:  # gradients are then of this device's own tokens
                params = jax.tree.map(lambda x: jax.lax.pcast(x, self.axes, to="varying"), params)
            sums, count = self._sum(loss, params, tokens)
            if self.axes:
                sums, count = jax.lax.psum((sums, count), self.axes)
            loss_sum, gradients = sums
            return loss_sum / count, jax.tree.map(
                lambda x, own: (x / count).astype(own.dtype), gradients, params
            )

        if not self.axes:
            return local(params, tokens)
        return jax.shard_map(
            local, in_specs=(P(), P(self.axes)), out_specs=P(), axis_names=set(self.axes)
        )(params, tokens)

    def _sum(
        self, loss: Callable[[Any, jax.Array], jax.Array], params: Any, tokens: jax.Array
    ) -> tuple[tuple[jax.Array, Any], jax.Array]:
        """Sums over all predicted tokens, of the loss and of gradients, and their number."""

        def add(sums: Any, part: jax.Array) -> tuple[Any, None]:
            count = jnp.float32(part[:, 1:].size)
            means = jax.value_and_grad(loss)(params, part)
            weighted = (jax.tree.map(lambda x: x * count, means), count)
            return jax.tree.map(jnp.add, sums, weighted), None

        # Neighbours in different parts: each part lies on all devices that the batch is split over.
        parts = tokens.reshape(-1, self.parts, tokens.shape[1]).swapaxes(0, 1)
        parts = constrain(parts, "parts")
        shapes = jax.eval_shape(jax.value_and_grad(loss), params, parts[0])
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, at_least_float32(x.dtype)), (shapes, jnp.float32(0))
        )
        if self.axes:
            zeros = jax.tree.map(lambda x: jax.lax.pcast(x, self.axes, to="varying"), zeros)
        return jax.lax.scan(add, zeros, parts)[0]


def value_and_grad_of_shares(
    loss: Callable[[Any, jax.Array], jax.Array],
    parts: Mapping[str, int],
    params: Any,
    tokens: jax.Array,
    counts: jax.Array,
) -> tuple[jax.Array, Any]:
    """Loss and gradients of a batch in unequal shares, on the mesh of `jax.set_mesh`.

    Args:
      loss: Mean loss over the tokens that it is given, from parameters and tokens.
      parts: Number of parts of a microbatch, by name of an island or platform.
      params: Parameters, a tree of arrays.
      tokens: Tokens [shares, microbatches, rows, positions + 1], a share for each position of the
        axis `data`.
      counts: Number of microbatches of each share that are used.
    """

    def sums(params: Any, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        count = jnp.float32(part[:, 1:].size)
        return loss(params, part) * count, count

    return jaxhet.balanced_value_and_grad(sums, axis="data", parts=parts)(params, tokens, counts)
