"""One process of `benchmarks.one_island`: a training loop that knows nothing of jaxhet.

Arguments: address of process 0, number of processes, this process, devices; then a socket, over
which it is asked for a number of steps. It answers with the wall time and the CPU time of each.
"""

import sys
import time
from multiprocessing.connection import Client

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import plain_llama


def main() -> None:
    """Trains on rows that are split over all devices, as often as it is asked to."""
    address, processes, process, devices, owner = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(address, int(processes), int(process))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    size = plain_llama.Size(layers=2, embed=192, heads=4, hidden=384, vocab=512, rows=split)
    init = jax.jit(lambda: plain_llama.init(size, jax.random.key(0)), out_shardings=everywhere)
    step = jax.jit(lambda *a: plain_llama.train_step(size, *a), donate_argnums=0)
    text = np.arange(8 * 65, dtype=np.int32).reshape(8, 65) % 251
    tokens = jax.make_array_from_callback(text.shape, split, lambda index: text[index])
    state = init()
    with Client(owner, "AF_UNIX") as connection:
        while (steps := connection.recv()) is not None:
            times = []
            for _ in range(steps):
                wall, cpu = time.perf_counter(), time.process_time()
                state, loss = step(state, tokens)
                loss.block_until_ready()
                times.append((time.perf_counter() - wall, time.process_time() - cpu))
            connection.send(times)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
