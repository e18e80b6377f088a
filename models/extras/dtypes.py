"""Types of arrays by name, and the type of sums."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# Types by the name that the command line uses.
DTYPES = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "float64": jnp.float64,  # tells rounding from errors; only with JAX_ENABLE_X64
}


def at_least_float32(dtype: DTypeLike) -> Any:
    """The type of sums, norms, softmax and rotary angles: float64 for float64, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


def check_dtypes(*names: str | None) -> None:
    """Refuses float64 where JAX would compute in float32 without a word.

    Args:
      names: Names in `DTYPES`, or None.

    Raises:
      ValueError: A name is float64, and JAX's 64-bit types are off.
    """
    if "float64" in names and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
        raise ValueError("float64 needs JAX's 64-bit types: set JAX_ENABLE_X64=1.")
