"""One process of a job that connects processes when a program needs them.

`answer` has an action and the process that alone acts, or -1 for all of them.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from benchmarks.processes_worker import peer_sockets

_COLUMNS = 70_001  # more than an eager message
_AXES = {"rails": ("island",), "islands": ("rank",), "all": ("island", "rank")}


def _program(axes: tuple[str, ...]) -> tuple[Any, jax.Array]:
    """A sum over mesh axes, and its argument: each rank has its number."""
    devices = np.array(jax.devices()).reshape(len(jaxhet.islands()), -1)
    mesh = Mesh(devices, ("island", "rank"))
    whole = np.arange(mesh.size, dtype=np.float32)[:, None] * np.ones(_COLUMNS, np.float32)
    spec = P(("island", "rank"))
    x = jax.make_array_from_callback(
        whole.shape, NamedSharding(mesh, spec), lambda index: whole[index]
    )
    kept = [axis for axis in mesh.axis_names if axis not in axes]
    body = jax.shard_map(
        lambda a: jax.lax.psum(a, axes), mesh=mesh, in_specs=spec, out_specs=P(kept)
    )
    return jax.jit(body), x


def answer(action: str, process: int) -> tuple[int, Any]:
    """This process, and what `_act` returns; None if another process acts."""
    acts = process in (-1, jax.process_index())
    return jax.process_index(), _act(*action.split()) if acts else None


def _act(action: str, *names: str) -> Any:
    """Result of `sum NAME`, `compile NAME` or `count`."""
    if action == "count":
        return peer_sockets(), [p.process for p in jaxhet.paths() if p.transport]
    function, x = _program(_AXES[names[0]])
    if action == "compile":
        function.lower(x).compile()
        return [p.process for p in jaxhet.paths() if p.transport]
    return np.unique(np.asarray(function(x).addressable_shards[0].data)).tolist()
