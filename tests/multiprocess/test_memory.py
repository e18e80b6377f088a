"""A job that runs for days keeps little of the steps and programs that it is done with."""

import ast

from two_islands import run_both

_SCRIPT = """
import collections, gc, tracemalloc, weakref
import jax.extend
from jax.sharding import Mesh, NamedSharding

def compile_and_drop(k):
    def step(a):
        moved = psum(a * k) + jax.lax.all_gather(a, "x", tiled=True)
        return jax.lax.ppermute(moved, "x", [(0, 1), (1, 0)])
    jaxhet.block_until_ready(over_islands(step)(x))

def kept():
    gc.collect()
    names = (f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())
    return collections.Counter(name for name in names if name.startswith("jaxhet."))

compile_and_drop(0)
before = kept()
for k in range(1, 4):
    compile_and_drop(k)
print("kept:", dict(kept() - before), flush=True)

step = over_islands(psum)

def bytes_after(steps):
    for _ in range(steps):
        jaxhet.block_until_ready(step(x))
    gc.collect()
    return tracemalloc.get_traced_memory()[0]

tracemalloc.start()
before = bytes_after(300)
print("bytes a step:", (bytes_after(300) - before) / 300, flush=True)

there = NamedSharding(Mesh(jax.devices()[::-1], "x"), P("x"))
jax.block_until_ready(jax.device_put(x, there))
client = weakref.ref(jax.devices()[0].client)
jaxhet.shutdown()
del mesh, x, step, there
jax.extend.backend.clear_backends()  # JAX does so when a program ends
gc.collect()
print("client is gone:", client() is None, flush=True)
"""


def _told(text: str, what: str) -> str:
    """The rest of the line behind `what`."""
    assert what in text, text
    return text.partition(what)[2].splitlines()[0].strip()


def test_program_that_is_dropped_leaves_its_plan_alone_and_a_step_nothing() -> None:
    for ended in run_both(_SCRIPT):
        # Nothing says when an executable is gone, and with it the need for its plan. Programs as
        # JAX traced them are kept up to a limit (tests/python/test_islands.py).
        assert sorted(ast.literal_eval(_told(ended.text, "kept:"))) == [
            "jaxhet._traced.jaxprs.Program",
            "jaxhet.compiler.exchange.Call",
            "jaxhet.compiler.exchange.ExchangeSpec",
            "jaxhet.compiler.exchange.Movement",
            "jaxhet.compiler.plan.Plan",
        ]
        assert float(_told(ended.text, "bytes a step:")) < 50
        assert _told(ended.text, "client is gone:") == "True"  # else gRPC waits 2 s for it at exit
