"""A reference for codecs, in float64: no shifts, no bits. See `jaxhet/compiler/codecs.py`."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

BLOCK = 32
# Codec -> exponent of the largest element, exponent of the unit of all elements, largest element.
_FORMATS = {"mxint8": (0, -6, 127 / 64), "mxint4": (0, -2, 7 / 4), "mxfp8": (8, -9, 448.0)}
_LEAST = 2.0**-126  # all decoded values are multiples
Floats = np.ndarray[Any, np.dtype[Any]]


def decoded(x: Floats, codec: str) -> Floats:
    """Rows [..., n] as float32 after encoding and decoding; each row has its own blocks."""
    wide = x.astype(np.float32).astype(np.float64)
    wide[np.abs(wide) < _LEAST] = 0  # subnormals
    if codec == "bf16":
        wide[np.abs(wide) < _LEAST * 2**7] = 0
        return (wide.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)) + np.float32(
            0
        )
    size = x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -size % BLOCK)]
    blocks = np.pad(wide, padding).reshape(*x.shape[:-1], -1, BLOCK)
    rounded = _rounded(blocks, codec).reshape(*x.shape[:-1], -1)[..., :size]
    return (rounded + 0.0).astype(np.float32)  # no -0


def _rounded(blocks: Floats, codec: str) -> Floats:
    largest, unit, most = _FORMATS[codec]
    biggest = np.max(np.abs(blocks), -1, keepdims=True)
    is_finite = np.isfinite(biggest)
    biggest = np.where(is_finite & (biggest > 0), biggest, _LEAST)
    exponents = np.frexp(biggest)[1] - 1 - largest
    scales = np.ldexp(1.0, np.maximum(exponents, -126 - unit))
    with np.errstate(invalid="ignore"):
        y = np.clip(blocks / scales, -most, most)
        y = (
            y.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
            if codec == "mxfp8"
            else np.clip(np.rint(y * 2.0**-unit) * 2.0**unit, -most, most)
        )
    return np.where(is_finite, y * scales, np.nan)


def summed(rows: Sequence[Floats], codec: str, dtype: Any = np.float32) -> Floats:
    """The sum of encoded rows, from the first to the last."""
    total, *rest = (decoded(row, codec) for row in rows)
    with np.errstate(invalid="ignore", over="ignore"):
        for row in rest:
            total = total + row
    return total.astype(dtype)


def drawn(seed: int, shape: tuple[int, int]) -> Floats:
    """Rows of float32: of all magnitudes, with zeros, -0, subnormals, outliers, NaN, infinities."""
    draw = np.random.default_rng(seed)
    rows, columns = shape
    x = draw.standard_normal(shape) * np.exp2(draw.integers(-140, 120, (rows, 1)))
    x *= np.exp2(draw.integers(-12, 2, shape))
    x[::3, ::BLOCK] *= 2.0**6  # an outlier in each block
    x[draw.random(shape) < 0.02] = -0.0
    x[draw.random(shape) < 0.01] = 1e-40
    x[1::7, : columns // 2] = 0
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    for place, value in enumerate((np.nan, np.inf, -np.inf, 3.4e38, -3.4e38)):
        x[place::50, place * 7 :: 97] = value
    return x


def same_bits(x: Floats, y: Floats) -> bool:
    """Whether two arrays are equal, NaNs at the same places."""
    numbers = ~np.isnan(y.astype(np.float64))
    return (
        x.dtype == y.dtype
        and x.shape == y.shape
        and np.array_equal(np.isnan(x.astype(np.float64)), ~numbers)
        and x[numbers].tobytes() == y[numbers].tobytes()
    )
