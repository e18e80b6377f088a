"""The layers of LLaMA and Qwen: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes in docstrings: B batch, T positions, S positions of a cache, E embed, H query heads, K key
and value heads, D head dimension, F hidden.
"""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.attention import attend
from models.configs import DTYPES, Config, RopeScaling
from models.extras.documents import Documents
from models.extras.dtypes import at_least_float32
from models.extras.ring import ring_attend
from models.sharding import SEQUENCE, constrain, free_axes

# Standard deviation of every weight matrix at the start, as in GPT-2 and LLaMA.
_INIT_STDDEV = 0.02


def linear(
    config: Config,
    inputs: int | Sequence[int],
    outputs: int | Sequence[int],
    *,
    bias: bool = False,
    stddev: float = _INIT_STDDEV,
    rngs: nnx.Rngs,
) -> nnx.LinearGeneral:
    """A matrix from the last axes of x to new axes.

    Args:
      config: Config of the model, for the types.
      inputs: Sizes of the last axes of x.
      outputs: Sizes of the new axes.
      bias: Whether a bias is added.
      stddev: Standard deviation of the values at the start.
      rngs: Source of the values at the start.
    """
    count = 1 if isinstance(inputs, int) else len(inputs)
    return nnx.LinearGeneral(
        inputs,
        outputs,
        axis=tuple(range(-count, 0)),
        use_bias=bias,
        dtype=DTYPES[config.dtype],
        param_dtype=DTYPES[config.param_dtype],
        kernel_init=nnx.initializers.normal(stddev),
        rngs=rngs,
    )


def start_values(
    config: Config, shape: Sequence[int], *, stddev: float = _INIT_STDDEV, rngs: nnx.Rngs
) -> jax.Array:
    """The values of matrices at the start, for a layer that holds its own.

    Args:
      config: Config of the model, for the type.
      shape: Shape of the array.
      stddev: Standard deviation of the values.
      rngs: Source of the values.
    """
    dtype = DTYPES[config.param_dtype]
    return nnx.initializers.normal(stddev)(rngs.params(), tuple(shape), dtype)


def residual_stddev(config: Config) -> float:
    """Start value for matrices that write to the residual stream: its variance stays near one.

    GPT-2 (Radford et al., 2019), section 2.3: scale by 1/sqrt(number of residual layers).
    """
    return _INIT_STDDEV / (2 * config.layers) ** 0.5


class RMSNorm(nnx.Module):
    """Divides by the root mean square of the last axis; scales (arXiv:1910.07467).

    The arithmetic is float32 at least.
    """

    def __init__(self, size: int, *, epsilon: float, dtype: DTypeLike = jnp.float32) -> None:
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., E] to the same shape and dtype."""
        y = x.astype(at_least_float32(x.dtype))
        y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.epsilon)
        return (y * self.scale[...]).astype(x.dtype)


def norm(config: Config, size: int) -> RMSNorm:
    """A norm of vectors of this size."""
    return RMSNorm(size, epsilon=config.norm_epsilon, dtype=DTYPES[config.param_dtype])


def rotate(
    x: jax.Array, positions: jax.Array, *, theta: float, scaling: RopeScaling | None = None
) -> jax.Array:
    """Rotary position embedding (arXiv:2104.09864).

    Pair i of a head is (x[i], x[i + D/2]), as in Hugging Face's checkpoints; it turns by
    position * theta^(-2i/D) radians, less for slow pairs with `scaling`. Angles are float32
    at least; the result has x's dtype.

    Args:
      x: Queries or keys [B, T, H, D].
      positions: Positions [T] or [B, T].
      theta: Base of the angles.
      scaling: Scaling of slow pairs for longer texts, or None.
    """
    half, dtype = x.shape[-1] // 2, at_least_float32(x.dtype)
    frequencies = theta ** (-jnp.arange(half, dtype=dtype) / half)
    if scaling:
        frequencies = _scaled(frequencies, scaling)
    angles = positions.astype(dtype)[..., None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _scaled(frequencies: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Frequencies as `RopeScaling` describes; `share` is how much of a frequency stays."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    share = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (share + (1 - share) / scaling.factor)


# Keys and values [B, S, K, D] of the positions that were computed already.
Past = tuple[jax.Array, jax.Array]


class Attention(nnx.Module):
    """Causal grouped-query attention (arXiv:2305.13245) with rotary positions."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        project = partial(linear, config, rngs=rngs)
        queries = (config.query_heads, config.head_dim)
        keys = (config.kv_heads, config.head_dim)
        self.query = project(config.embed, queries, bias=config.qkv_bias)
        self.key = project(config.embed, keys, bias=config.qkv_bias)
        self.value = project(config.embed, keys, bias=config.qkv_bias)
        self.out = project(queries, config.embed, stddev=residual_stddev(config))
        self.query_norm = norm(config, config.head_dim) if config.qk_norm else None
        self.key_norm = norm(config, config.head_dim) if config.qk_norm else None

    def __call__(self, x: jax.Array, documents: Documents | None = None) -> jax.Array:
        """[B, T, E] to [B, T, E]; position t sees positions 0 … t, of its own document only."""
        positions = jnp.arange(x.shape[1]) if documents is None else documents.positions
        query, key, value = self._heads(x, positions)
        if SEQUENCE in free_axes():
            mixed = ring_attend(query, key, value)
        else:
            mask = None if documents is None else documents.mask()
            mixed = attend(query, key, value, implementation=self.config.attention, mask=mask)
        return self.out(constrain(mixed, "heads"))

    def decode(self, x: jax.Array, past: Past, positions: jax.Array) -> tuple[jax.Array, Past]:
        """Attention of new positions to earlier ones and to themselves.

        Args:
          x: Activations [B, T, E] of the new positions.
          past: Keys and values of all positions, to which the ones of x are added.
          positions: Positions [B, T] of x.

        Returns:
          The result of `__call__` for x, and the new past.
        """
        query, *new = self._heads(x, positions)
        rows = jnp.arange(len(x))[:, None]
        keys, values = (old.at[rows, positions].set(v) for old, v in zip(past, new, strict=True))
        mask = jnp.arange(keys.shape[1]) <= positions[:, :, None]
        mixed = attend(query, keys, values, implementation=self.config.attention, mask=mask)
        return self.out(constrain(mixed, "heads")), (keys, values)

    def _heads(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, T, H, D], keys and values [B, T, K, D]."""
        query, key, value = (constrain(p(x), "heads") for p in (self.query, self.key, self.value))
        if self.query_norm and self.key_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        turn = partial(rotate, theta=self.config.rope_theta, scaling=self.config.rope_scaling)
        return turn(query, positions), turn(key, positions), value


class SwiGLU(nnx.Module):
    """Gated feed-forward layer (arXiv:2002.05202): down(silu(gate x) * up x)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        project = partial(linear, config, rngs=rngs)
        self.gate = project(config.embed, config.hidden)
        self.up = project(config.embed, config.hidden)
        self.down = project(config.hidden, config.embed, stddev=residual_stddev(config))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, E] to [B, T, E]."""
        return self.down(constrain(jax.nn.silu(self.gate(x)) * self.up(x), "hidden"))
