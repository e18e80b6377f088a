"""Cross-entropy that holds the logits of a few positions at a time.

The gradient is computed along with the loss, so that no chunk's logits are kept or computed again
(as in Liger, arXiv:2410.10989). Shapes: B batch, T positions, E embed, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from models.extras.dtypes import at_least_float32
from models.sharding import SEQUENCE, constrain, free_axes, token_axes, token_spec


@dataclasses.dataclass(frozen=True)
class Head:
    """Computation of logits: `dtype` of the product, and number of positions at a time (0: all).

    The loss converts them to float32, except float64.
    """

    dtype: DTypeLike
    chunk: int = 0


def project(x: jax.Array, kernel: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Logits [B, T, V], float32; float64 if `dtype` is.

    Args:
      x: Activations [B, T, E].
      kernel: Matrix [E, V].
      dtype: Type of the product.
    """
    logits = jnp.einsum("bte,ev->btv", x, kernel, preferred_element_type=dtype)
    return constrain(logits, "logits").astype(at_least_float32(dtype))


def cross_entropy(head: Head, x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats, given logits that are x times kernel.

    Args:
      head: Type of the logits, and number of positions that are computed at a time.
      x: Activations [B, T, E].
      kernel: Matrix [E, V].
      labels: Tokens [B, T] to predict.
    """
    if 0 < head.chunk < x.shape[1] // free_axes().get(SEQUENCE, 1):
        return _chunked(head, x, kernel, labels)
    return _sum(head, x, kernel, labels) / labels.size


def _sum(head: Head, x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    """The sum over positions whose label is not negative."""
    logits = project(x, kernel, head.dtype)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return jnp.sum(jnp.where(labels < 0, 0, losses))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(head: Head, x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    """`cross_entropy`, chunk by chunk of each device's own tokens."""

    def local(axes: tuple[str, ...], x: jax.Array, kernel: jax.Array, labels: jax.Array) -> Any:
        losses = jax.lax.map(
            lambda chunk: _sum(head, chunk[0], kernel, chunk[1]), _divide(head.chunk, x, labels)
        )
        return _over(axes, jnp.sum(losses))

    return _by_device(local, lambda _: P(), x, kernel, labels) / labels.size


def _forward(head: Head, x: jax.Array, kernel: jax.Array, labels: jax.Array) -> Any:
    count = labels.size

    def local(axes: tuple[str, ...], x: jax.Array, kernel: jax.Array, labels: jax.Array) -> Any:
        if axes:  # each device has its own kernel, so its gradient is summed once, after all chunks
            kernel = jax.lax.pcast(kernel, axes, to="varying")

        def step(by_kernel: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> Any:
            x, labels = chunk
            loss, pull_back = jax.vjp(lambda x, kernel: _sum(head, x, kernel, labels), x, kernel)
            by_x, added = pull_back(jnp.ones_like(loss))
            return by_kernel + added.astype(by_kernel.dtype), (loss, by_x)

        start = jnp.zeros_like(kernel, at_least_float32(kernel.dtype))
        by_kernel, (losses, by_x) = jax.lax.scan(step, start, _divide(head.chunk, x, labels))
        by_x = by_x.swapaxes(0, 1).reshape(len(x), -1, x.shape[-1])[:, : x.shape[1]]
        by_kernel = (by_kernel / count).astype(kernel.dtype)
        return *_over(axes, (jnp.sum(losses) / count, by_kernel)), (by_x / count).astype(x.dtype)

    loss, by_kernel, by_x = _by_device(local, lambda own: (P(), P(), own), x, kernel, labels)
    return loss, (by_x, by_kernel)


def _backward(head: Head, gradients: Any, scale: jax.Array) -> Any:
    by_x, by_kernel = gradients
    return (by_x * scale).astype(by_x.dtype), (by_kernel * scale).astype(by_kernel.dtype), None


_chunked.defvjp(_forward, _backward)


def _by_device(
    local: Callable[..., Any],
    outputs: Callable[[P], Any],
    x: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
) -> Any:
    """Runs `local` on each device, with the mesh axes that split tokens, x, kernel and labels.

    `outputs` maps the spec of a device's tokens to the specs of the results.
    """
    free = free_axes()
    axes, own = token_axes(free), token_spec(free)
    if not axes:
        return local((), x, kernel, labels)
    return jax.shard_map(
        partial(local, axes), in_specs=(own, P(), own), out_specs=outputs(own), axis_names={*axes}
    )(x, kernel, labels)


def _over(axes: tuple[str, ...], sums: Any) -> Any:
    return jax.lax.psum(sums, axes) if axes else sums


def _divide(size: int, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Chunks of x and labels, the chunk's axis first; label -1 where no position is left."""
    missing = -x.shape[1] % size
    x = jnp.pad(x, ((0, 0), (0, missing), (0, 0)))
    labels = jnp.pad(labels, ((0, 0), (0, missing)), constant_values=-1)
    parts = (x.reshape(len(x), -1, size, x.shape[-1]), labels.reshape(len(x), -1, size))
    return parts[0].swapaxes(0, 1), parts[1].swapaxes(0, 1)
