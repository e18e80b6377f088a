"""A job that runs for days keeps little of the steps and programs that it is done with."""

import ast

from two_islands import run_both

_PROGRAMS = """
import collections, gc

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
jaxhet.shutdown()
"""

_STEPS = """
import gc, tracemalloc

step = over_islands(psum)

def bytes_after(steps):
    for _ in range(steps):
        jaxhet.block_until_ready(step(x))
    gc.collect()
    return tracemalloc.get_traced_memory()[0]

tracemalloc.start()
before = bytes_after(300)
print("bytes a step:", (bytes_after(300) - before) / 300, flush=True)
jaxhet.shutdown()
"""


def _told(script: str, what: str) -> list[str]:
    """The rest of the line behind `what`, in the output of each process."""
    texts = [each.text for each in run_both(script)]
    assert all(what in text for text in texts), texts
    return [text.partition(what)[2].splitlines()[0].strip() for text in texts]


def test_program_that_is_dropped_leaves_its_plan_alone() -> None:
    for kept in _told(_PROGRAMS, "kept:"):
        # Nothing says when an executable is gone, and with it the need for its plan. Programs as
        # JAX traced them are kept up to a limit (tests/python/test_islands.py).
        assert sorted(ast.literal_eval(kept)) == [
            "jaxhet._traced.jaxprs.Program",
            "jaxhet.compiler.exchange.Call",
            "jaxhet.compiler.exchange.ExchangeSpec",
            "jaxhet.compiler.exchange.Movement",
            "jaxhet.compiler.plan.Plan",
        ]


def test_step_leaves_nothing() -> None:
    assert max(float(grown) for grown in _told(_STEPS, "bytes a step:")) < 50
