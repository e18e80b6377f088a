"""A training program of two hosts, and its loss in NumPy."""

import numpy as np

PROGRAM = """
import jax, jax.numpy as jnp, jaxhet, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

jaxhet.initialize()
mesh = jaxhet.make_mesh({"data": -1})
rows = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
x = jax.make_array_from_callback((8, 3), NamedSharding(mesh, P("data")), lambda i: rows[i])

@jaxhet.jit
def step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - x[:, 0]) ** 2))(w)
    return w - 0.3 * gradient, loss

w = jnp.zeros(3)
for _ in range(20):
    w, loss = step(w, x)
addresses = {path.transport for path in jaxhet.paths()}
print("loss", float(loss), len(jaxhet.islands()), jax.device_count(), sorted(addresses))
jaxhet.shutdown()
"""


def expected() -> float:
    """The loss of the same steps, in NumPy."""
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
    w, loss = np.zeros(3), 0.0
    for _ in range(20):
        error = x @ w - x[:, 0]
        loss = float(np.mean(error**2))
        w = w - 0.3 * 2 * (x.T @ error) / len(x)
    return loss
