"""Programs of `jax.export` and serialized executables whose exchanges look alike."""

import importlib.util

import pytest
from two_islands import SET_UP

from tests.support.scripts import Ended, job, run

TOOLS = """
from jax.experimental import serialize_executable
values = [jnp.sin, jnp.cos, lambda a: jnp.exp(a) * 2, jnp.tanh]
CROSS = {
    "psum": (psum, 2),
    "ppermute": (lambda v: jax.lax.ppermute(v, "x", [(0, 1), (1, 0)]), 1),
}

def program(kind, order=range(4)):
    # Sums of values that cross on one line, and the right result.
    cross, factor = CROSS[kind]
    def step(a):
        moved = {}
        for k in order: moved[k] = cross(values[k](a))
        return sum((k + 1) * moved[k] for k in range(4))
    return over_islands(step, jax.jit), sum((k + 1) * factor * f(1.0) for k, f in enumerate(values))

def exported(f): return jaxhet.jit(jax.export.export(f)(x).call)

def exported_bytes(f):
    return jaxhet.jit(jax.export.deserialize(jax.export.export(f)(x).serialize()).call)

def exported_twice(f):
    inner = jax.export.export(f)(x)
    return jaxhet.jit(lambda a: 3 * inner.call(a) - 2 * inner.call(a * 0 + 1))

def executable(f):
    compiled = f.lower(x).compile()
    return serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))

def tell(load, kind, order=range(4)):
    f, want = program(kind, order)
    try:
        got = np.asarray(load(f)(x).addressable_data(0))
    except Exception as e:
        print("told:", load.__name__, kind, type(e).__name__, e, flush=True)
        return
    outcome = "right" if np.allclose(got, want) else f"wrong: {got} is not {want}"
    print("told:", load.__name__, kind, outcome, flush=True)
"""
KINDS = ("psum", "ppermute")
LOADS = ("exported", "exported_twice", "executable")
if importlib.util.find_spec("flatbuffers"):  # by which jax.export writes bytes
    LOADS += ("exported_bytes",)


def _run(body: str) -> list[Ended]:
    return run(SET_UP + TOOLS + body, *job(2, JAXHET_DEADLINE_S="20"), timeout_s=200)


def test_exchanges_that_look_alike_are_right_however_the_program_is_loaded() -> None:
    cases = [(load, kind) for load in LOADS for kind in KINDS]
    for ended in _run("\n".join(f'tell({load}, "{kind}")' for load, kind in cases)):
        assert ended.code == 0, ended.text
        told = [line for line in ended.text.splitlines() if line.startswith("told: ")]
        assert told == [f"told: {load} {kind} right" for load, kind in cases]


@pytest.mark.parametrize("load", ["exported", "executable"])
def test_exchanges_in_another_order_on_one_island_are_refused(load: str) -> None:
    for ended in _run(f'tell({load}, "ppermute", range(4) if me == 0 else [1, 0, 2, 3])'):
        told = ended.text.partition("told: ")[2]
        assert told.startswith(f"{load} ppermute "), ended.text
        assert "right" not in told.splitlines()[0], ended.text
        assert "wrong" not in told.splitlines()[0], ended.text
        assert "PlanMismatchError" in told
        assert "is the first that differs" in told
