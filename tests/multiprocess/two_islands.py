"""Scripts that run on two islands of one process each."""

from tests.support.scripts import Ended, job, run

SET_UP = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np, jaxhet
from jax.sharding import NamedSharding, PartitionSpec as P
jaxhet.initialize()
me = jax.process_index()
mesh = jaxhet.make_mesh({"x": -1})
ones = np.ones((mesh.size, 6), np.float32)
x = jax.make_array_from_callback(ones.shape, NamedSharding(mesh, P("x")), lambda i: ones[i])
def over_islands(f, jit=jaxhet.jit, in_specs=P("x"), **options):
    body = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False)
    return jit(body, **options)
psum = lambda a: jax.lax.psum(a, "x")
"""


def run_both(body: str, **common: str) -> list[Ended]:
    """Runs a script on both."""
    return run(SET_UP + body, *job(2, **common))
