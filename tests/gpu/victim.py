"""victim.py STEPS ELEMENTS LINKS LATE: joins the job and runs steps of exchanges, until one fails.

Process LATE comes to each step a second after the others, which wait for it in the meantime.

Lines on stdout: `@ run pid` before each step; `WRONG …` for a number that is neither right nor NaN.
After a failure: `caught <class>: <text>`, `poisoned …` for each kind of result that was waiting,
`device works` if the GPU still computes, `clean` before it ends as every program does.
"""

import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet

DTYPES = ("float32", "bfloat16", "float8_e4m3fn")  # the kinds of NaN differ


def say(text: str) -> None:
    """A line that comes at once."""
    print(text, flush=True)


def program(mesh: jax.sharding.Mesh, links: int) -> Any:
    """Sends every operand around the ring of all ranks, `links` times."""
    n = mesh.size
    ring = [(i, (i + 1) % n) for i in range(n)]

    def body(operands: dict[str, jax.Array], number: jax.Array) -> dict[str, jax.Array]:
        xs = {name: x * number.astype(x.dtype) for name, x in operands.items()}
        for _ in range(links):
            xs = {name: jax.lax.ppermute(x, "x", ring) for name, x in xs.items()}
            xs = jax.lax.optimization_barrier(xs)
        return xs

    specs = (P("x"), P())
    return jaxhet.jit(
        jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False)
    )


@jax.jit
def counts(values: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many values are NaN, and how many neither that nor `number`."""
    poisoned = jnp.isnan(values)
    return poisoned.sum(), (~poisoned & (values != number.astype(values.dtype))).sum()


def look(results: dict[str, jax.Array], number: int) -> bool:
    """Says what is wrong or NaN; returns whether all is right."""
    right = True
    for name, result in results.items():
        values = result.addressable_shards[0].data
        poisoned, wrong = map(int, counts(values, np.float32(number)))
        if wrong:
            say(f"WRONG {name}: {wrong} of {values.size} are not {number}")
        if poisoned:
            say(f"poisoned {name}: {poisoned} of {values.size}")
        right &= not poisoned
    return right


def run(steps: int, elements: int, links: int, late: int) -> None:
    """Runs steps; every result is looked at, that of a step that failed as well."""
    mesh = jaxhet.make_mesh({"x": -1})
    shape, sharding = (mesh.size * elements,), NamedSharding(mesh, P("x"))
    operands = {
        name: jax.jit(jnp.ones, static_argnums=(0, 1), out_shardings=sharding)(shape, name)
        for name in DTYPES
    }
    step = program(mesh, links)
    for i in range(steps):
        number = 1 + i % 4
        if jax.process_index() == late:
            time.sleep(1)
        results = step(operands, np.float32(number))
        say(f"@ run {os.getpid()}")
        try:
            jaxhet.block_until_ready(results)
        except jaxhet.JaxhetError:
            look_if_there(results, number)
            raise
        if not look(results, number):
            deadline = time.monotonic() + 10
            while jaxhet.last_error() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            raise jaxhet.last_error() or AssertionError("NaN without an error")


def look_if_there(results: dict[str, jax.Array], number: int) -> None:
    """Looks at results whose waiting failed, if JAX gives them."""
    try:
        look(results, number)
    except (RuntimeError, ValueError) as error:
        say(f"refused: {str(error).splitlines()[0]}")


def main() -> None:
    """Runs until a failure, and tries what a program can do after it."""
    jaxhet.initialize()
    try:
        run(*map(int, sys.argv[1:]))
    except jaxhet.JaxhetError as error:
        say(f"caught {type(error).__name__}: {error}")
        there = jax.local_devices()[0]
        if float(jax.device_put(np.arange(8, dtype=np.float32), there).sum()) == 28:
            say("device works")
        jaxhet.shutdown()
        say("clean")
        return
    say("finished")


if __name__ == "__main__":
    main()
