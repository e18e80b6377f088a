"""One process of a job of `benchmarks.processes`."""

import os
import pathlib
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxhet import testing


def _sum_over_all() -> None:
    """Sums one number of each device; raises if the sum is wrong."""
    mesh = Mesh(np.array(jax.devices()), "x")
    numbers = np.arange(mesh.size, dtype=np.float32)
    x = jax.make_array_from_callback(
        numbers.shape, NamedSharding(mesh, P("x")), lambda index: numbers[index]
    )
    body = jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    total = np.asarray(jax.jit(body)(x).addressable_shards[0].data)
    np.testing.assert_array_equal(total, [numbers.sum()])


def tcp_sockets() -> int:
    """Connected TCP sockets of this process; listening ones do not count."""
    connected = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path("/proc/self/net", table).read_text().splitlines()[1:]:
            state, inode = line.split()[3], line.split()[9]
            if state == "01":  # TCP_ESTABLISHED, linux/tcp_states.h
                connected.add(f"socket:[{inode}]")
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}") in connected
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return count


def _facts(_request: Any) -> dict[str, float]:
    """Time at which the sum is known, and what this process holds then."""
    _sum_over_all()
    ready = time.monotonic()
    rollup = pathlib.Path("/proc/self/smaps_rollup").read_text()
    (pss,) = (line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:"))
    return {
        "ready": ready,
        "sockets": tcp_sockets(),
        "threads": len(os.listdir("/proc/self/task")),
        "memory": int(pss) * 1024,
    }


if __name__ == "__main__":
    testing.serve(_facts)
