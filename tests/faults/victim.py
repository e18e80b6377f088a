"""victim.py STEPS [rails]: joins the job, compiles, runs exchanges, and says what it does next.

With `rails`, a rank exchanges only with the ranks in its place on the other islands.

Each line on stdout is `@ PHASE pid`; each step checks its own result, so that a wrong number is
never silent.
"""

import os
import sys
import time

import numpy as np


def say(phase: str) -> None:
    """Tells the test where this process is."""
    print(f"@ {phase} {os.getpid()}", flush=True)


def main() -> None:
    """Runs the steps."""
    say("connect")
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxhet

    jaxhet.initialize()
    rails = jax.device_count() // len(jaxhet.islands()) if "rails" in sys.argv else 1
    mesh = Mesh(np.array(jax.devices()).reshape(-1, rails), ("x", "rail"))
    n = mesh.shape["x"]
    shape = (mesh.size, 1 << 20)
    x = jax.make_array_from_callback(
        shape, NamedSharding(mesh, P(("x", "rail"))), lambda i: np.ones(shape, np.float32)[i]
    )

    def program(x: jax.Array, i: jax.Array) -> jax.Array:
        for k in range(40):  # enough to compile for about a second
            x = x + jnp.sin(x * k) * 0
        return jax.lax.psum(x * i, "x")

    specs = P(("x", "rail")), P()
    jitted = jaxhet.jit(jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=P("rail")))
    say("compile")
    for i in range(int(sys.argv[1])):
        out = jitted(x, float(i))
        value = np.asarray(out.addressable_shards[0].data)
        if not (value == n * i).all():
            print(f"WRONG number at step {i}: {value}", flush=True)
        say("run")
        time.sleep(0.01)
    print("finished", flush=True)


if __name__ == "__main__":
    main()
