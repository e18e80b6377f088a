"""The codecs of `jaxhet/compiler/codecs.py` for arrays of a program; they give the same numbers.

Products with powers of two are exact, so that all islands encode and decode alike.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK = 32
_NAN_SCALE = 255
# Codec -> exponent of the largest element, exponent of an element's unit, largest element.
_FORMATS = {"mxint8": (0, 6, 127), "mxint4": (0, 2, 7), "mxfp8": (8, 0, 448)}


class Encoded(NamedTuple):
    """An encoded array: elements, and the scales of its blocks (none with bf16)."""

    elements: jax.Array
    scales: jax.Array | None


def encode(x: jax.Array, codec: str) -> Encoded:
    """Encodes an array of floats of any shape.

    Blocks lie along the last dimension if its size is a multiple of 32; else in the flat array,
    with zeros behind it.
    """
    x = _without_subnormals(x.astype(jnp.float32), 8 if codec == "bf16" else 1)
    if codec == "bf16":
        return Encoded(lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16), None)
    largest, unit, most = _FORMATS[codec]
    blocks = _in_blocks(x)
    magnitude = lax.bitcast_convert_type(blocks, jnp.int32) & 0x7FFF_FFFF
    exponent = jnp.max(magnitude, -1) >> 23
    least = (9 if codec == "mxfp8" else unit) + 1
    scale = jnp.maximum(exponent - largest, least)
    # 2^unit / scale, whose exponent fits a float32 for all scales.
    factor = lax.bitcast_convert_type((254 + unit - scale) << 23, jnp.float32)[..., None]
    y = jnp.clip(blocks * factor, -most, most)
    if codec == "mxfp8":
        elements = lax.bitcast_convert_type(_on_e4m3(y).astype(jnp.float8_e4m3fn), jnp.uint8)
    else:
        elements = jnp.round(y).astype(jnp.int8)
    if codec == "mxint4":
        low, high = jnp.split(elements.astype(jnp.uint8) & 15, 2, -1)
        elements = low | (high << 4)
    scale = jnp.where(exponent == 255, _NAN_SCALE, scale).astype(jnp.uint8)
    return Encoded(elements, scale)


def decode(encoded: Encoded, codec: str, shape: tuple[int, ...]) -> jax.Array:
    """The float32s of an encoded array of that shape."""
    elements, scale = encoded
    if scale is None:
        bits = elements.astype(jnp.uint32) << 16
        return lax.bitcast_convert_type(bits, jnp.float32)
    _, unit, _ = _FORMATS[codec]
    if codec == "mxint4":
        elements = jnp.concatenate([elements & 15, elements >> 4], -1)
        elements = (elements.astype(jnp.int32) ^ 8) - 8
    if codec == "mxfp8":
        elements = lax.bitcast_convert_type(elements, jnp.float8_e4m3fn)
    exponent = scale.astype(jnp.int32) - unit
    factor = lax.bitcast_convert_type(exponent << 23, jnp.float32)[..., None]
    y = elements.astype(jnp.float32) * factor
    y = jnp.where(y == 0, 0.0, y)  # -0
    y = jnp.where((scale == _NAN_SCALE)[..., None], jnp.nan, y)
    if _has_own_blocks(shape):
        return y.reshape(shape)
    return y.reshape(-1)[: math.prod(shape)].reshape(shape)


def _has_own_blocks(shape: tuple[int, ...]) -> bool:
    return bool(shape) and shape[-1] > 0 and shape[-1] % _BLOCK == 0


def _in_blocks(x: jax.Array) -> jax.Array:
    if not _has_own_blocks(x.shape):
        x = x.reshape(-1)
        x = jnp.pad(x, (0, -x.size % _BLOCK))
    return x.reshape(*x.shape[:-1], x.shape[-1] // _BLOCK, _BLOCK)


def _on_e4m3(y: jax.Array) -> jax.Array:
    """Rounds to numbers of E4M3, ties to even (NVIDIA's conversion rounds to float16 first)."""
    exponent = jnp.maximum(lax.bitcast_convert_type(y, jnp.int32) >> 23 & 255, 127 - 6)
    step = lax.bitcast_convert_type((exponent - 3) << 23, jnp.float32)
    inverse = lax.bitcast_convert_type((254 + 3 - exponent) << 23, jnp.float32)
    return jnp.round(y * inverse) * step


def _without_subnormals(x: jax.Array, least: int) -> jax.Array:
    """The array, with zeros in place of numbers whose biased exponent is below `least`."""
    magnitude = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFF_FFFF
    return jnp.where(magnitude >= least << 23, x, 0.0)
