"""Scripts that run on two islands of one process each."""

import json
from collections.abc import Sequence
from typing import Any

from tests.support.scripts import Ended, job, run

SET_UP = """
import json, os, sys, time
import jax, jax.numpy as jnp, numpy as np, jaxhet
from jax.sharding import NamedSharding, PartitionSpec as P
jaxhet.initialize()
me = jax.process_index()
mesh = jaxhet.make_mesh({"x": -1})
def put(value, spec=P("x")):
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda i: value[i])
ones = np.ones((mesh.size, 6), np.float32)
x = put(ones)
def over_islands(f, jit=jaxhet.jit, in_specs=P("x"), **options):
    body = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False)
    return jit(body, **options)
psum = lambda a: jax.lax.psum(a, "x")
def tell(**what): print("told:", json.dumps(what), flush=True)
"""


def run_both(body: str, **common: str) -> list[Ended]:
    """Runs a script on both."""
    return run(SET_UP + body, *job(2, **common))


def told(all_ended: Sequence[Ended]) -> list[dict[str, Any]]:
    """The values that each process gave to `tell`. All must have ended well."""
    found = []
    for ended in all_ended:
        assert ended.code == 0, ended.text
        lines = [line for line in ended.text.splitlines() if line.startswith("told: ")]
        assert lines, ended.text
        found.append({k: v for line in lines for k, v in json.loads(line[6:]).items()})
    return found
