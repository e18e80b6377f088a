"""Numbers of equations, and digests that tell programs apart on every platform."""

import functools
import importlib
import pathlib
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer
from jax.extend import core
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from jaxhet._jax import platforms
from jaxhet._traced import jaxprs
from jaxhet._traced.jaxprs import Program


def _program_of(f: Callable[..., Any], *args: Any) -> Program:
    return jaxprs.describe("jit(f)", jax.make_jaxpr(f)(*args), [], lambda eqn: "train.py:7")


def _digest(f: Callable[..., Any], *args: Any) -> str:
    return _program_of(f, *(args or (jnp.ones(3),))).digest


# --- digests ---


class _Scale:
    def __init__(self, by: float):
        self.by = np.float32(by)

    def __call__(self, v: np.ndarray) -> np.ndarray:
        return v * self.by


_KEYS = jax.random.key(2), jax.random.key(3)


def _callback(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: jax.pure_callback(function, x, x)


def test_equal_programs_have_equal_digests() -> None:
    def make() -> Callable[..., Any]:
        inner = jax.jit(lambda x: jnp.sin(x) * 2)
        return lambda x: inner(x) + inner(x + 1)

    assert _digest(make()) == _digest(make())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x * 2, lambda x: x * 3),
        (lambda x: x * 0.0, lambda x: x * -0.0),
        (lambda x: x * np.float32(np.inf), lambda x: x * np.float32(-np.inf)),
        (lambda x: x + np.arange(3.0), lambda x: x + np.arange(3.0)[::-1].copy()),
        (lambda x: x + jnp.arange(3.0), lambda x: x + jnp.arange(1.0, 4.0)),
        (jnp.sin, jnp.cos),
        (lambda x: x - jnp.sin(x), lambda x: jnp.sin(x) - x),
        (jnp.sort, lambda x: jnp.sort(x, descending=True)),
        (lambda x: x.astype(jnp.bfloat16), lambda x: x.astype(jnp.float16)),
        (jax.jit(jnp.sin), jax.jit(jnp.tan)),
        (
            lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0],
            lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=4)[0],
        ),
        (
            lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
            lambda x: jax.lax.cond(x[0] > 0, jnp.cos, jnp.sin, x),
        ),
        (lambda x: jnp.dot(x, x), lambda x: jnp.dot(x, x, precision="highest")),
        (lambda x: x.at[0].apply(lambda v: v * 2), lambda x: x.at[0].apply(lambda v: v * 3)),
        (
            lambda x: jax.random.uniform(_KEYS[0], x.shape),
            lambda x: jax.random.uniform(_KEYS[1], x.shape),
        ),
        (_callback(lambda v: v * 2), _callback(lambda v: v * 3)),
    ],
    ids=[
        "literal",
        "sign of zero",
        "sign of infinity",
        "numpy constant",
        "jax constant",
        "primitive",
        "order of operands",
        "parameter",
        "dtype",
        "inner function",
        "length",
        "branches",
        "precision",
        "scatter",
        "key",
        "code of a callback",
    ],
)
def test_digest_differs_for_another(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    assert _digest(one) != _digest(other)


def test_words_of_a_function_do_not_depend_on_the_folder_of_its_program(
    tmp_path: pathlib.Path,
) -> None:
    texts = set()
    for folder in ("first", "second"):
        file = tmp_path / folder / "train.py"
        file.parent.mkdir()
        file.write_text("double = lambda v: v * 2\n")
        held: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(file.read_text(), str(file), "exec"), held)
        texts.add(jaxprs.describe_value(held["double"])[0])
    assert len(texts) == 1
    assert next(iter(texts)).startswith("__main__.<lambda> train.py:1:")


def test_digest_differs_for_another_sharding_and_not_for_other_source_lines() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    jaxpr = jax.make_jaxpr(jnp.sin)(jnp.ones(3))

    def digest(spec: P, line: str) -> str:
        return jaxprs.describe("f", jaxpr, [NamedSharding(mesh, spec)], lambda eqn: line).digest

    assert digest(P("x"), "a.py:1") == digest(P("x"), "b.py:2") != digest(P(), "a.py:1")


class _Keeps(_Scale):
    @functools.cached_property
    def twice(self) -> np.float32:
        return self.by * 2

    def __hash__(self) -> int:
        self._hash = hash(str(self.by))  # another one in each process
        return self._hash


def test_what_an_object_keeps_of_its_own_computations_does_not_count() -> None:
    def digest(by: float, *, is_used: bool) -> str:
        scale = _Keeps(by)
        if is_used:
            assert (scale.twice, hash(scale)) == (by * 2, scale._hash)
        return _digest(lambda x: jax.pure_callback(scale, x, x))

    assert digest(2, is_used=True) == digest(2, is_used=False) != digest(3, is_used=True)


def test_what_a_callback_that_only_raises_reads_does_not_count() -> None:
    def fail(text: bytes, *, is_error: bool) -> Callable[[np.ndarray], np.ndarray]:
        def raises(v: np.ndarray) -> np.ndarray:
            raise ValueError(text, v)

        def maybe(v: np.ndarray) -> np.ndarray:
            if len(text) > v.size:
                raise ValueError(text, v)
            return v

        return raises if is_error else maybe

    def digests(*, is_error: bool) -> set[str]:
        return {_digest(_callback(fail(text, is_error=is_error))) for text in (b"a", b"b")}

    assert len(digests(is_error=True)) == 1
    assert len(digests(is_error=False)) == 2


def test_a_jaxpr_in_a_parameter_may_keep_traced_values() -> None:
    solve = core.Primitive("solve")  # a primitive such as one of Lineax
    solve.def_abstract_eval(lambda aval, **_: aval)

    def digest(function: Callable[..., Any]) -> str:
        def program(x: jax.Array) -> Any:
            kept = jax.make_jaxpr(lambda y: function(x, y))(x)
            assert any(isinstance(const, Tracer) for const in kept.consts)
            return solve.bind(x, static=(kept,))

        return _digest(program)

    assert digest(jnp.add) == digest(jnp.add) != digest(jnp.multiply)


def test_listing_has_a_line_for_each_equation_with_its_source() -> None:
    lines = _program_of(lambda x: jnp.sin(x) * 2, jnp.ones(3)).listing().splitlines()
    assert lines[1:] == [
        "arguments ()",
        "in a0:f32[3]",
        "e0: f32[3] = sin a0\ttrain.py:7",
        "e1: f32[3] = mul e0 2.0:f32[]\ttrain.py:7",
        "out e1",
    ]


def test_long_listing_is_cut_and_ends_by_a_digest_of_the_rest() -> None:
    def many(x: jax.Array, last: float) -> jax.Array:
        for _ in range(100):
            x = x * 2
        return x * last

    one, other = (_program_of(lambda x, k=k: many(x, k), jnp.ones(3)) for k in (3.0, 4.0))
    cut = one.listing(most_bytes=1000)
    assert len(cut) < 1200
    assert "more lines, digest" in cut.splitlines()[-1]
    assert cut != other.listing(most_bytes=1000)
    assert one.listing().count("mul") == 101


# --- numbers ---


def test_label_has_the_number_the_depth_and_the_first_use() -> None:
    def f(x: jax.Array) -> Any:
        a = x @ x  # e0
        b = jnp.sin(x)  # e1
        c = a @ b  # e2
        return c, b * 2, jax.jit(lambda v: v @ v)(c) + 1  # e3, e4, e5

    jaxpr = jax.make_jaxpr(f)(jnp.ones((2, 2)))
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == [
        "dot_general",
        "sin",
        "dot_general",
        "mul",
        "jit",
        "add",
    ]
    assert jaxprs.labels(jaxpr) == ["e0d1u1", "e1d0u1", "e2d2u2", "e3d0", "e4d2", "e5d3"]
    assert jaxprs.argument_labels(jaxpr) == ["d0u0"]


# --- pieces that differ on purpose ---


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the platform of this process."""

    def choose(name: str) -> None:
        monkeypatch.setattr(platforms, "expected_platform", lambda: name)

    return choose


def _declared(**functions: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: jnp.sum(jaxhet.per_platform(**functions)(x, 3) * 2)


def _flipped(x: jax.Array, n: int) -> jax.Array:
    for _ in range(3):
        x = jnp.flip(jnp.flip(x))
    return x


def _in_a_loop(f: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a loop. JAX moves loop-invariant code out of the loop."""

    def total(x: jax.Array, *args: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda y, _: (y * f(y, *args), None), x, None, length=3)[0])

    return jax.grad(total)


_TRANSFORMS = pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        jax.grad,
        lambda f: jax.grad(jax.checkpoint(f)),
        _in_a_loop,
        lambda f: _in_a_loop(jax.checkpoint(f)),
    ],
    ids=[
        "value",
        "gradient",
        "gradient with remat",
        "loop",
        "loop with remat",
    ],
)


@_TRANSFORMS
@pytest.mark.parametrize(
    "cuda",
    [_flipped, lambda x, n: jnp.ones_like(x) * n, lambda x, n: jnp.ones(3)],
    ids=["longer", "an argument is not used", "no argument is used"],
)
def test_functions_of_platforms_may_differ_and_shift_no_number(
    transform: Callable[..., Any], cuda: Callable[..., Any], platform: Callable[[str], None]
) -> None:
    digests, labels = set(), set()
    for name in ("cpu", "cuda"):
        platform(name)
        step = transform(_declared(cpu=lambda x, n: jnp.sin(x) * n, cuda=cuda))
        digests.add(_digest(step))
        labels.add(tuple(jaxprs.labels(jax.make_jaxpr(step)(jnp.ones(3)))))
    assert len(digests) == len(labels) == 1


@_TRANSFORMS
def test_pieces_of_other_functions_are_other_programs(transform: Callable[..., Any]) -> None:
    """Even if only the function of another platform differs."""

    def scaled(by: float) -> Callable[..., Any]:
        return lambda x, n: x * by

    pieces = [{"cpu": scaled(2)}, {"cpu": scaled(3)}, {"cpu": scaled(2), "cuda": scaled(3)}]
    assert len({_digest(transform(_declared(**functions))) for functions in pieces}) == 3


@_TRANSFORMS
def test_pieces_of_other_arguments_are_other_programs(transform: Callable[..., Any]) -> None:
    piece = jaxhet.per_platform(jnp.multiply, cuda=jnp.add)

    def step(takes_first: bool) -> Callable[..., Any]:
        def f(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.sum(piece(w, x if takes_first else y) * x * y)

        return f

    args = (jnp.ones(3),) * 3
    one, two = (_digest(transform(step(takes_first)), *args) for takes_first in (True, False))
    assert one != two


def test_declared_pieces_of_other_shapes_are_other_programs(
    platform: Callable[[str], None],
) -> None:
    def longer(x: jax.Array, n: int) -> jax.Array:
        return jnp.concatenate([x, x])

    digests = set()
    for name in ("cpu", "cuda"):
        platform(name)
        digests.add(_digest(_declared(cpu=lambda x, n: x, cuda=longer)))
    assert len(digests) == 2


def test_piece_may_hold_devices_and_meshes() -> None:
    """Their words describe a sharding, and are the same in every process."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    held = NamedSharding(mesh, P("x")), mesh, jax.devices()[0]

    def make() -> Callable[..., Any]:
        return lambda x, n: x if held else n

    (digest,) = {_digest(_declared(cpu=make())) for _ in range(2)}
    words, _ = jaxprs.describe_value(make())
    assert "mesh {'x': 1} of [0]" in words
    assert "0x" not in words
    assert digest


def test_per_platform_gives_values_and_gradients() -> None:
    piece = jaxhet.per_platform(cpu=lambda x, n: (jnp.sin(x) * n, n + 1))
    x = jnp.arange(3.0)
    np.testing.assert_allclose(jax.jit(lambda x: piece(x, 3)[0])(x), 3 * np.sin(x), rtol=1e-6)
    gradient = jax.grad(lambda x: piece(x * 2, jnp.int32(3))[0].sum())
    np.testing.assert_allclose(gradient(x), 6 * np.cos(2 * x), rtol=1e-6)
    remat = jax.grad(jax.checkpoint(lambda x: piece(x, 3)[0].sum()))
    np.testing.assert_allclose(remat(x), 3 * np.cos(x), rtol=1e-6)
    one_by_one = jax.vmap(jax.grad(lambda x: piece(x, 3)[0]))
    np.testing.assert_allclose(one_by_one(x), 3 * np.cos(x), rtol=1e-6)


def test_second_derivative_of_a_piece_is_refused() -> None:
    piece = jaxhet.per_platform(cpu=jnp.sin)
    with pytest.raises(jaxhet.UsageError, match="has no second derivative"):
        jax.grad(jax.grad(piece))(1.0)


def _loss(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: jnp.sum(f(x, w) ** 2)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.vmap(jax.vmap(jax.grad(_loss(f), 1), (0, None)), (None, 0), 1),
        lambda f: jax.grad(lambda x, w: jnp.sum(jax.vmap(_loss(f), (0, None))(x, w[0]))),
        lambda f: jax.grad(
            lambda x, w: jnp.sum(jax.lax.fori_loop(0, 3, lambda _, y: f(y, w[0]), x[0]))
        ),
        lambda f: jax.grad(
            lambda x, w: jax.lax.cond(x.sum() > 0, _loss(f), _loss(jnp.dot), x[0], w[0])
        ),
        lambda f: jax.grad(
            jax.checkpoint(
                lambda x, w: _loss(f)(x[0], w[0]), policy=jax.checkpoint_policies.dots_saveable
            )
        ),
    ],
    ids=[
        "vmap of grad",
        "grad of vmap",
        "loop",
        "branch",
        "policy",
    ],
)
def test_piece_is_transformed_as_its_function_is(transform: Callable[..., Any]) -> None:
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) * jnp.arange(4.0) + jnp.cumsum(x, 1)

    x, w = (jax.random.normal(jax.random.key(i), (2, 4, 4)) for i in range(2))
    expected = jax.jit(transform(function))(x, w)
    for found in (
        transform(jaxhet.per_platform(function)),
        jax.jit(transform(jaxhet.per_platform(function))),
    ):
        np.testing.assert_allclose(found(x, w), expected, rtol=1e-4, atol=1e-4)


def test_per_platform_works_in_shard_map() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    piece = jaxhet.per_platform(cpu=lambda x: jnp.sin(x) * 2)
    f = jax.shard_map(
        lambda x: jax.lax.psum(piece(x), "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
    )
    x = jnp.arange(3.0)
    np.testing.assert_allclose(jax.jit(f)(x), 2 * np.sin(x), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x), 2 * np.cos(x), rtol=1e-6)


def test_piece_takes_keys_and_trees() -> None:
    piece = jaxhet.per_platform(cpu=lambda tree: jax.random.normal(tree["key"], tree["x"].shape))
    sampled = jax.jit(piece)({"key": jax.random.key(1), "x": jnp.ones(3)})
    np.testing.assert_array_equal(sampled, jax.random.normal(jax.random.key(1), (3,)))


@pytest.mark.parametrize("is_hidden", [False, True])
def test_piece_that_uses_a_traced_array_from_outside_is_refused(is_hidden: bool) -> None:
    @jax.jit
    def step(x: jax.Array) -> Any:
        y = x * 2
        holder = types.SimpleNamespace(y=y)

        class Hidden:
            def __call__(self, z: jax.Array) -> jax.Array:
                return z + holder.y

        return jaxhet.per_platform(Hidden() if is_hidden else lambda z: z + y)(x)

    with pytest.raises(jaxhet.UsageError, match="is being traced outside it; pass it as an arg"):
        step(jnp.ones(3))


def test_per_platform_takes_the_default_and_refuses_without_one() -> None:
    assert jaxhet.per_platform(jnp.sin, cuda=jnp.cos)(0.0) == 0
    with pytest.raises(jaxhet.UsageError, match=r"has functions for cuda, rocm, and none for cpu"):
        jaxhet.per_platform(cuda=jnp.cos, rocm=jnp.cos)(0.0)
    with pytest.raises(jaxhet.UsageError, match="needs a function"):
        jaxhet.per_platform()


def test_handles_of_other_names_are_other_programs() -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    digests = set()
    for name in ("a", "b"):
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.make_jaxpr(lambda x, n=name: jaxhet.finish(jaxhet.start(x, "x", name=n)))
            digests.add(jaxprs.describe("jit_f", traced(np.ones((2, 8))).jaxpr, (), str).digest)
    assert len(digests) == 2


def test_packages_of_any_folder_are_libraries(tmp_path, monkeypatch):
    """Values that a library remembers are no part of a program, as with `pip install --target`."""
    code = "met = []\ndef scale(x):\n    return x * (1 + 0 * len(met))\n"
    for name in ("installed_here", "own_module"):
        (tmp_path / f"{name}.py").write_text(code)
    record = tmp_path / "here-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("installed_here.py,sha256=x,60\nhere-1.0.dist-info/RECORD,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, words in (("installed_here", 1), ("own_module", 2)):
        module = importlib.import_module(name)
        texts = set()
        for _ in range(2):
            texts.add(jaxprs.describe_value(module.scale)[0])
            module.met.append(1)
        assert len(texts) == words, name
