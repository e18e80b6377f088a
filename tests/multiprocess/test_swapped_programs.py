"""Programs that differ in one object are told apart, or refused; data is never swapped."""

import pathlib
from collections.abc import Collection

import jax
import jax.numpy as jnp
import pairs
import pytest
from two_islands import SET_UP

from jaxhet._traced import jaxprs
from jaxhet._traced.jaxprs import Program
from jaxhet._traced.words import first_difference
from tests.support.commands import python
from tests.support.scripts import Ended, job, run


def _program(name: str, c: int) -> Program:
    jax.clear_caches()
    jaxpr = jax.make_jaxpr(pairs.PAIRS[name](c))(jnp.ones((1, 6)))
    return jaxprs.describe("jit(f)", jaxpr, [], lambda eqn: "train.py:7")


def test_there_are_many_pairs() -> None:
    assert len(pairs.PAIRS) >= 35
    assert set(pairs.REFUSED) <= set(pairs.PAIRS)


@pytest.mark.parametrize("name", pairs.PAIRS)
def test_pair_is_told_apart_or_refused(name: str) -> None:
    two, three = _program(name, 2), _program(name, 3)
    is_refused = first_difference(two.held, three.held) is not None
    assert (two.digest == three.digest) == (name in pairs.REFUSED)
    assert two.digest != three.digest or is_refused


@pytest.mark.parametrize("name", [name for name in pairs.PAIRS if name not in pairs.REFUSED])
def test_program_that_is_made_again_is_the_same(name: str) -> None:
    one, again = _program(name, 2), _program(name, 2)
    assert one.digest == again.digest


_WORDS = """
import sys
sys.path[:0] = ["tests/multiprocess", "."]
import jax, jax.numpy as jnp, numpy as np, pairs
from jaxhet._traced import jaxprs
@jax.custom_vjp
def f(x): return jnp.sin(x)
f.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
@jax.custom_jvp
def h(x): return jnp.cos(x)
h.defjvp(lambda p, t: (jnp.cos(p[0]), -jnp.sin(p[0]) * t[0]))
class Scale:
    def __init__(self, by): self.by, self.names, self.array = by, {"a", "b", "c"}, np.arange(3)
    def __call__(self, v): return v * len(self.names)
def step(x):
    y = jax.checkpoint(f)(x) + h(x)
    y = jax.lax.scan(lambda c, k: (c + jax.nn.softmax(k * c), None), y, jnp.arange(3.0))[0]
    y = y + jax.random.normal(jax.random.key(0), y.shape) + jnp.fft.fft(y).real
    jax.debug.callback(lambda v: None, y)
    y = y + jax.lax.stop_gradient(jax.pure_callback(Scale(step), x, jax.lax.stop_gradient(x)))
    return jax.lax.platform_dependent(y, cpu=jnp.sin, cuda=jnp.cos).sum()
gradient = lambda c: lambda a: jax.value_and_grad(step)(a[0])
for name, make in {**pairs.PAIRS, "gradient of a step": gradient}.items():
    jaxpr = jax.make_jaxpr(make(2))(jnp.ones((1, 6)))
    print(name, jaxprs.describe("f", jaxpr, [], lambda e: "").listing())
"""


def test_words_are_the_same_in_every_process() -> None:
    """In processes that were started, not forked: they have other addresses and orders of sets."""
    outputs = {python("-c", _WORDS, env={"PYTHONHASHSEED": str(seed)}).stdout for seed in (1, 2)}
    assert not any("0x" in output for output in outputs)
    first, *others = (output.splitlines() for output in outputs)
    assert not [
        pair for other in others for pair in zip(first, other, strict=True) if pair[0] != pair[1]
    ]


# Calls both programs of each pair, on island 1 of a swapped pair in the other order. Both programs
# of a pair in `lowered` are lowered before the first call.
_CALLS = """
sys.path.insert(0, {folder!r})
import pairs
def partitioned(f):
    rows = NamedSharding(mesh, P("x"))
    total = lambda a: jnp.broadcast_to(jnp.sum(f(a), axis=0), (1, 6))
    return jaxhet.jit(total, out_shardings=NamedSharding(mesh, P()))
for name in {names!r}:
    manual = lambda f: over_islands(lambda a: psum(f(a)))
    over = partitioned if name == pairs.PARTITIONED else manual
    functions = {{c: over(pairs.PAIRS[name](c)) for c in (2, 3)}}
    order = (2, 3) if me == 0 or not {is_swapped} else (3, 2)
    for c in order:
        try:
            if name in {lowered!r}:
                for each in order: functions[each].lower(x)
            got = np.asarray(jaxhet.block_until_ready(functions[c](x)).addressable_data(0))
            is_right = (got == c * mesh.size).all()
            print(f"{{name}}:", "right" if is_right else f"wrong {{got}}", flush=True)
        except jaxhet.UsageError as e: print(f"{{name}}: refused", e, flush=True)
        except jaxhet.JaxhetError as e: print(f"{{name}}: told apart", e, flush=True)
"""


def _calls(names: Collection[str], is_swapped: bool, lowered: Collection[str] = ()) -> list[Ended]:
    folder = str(pathlib.Path(__file__).parent)
    script = _CALLS.format(folder=folder, names=[*names], is_swapped=is_swapped, lowered=[*lowered])
    envs = job(2, JAXHET_DEADLINE_S="3")
    return run(SET_UP + script, *envs, timeout_s=200)


# Pairs whose programs run: all that are refused, and some of each way to hold an object.
_RUN = (
    *sorted(pairs.REFUSED),
    *("frozen dataclass", "generator", "np.vectorize", "custom_jvp", "custom_vjp", "custom_root"),
    *("object as a parameter", "piece for a platform", "kernel of Pallas", "exported function"),
    *("callback in a loop", "random bits of one's own", pairs.PARTITIONED),
)


def test_pairs_in_one_order_have_the_right_values_or_are_refused() -> None:
    for ended in _calls(_RUN, is_swapped=False):
        assert ended.code == 0, ended.text
        lines = ended.text.splitlines()
        for name in _RUN:
            counts = tuple(
                sum(line.startswith(f"{name}: {what}") for line in lines)
                for what in ("right", "refused")
            )
            assert counts == ((1, 1) if name in pairs.REFUSED else (2, 0)), (name, ended.text)


@pytest.mark.parametrize("name", [pairs.PARTITIONED, "np.frompyfunc", "object as a parameter"])
def test_swapped_pair_is_told_apart(name: str) -> None:
    for ended in _calls([name], is_swapped=True):
        assert f"{name}: told apart" in ended.text, ended.text
        assert "wrong" not in ended.text
        assert "PlanMismatchError" in ended.text or "is the first that differs" in ended.text


def test_swapped_pair_that_nothing_tells_apart_is_refused_by_its_second_program() -> None:
    """Only calls before a process has traced both programs can mix data."""
    names = sorted(pairs.REFUSED)
    lowered = names[::2]
    for ended in _calls(names, is_swapped=True, lowered=lowered):
        assert ended.code == 0, ended.text
        for name in names:
            told = [line for line in ended.text.splitlines() if line.startswith(f"{name}: ")]
            kinds = [line.removeprefix(f"{name}: ").split()[0] for line in told]
            assert kinds == (["refused"] * 2 if name in lowered else ["wrong", "refused"]), told
            assert "refused this process has two programs jit(<lambda>) that differ in" in told[1]
            assert "Give the two functions different names" in told[1]
        assert "parameter callback of io_callback at multiprocess/pairs.py:" in ended.text
