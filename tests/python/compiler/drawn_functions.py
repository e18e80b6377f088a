"""Functions without exchanges: the building blocks of random programs (`drawn_programs.py`)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
Function = Callable[[Array], Array]  # takes and gives f32[8, 8]

SIZE = 8
_SHAPE = (SIZE, SIZE)


def _symmetric(x: Array) -> Array:
    return x @ x.T + SIZE * jnp.eye(SIZE, dtype=x.dtype)


_AT = np.array([3, 3, 5])
FUNCTIONS: dict[str, Function] = {
    "sin": jnp.sin,
    "tanh": jnp.tanh,
    "exp": jnp.exp,
    "log1p": jnp.log1p,
    "gelu": jax.nn.gelu,
    "erf": jax.scipy.special.erf,
    "cbrt": jnp.cbrt,
    "rsqrt": lambda x: lax.rsqrt(x * x + 1),
    "power": lambda x: x**3,
    "round": jnp.round,
    "remainder": lambda x: x % 0.7,
    "arctan2": lambda x: jnp.arctan2(x, x + 1),
    "softmax": jax.nn.softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(x) + x,
    "variance": lambda x: x * jnp.var(x, axis=0),
    "flip": jnp.flip,
    "roll": lambda x: jnp.roll(x, 3, 1),
    "transpose": lambda x: x.T + 0,
    "sort": jnp.sort,
    "sort_down": lambda x: jnp.sort(x, descending=True),
    "argsort": lambda x: x[jnp.argsort(x[0])],
    "top_k": lambda x: lax.top_k(x, SIZE)[0],
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "cumprod": lambda x: jnp.cumprod(x, 0),
    "cummax": lambda x: lax.cummax(x, 1),
    "at_add": lambda x: x.at[_AT].add(x[:3]),
    "at_max": lambda x: x.at[_AT].max(x[:3]),
    "at_min": lambda x: x.at[_AT].min(x[:3]),
    "at_mul": lambda x: x.at[_AT].mul(x[:3]),
    "product": lambda x: x @ x,
    "product_turned": lambda x: x.T @ x,
    "outer": lambda x: jnp.outer(x[0], x[:, 0]),
    "convolve": lambda x: jnp.convolve(x.reshape(-1), x[0], "same").reshape(_SHAPE),
    "sum_pool": lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME"),
    "fft": lambda x: jnp.fft.fft(x).real,
    "uniform": lambda x: x + jax.random.uniform(jax.random.key(0), x.shape),
    "cholesky": lambda x: jnp.linalg.cholesky(_symmetric(x)),
    "qr": lambda x: jnp.linalg.qr(x)[0],
    "r": lambda x: jnp.linalg.qr(x)[1],
    "eigh": lambda x: jnp.linalg.eigh(_symmetric(x))[1],
    "svd": lambda x: jnp.linalg.svd(x)[0],
    "lu": lambda x: lax.linalg.lu(x)[0],
    "solve": lambda x: jnp.linalg.solve(_symmetric(x), x),
    "triangular_solve": lambda x: jax.scipy.linalg.solve_triangular(_symmetric(x), x),
    "scan": lambda x: lax.scan(lambda c, row: (c * 0.5 + row, c), x[0], x)[1],
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, y: y * 0.7 + jnp.sin(y) * i, x),
    "while": lambda x: lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y * y + 1, x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda y: y @ y, x),
}
# Without a gradient, or with one that some version of JAX lacks.
_NO_GRADIENT = frozenset(
    ("argsort", "at_max", "at_min", "at_mul", "eigh", "lu", "qr", "r", "svd", "while")
)
SMOOTH = tuple(name for name in FUNCTIONS if name not in _NO_GRADIENT)

# Functions written in two ways, as for kernels of two vendors. The last one is not row by row.
TWO_WAYS: tuple[tuple[Function, Function], ...] = (
    (jnp.tanh, lambda x: 1 - 2 / (jnp.exp(2 * x) + 1)),
    (jax.nn.softmax, lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)),
    (lambda x: jnp.einsum("bi,bj->bj", x, x), lambda x: x.sum(1, keepdims=True) * x),
    (jnp.square, lambda x: lax.fori_loop(0, 2, lambda i, y: y * x, jnp.ones_like(x))),
    (jnp.sort, lambda x: -jnp.sort(-x, descending=True)),
    (lambda x: x @ x.T @ x, lambda x: (x[:, None] * x[None]).sum(-1) @ x),
)
