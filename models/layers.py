"""The layers of a LLaMA: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes in docstrings: B batch, T positions, E embed, H query heads, K key and value heads, D head
dimension, F hidden.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.configs import DTYPES, Config
from models.sharding import constrain

# Standard deviation of every weight matrix at the start, as in GPT-2 and LLaMA.
_INIT_STDDEV = 0.02


def linear(
    config: Config,
    inputs: int | Sequence[int],
    outputs: int | Sequence[int],
    *,
    stddev: float = _INIT_STDDEV,
    dtype: DTypeLike | None = None,
    rngs: nnx.Rngs,
) -> nnx.LinearGeneral:
    """A matrix without bias from the last axes of x (sizes `inputs`) to axes of sizes `outputs`.

    `dtype` is what it computes in, if not what the rest of the model does.
    """
    count = 1 if isinstance(inputs, int) else len(inputs)
    return nnx.LinearGeneral(
        inputs,
        outputs,
        axis=tuple(range(-count, 0)),
        use_bias=False,
        dtype=dtype or DTYPES[config.dtype],
        kernel_init=nnx.initializers.normal(stddev),
        rngs=rngs,
    )


def start_values(
    shape: Sequence[int], *, stddev: float = _INIT_STDDEV, rngs: nnx.Rngs
) -> jax.Array:
    """The values of matrices at the start, for a layer that holds its own."""
    return nnx.initializers.normal(stddev)(rngs.params(), tuple(shape), jnp.float32)


def residual_stddev(config: Config) -> float:
    """Start value for matrices that write to the residual stream: its variance stays near one.

    GPT-2 (Radford et al., 2019), section 2.3: scale by 1/sqrt(number of residual layers).
    """
    return _INIT_STDDEV / (2 * config.layers) ** 0.5


class RMSNorm(nnx.Module):
    """Divides by the root mean square of the last axis, in float32; scales (arXiv:1910.07467)."""

    def __init__(self, size: int, *, epsilon: float) -> None:
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., E] to the same shape and dtype."""
        y = x.astype(jnp.float32)
        y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.epsilon)
        return (y * self.scale[...]).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array, *, theta: float) -> jax.Array:
    """Rotary position embedding (arXiv:2104.09864) of x [B, T, H, D] at integer positions [T].

    Pair i of a head is (x[i], x[i + D/2]), as in Hugging Face's checkpoints; it turns by
    position * theta^(-2i/D) radians. Angles are float32; the result has x's dtype.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention of query [B, T, H, D] to key and value [B, T, K, D]: [B, T, H, D].

    Each key and value head serves H/K neighbouring query heads. Scores and weights are float32.
    (`jax.nn.dot_product_attention` has no float16 on CPU.)
    """
    batch, positions, heads, size = query.shape
    grouped = query.reshape(batch, positions, key.shape[2], -1, size)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones((positions, positions), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores * size**-0.5, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bkgts,bskd->btkgd", weights.astype(value.dtype), value)
    return mixed.reshape(batch, positions, heads, size)


class Attention(nnx.Module):
    """Causal grouped-query attention (arXiv:2305.13245) with rotary positions."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        project = partial(linear, config, rngs=rngs)
        queries = (config.query_heads, config.head_dim)
        keys = (config.kv_heads, config.head_dim)
        self.query = project(config.embed, queries)
        self.key = project(config.embed, keys)
        self.value = project(config.embed, keys)
        self.out = project(queries, config.embed, stddev=residual_stddev(config))
        self.theta = config.rope_theta

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, E] to [B, T, E]; position t sees positions 0 … t."""
        positions = jnp.arange(x.shape[1])
        query, key, value = (constrain(p(x), "heads") for p in (self.query, self.key, self.value))
        query, key = (rotate(x, positions, theta=self.theta) for x in (query, key))
        return self.out(constrain(attend(query, key, value), "heads"))


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
