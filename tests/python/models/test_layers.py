import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.configs import CONFIGS, Config
from models.layers import Attention, RMSNorm, SwiGLU, rotate

TINY = CONFIGS["tiny"]


def f64(x: Any) -> Any:
    return np.asarray(x, np.float64)


def random(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def naive_attention(layer: Attention, x: jax.Array, config: Config) -> np.ndarray:
    """Multi-head attention written out head by head in float64."""
    weights = [f64(p.kernel[...]) for p in (layer.query, layer.key, layer.value)]
    query, key, value = (np.einsum("bte,ehd->bthd", f64(x), w) for w in weights)
    positions = jnp.arange(x.shape[1])
    query, key = (
        f64(rotate(jnp.asarray(v, jnp.float32), positions, theta=config.rope_theta))
        for v in (query, key)
    )
    shared = config.query_heads // config.kv_heads
    mixed: Any = np.zeros_like(query)
    for head in range(config.query_heads):
        k, v = key[:, :, head // shared], value[:, :, head // shared]
        scores = np.einsum("btd,bsd->bts", query[:, :, head], k) / config.head_dim**0.5
        scores[:, *np.triu_indices(x.shape[1], 1)] = -np.inf
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        mixed[:, :, head] = np.einsum("bts,bsd->btd", weight / weight.sum(-1, keepdims=True), v)
    return np.einsum("bthd,hde->bte", mixed, f64(layer.out.kernel[...]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rms_norm_has_unit_mean_square_and_keeps_dtype(dtype):
    x = (100 * random((3, 7, 32))).astype(dtype)
    y = RMSNorm(32, epsilon=1e-5)(x)
    assert y.dtype == dtype
    np.testing.assert_allclose(jnp.mean(jnp.square(y.astype(jnp.float32)), -1), 1, rtol=2e-2)


def test_rotate_depends_on_relative_position_only():
    query, key = random((1, 1, 1, 8), 0), random((1, 1, 1, 8), 1)

    def score(at_query: int, at_key: int) -> jax.Array:
        turned = (
            rotate(x, jnp.array([at]), theta=10_000.0)
            for x, at in ((query, at_query), (key, at_key))
        )
        return jnp.vdot(*turned)

    np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_rotate_keeps_length_and_position_zero():
    x = random((2, 5, 3, 8))
    y = rotate(x, jnp.arange(5), theta=10_000.0)
    np.testing.assert_allclose(jnp.linalg.norm(y, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(y[:, 0], x[:, 0])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_naive_attention(kv_heads):
    config = dataclasses.replace(TINY, kv_heads=kv_heads)
    layer = Attention(config, rngs=nnx.Rngs(0))
    x = random((2, 7, config.embed))
    np.testing.assert_allclose(layer(x), naive_attention(layer, x, config), rtol=1e-3, atol=1e-6)


def test_grouped_query_attention_equals_multi_head_with_repeated_keys():
    grouped = Attention(TINY, rngs=nnx.Rngs(0))
    full = Attention(dataclasses.replace(TINY, kv_heads=TINY.query_heads), rngs=nnx.Rngs(1))
    shared = TINY.query_heads // TINY.kv_heads
    full.query, full.out = grouped.query, grouped.out
    full.key.kernel[...] = jnp.repeat(grouped.key.kernel[...], shared, axis=1)
    full.value.kernel[...] = jnp.repeat(grouped.value.kernel[...], shared, axis=1)
    x = random((2, 7, TINY.embed))
    np.testing.assert_allclose(grouped(x), full(x), rtol=1e-5, atol=1e-7)


def test_swiglu_equals_its_formula():
    layer = SwiGLU(TINY, rngs=nnx.Rngs(0))
    gate, up, down = (f64(p.kernel[...]) for p in (layer.gate, layer.up, layer.down))
    x = f64(random((2, 3, TINY.embed)))
    expected = (x @ gate / (1 + np.exp(-(x @ gate))) * (x @ up)) @ down
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), expected, rtol=1e-3, atol=1e-7)


def test_config_that_does_not_fit_says_what_to_change():
    with pytest.raises(ValueError, match="make query_heads a multiple of kv_heads"):
        dataclasses.replace(TINY, kv_heads=3)
    with pytest.raises(ValueError, match="head_dim 7 is odd"):
        dataclasses.replace(TINY, head_dim=7)
    with pytest.raises(ValueError, match="not one of float32, bfloat16, float16"):
        dataclasses.replace(TINY, dtype="float8")
