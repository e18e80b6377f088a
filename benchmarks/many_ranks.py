"""How many threads, sockets and descriptors does a process have in a job of many ranks?

    python -m benchmarks.many_ranks [--islands 8] [--transports socket]

Islands of one process that sees two GPUs, so that many ranks run on few GPUs. Process 0 prints its
counts after it has joined and after each program: a sum over rails, one over all ranks, an
all-to-all, and a permute between other places. Every process checks all results.
"""

import argparse
import collections
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from jaxhet.testing import free_port

_ROWS = 64
_BOTH = ("island", "gpu")


def _say(what: str) -> None:
    names: collections.Counter[str] = collections.Counter()
    for thread in pathlib.Path("/proc/self/task").iterdir():
        names[(thread / "comm").read_text().strip()] += 1
    own = sum(count for name, count in names.items() if name.startswith("jaxhet"))
    links = [os.readlink(file) for file in pathlib.Path("/proc/self/fd").iterdir() if file.exists()]
    sockets = sum(link.startswith("socket:") for link in links)
    if jax.process_index() == 0:
        print(f"{what}: {own} threads of jaxhet, {sockets} sockets, {len(links)} descriptors")


def worker() -> None:
    """Joins, and runs all programs."""
    begin = time.monotonic()
    jaxhet.initialize()
    _say(f"joined in {time.monotonic() - begin:.1f} s")
    n = jax.device_count()
    mesh = jaxhet.make_mesh({"island": n // 2, "gpu": 2})
    blocks = np.arange(n * _ROWS * n, dtype=np.float32).reshape(n, _ROWS, n)
    rows, sharding = blocks.reshape(-1, n), NamedSharding(mesh, P(_BOTH))
    x = jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)
    shifted = [(i, (i + 3) % n) for i in range(n)]
    programs: dict[str, tuple[Callable[[Any], Any], P, np.ndarray]] = {
        "sum over rails": (
            lambda a: lax.psum(a, "island"),
            P("gpu"),
            blocks.reshape(n // 2, 2, _ROWS, n).sum(0).reshape(-1, n),
        ),
        "sum": (lambda a: lax.psum(a, _BOTH), P(), blocks.sum(0)),
        "all-to-all": (
            lambda a: lax.all_to_all(a, _BOTH, 1, 0, tiled=True),
            P(_BOTH),
            blocks.transpose(2, 0, 1).reshape(-1, 1),
        ),
        "permute": (
            lambda a: lax.ppermute(a, _BOTH, shifted),
            P(_BOTH),
            np.roll(blocks, 3, 0).reshape(-1, n),
        ),
    }
    for name, (function, spec, expected) in programs.items():
        y = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(_BOTH), out_specs=spec))(x)
        for shard in y.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index], name)
        _say(name)
    jaxhet.shutdown()


def main() -> None:
    """Starts the processes; the exit code is 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--islands", type=int, default=8)
    parser.add_argument("--transports", default="", help="transports, with commas; default: all")
    args = parser.parse_args()
    shared = {
        **os.environ,
        "JAX_NUM_CPU_DEVICES": "2",
        "JAXHET_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAXHET_JOB_SECRET": os.urandom(32).hex(),
        "JAXHET_NUM_PROCESSES": str(args.islands),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **({"JAXHET_TRANSPORTS": args.transports} if args.transports else {}),
    }
    command = [sys.executable, "-c", "from benchmarks import many_ranks; many_ranks.worker()"]
    processes = [
        subprocess.Popen(
            command, env={**shared, "JAXHET_PROCESS_ID": str(i), "JAXHET_ISLAND": f"island{i}"}
        )
        for i in range(args.islands)
    ]
    codes = [process.wait() for process in processes]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
