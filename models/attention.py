"""Causal attention, by the implementation that the devices have: cuDNN's on NVIDIA GPUs, or XLA's.

Shapes in docstrings: B batch, T positions of queries, S positions of keys, H query heads, K key and
value heads, D head dimension.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import jaxhet
from models.extras.dtypes import at_least_float32

ATTENTIONS = ("auto", "xla", "cudnn")


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    implementation: str = "auto",
    mask: jax.Array | None = None,
) -> jax.Array:
    """Attention of query [B, T, H, D] to key and value [B, S, K, D]: [B, T, H, D].

    Each key and value head serves H/K neighbouring query heads. Scores and weights are float32, or
    float64 for float64.

    Args:
      query: the queries.
      key: the keys.
      value: the values, of the keys' shape.
      implementation: one of `ATTENTIONS`; `auto` is `choose`'s.
      mask: bool [B or 1, T, S], which keys a query sees; XLA's implementation. Without it query t
        sees keys 0 … t.
    """
    if implementation == "auto":
        implementation = choose(query.dtype, query.shape[1], query.shape[3])
    if mask is not None:
        implementation = "xla"
    if implementation == "xla" and query.dtype in (jnp.float16, jnp.float64):
        return _attend_in_einsums(query, key, value, mask)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=None if mask is None else mask[:, None],
        is_causal=mask is None,
        implementation="cudnn" if implementation == "cudnn" else "xla",
    )


def choose(dtype: DTypeLike, positions: int, head_dim: int) -> str:
    """`cudnn` if all of the job's GPUs are NVIDIA's and cuDNN can do it, `xla` otherwise.

    cuDNN's flash attention is for 16-bit floats and heads of 8, 16, … 128 (256 on some GPUs); JAX
    takes its gradient for an even number of positions only. The whole job decides, so that all
    islands trace the same program.

    Args:
      dtype: Type of queries, keys and values.
      positions: Number of positions of a text.
      head_dim: Size of a head.
    """
    has_size = head_dim % 8 == 0 and head_dim <= 128 and positions % 2 == 0
    fits = jnp.dtype(dtype).itemsize == 2 and has_size
    return "cudnn" if fits and all_nvidia() else "xla"


def all_nvidia() -> bool:
    """Whether all devices of the job are NVIDIA GPUs."""
    try:
        return all(island.platform == "cuda" for island in jaxhet.islands())
    except jaxhet.UsageError:  # not in a job
        return all(device.device_kind.startswith("NVIDIA") for device in jax.devices())


def _attend_in_einsums(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """The same attention, in einsums.

    `jax.nn.dot_product_attention` by XLA has no float16 on CPU, and its softmax is float32 always.
    """
    batch, positions, heads, size = query.shape
    grouped = query.reshape(batch, positions, key.shape[2], -1, size)
    dtype = at_least_float32(query.dtype)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=dtype)
    if mask is None:
        mask = jnp.tril(jnp.ones((1, positions, positions), bool))
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores * size**-0.5, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bkgts,bskd->btkgd", weights.astype(value.dtype), value)
    return mixed.reshape(batch, positions, heads, size)
