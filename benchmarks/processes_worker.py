"""One process of a job of `benchmarks.processes`."""

import os
import pathlib
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from jaxhet import testing


def _sum(rails: int) -> None:
    """Sums one number of each device, or of each device of a rail; raises if a sum is wrong."""
    mesh = Mesh(np.array(jax.devices()).reshape(-1, rails), ("x", "rail"))
    numbers = np.arange(mesh.size, dtype=np.float32)
    spec = P(("x", "rail"))
    x = jax.make_array_from_callback(
        numbers.shape, NamedSharding(mesh, spec), lambda index: numbers[index]
    )
    body = jax.shard_map(
        lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=spec, out_specs=P("rail")
    )
    total = np.asarray(jax.jit(body)(x).addressable_shards[0].data)
    sums = numbers.reshape(-1, rails).sum(0)
    np.testing.assert_array_equal(total, sums[jax.process_index() % rails])


def peer_sockets() -> int:
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


def _facts(request: Any) -> dict[str, float]:
    """Time at which the sum ("all" or "rails") is known, and what this process holds then."""
    _sum(jax.device_count() // len(jaxhet.islands()) if request == "rails" else 1)
    ready = time.monotonic()
    rollup = pathlib.Path("/proc/self/smaps_rollup").read_text()
    (pss,) = (line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:"))
    return {
        "ready": ready,
        "sockets": peer_sockets(),
        "threads": len(os.listdir("/proc/self/task")),
        "memory": int(pss) * 1024,
    }


if __name__ == "__main__":
    testing.serve(_facts)
