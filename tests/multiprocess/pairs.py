"""Pairs of programs that differ in one object: `PAIRS[name](c)` multiplies by c, which is 2 or 3.

The object is where a jaxpr does not show its value.
"""

import contextvars
import dataclasses
import functools
import itertools
import pathlib
import queue
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import random as custom_random
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jaxhet

Function = Callable[..., Any]
PAIRS: dict[str, Callable[[int], Function]] = {}
PARTITIONED = "custom_partitioning"  # values differ only if XLA partitions the program
# Pairs that nothing tells apart between processes: a process refuses the second one.
REFUSED = frozenset(
    (
        "io_callback of a cell",
        "io_callback of a partial",
        "context variable",
        "queue in C",
        "weak reference",
    )
)


def called(function: Function) -> Function:
    return lambda a: jax.pure_callback(function, a, a)


def read(get: Callable[[Any], Any], name: str = "") -> Callable[[Function], Function]:
    """Adds a pair whose callback reads its number from an object, which a function makes."""

    def add(make: Function) -> Function:
        def pair(c: int) -> Function:
            held = make(c)
            return called(lambda v: v * np.float32(get(held)))

        PAIRS[name or make.__name__.replace("_", " ")] = pair
        return make

    return add


def _add(name: str) -> Callable[[Function], Function]:
    def add(make: Function) -> Function:
        PAIRS[name] = make
        return make

    return add


def _calls(name: str) -> Callable[[Function], Function]:
    """Adds the pair of the callback that a function makes."""

    def add(make: Function) -> Function:
        PAIRS[name] = lambda c: called(make(c))
        return make

    return add


# --- classes and their objects ---


@dataclasses.dataclass(frozen=True)
class _Frozen:
    by: int


class _Named(NamedTuple):
    by: int


read(lambda o: o.by, "frozen dataclass")(_Frozen)
read(lambda o: o.by, "named tuple")(_Named)


@_calls("class attribute")
def _(c: int) -> Function:
    class Scale:
        by = np.float32(c)

        def __call__(self, v: Any) -> Any:
            return v * self.by

    return Scale()


@read(lambda o: o.by)
def a_property(c: int) -> Any:
    class Scale:
        @property
        def by(self) -> int:
            return c

    return Scale()


# --- functions and what wraps them ---


def times(by: Any, v: Any) -> Any:
    return v * np.float32(by)


@_calls("function without source")
def _(c: int) -> Function:
    made: dict[str, Any] = {"np": np}
    exec(f"def scale(v): return v * np.float32({c})", made)
    return made["scale"]


@_calls("global of another module")
def _(c: int) -> Function:
    module = types.ModuleType("settings_of_a_program")
    module.by = c  # type: ignore[attr-defined]
    return lambda v: v * np.float32(module.by)


@_calls("np.frompyfunc")
def _(c: int) -> Function:
    scale = np.frompyfunc(lambda v: v * c, 1, 1)
    return lambda v: np.asarray(scale(np.asarray(v)).astype(np.float32))


@_calls("np.vectorize")
def _(c: int) -> Function:
    return np.vectorize(lambda v: np.float32(v * c))


@_calls("jitted function")
def _(c: int) -> Function:
    by: Any = jax.jit(lambda: c)
    return lambda v: v * np.float32(by.__wrapped__())


# --- containers and numbers ---


@read(len)
def frozen_set(c: int) -> Any:
    return frozenset(range(c))


@read(lambda o: o[0].by)
def array_of_objects(c: int) -> Any:
    return np.array([_Frozen(c)], object)


@read(lambda o: o["by"][0])
def structured_array(c: int) -> Any:
    return np.array([(c,)], [("by", "i4")])


@read(lambda o: o.sum())
def masked_array(c: int) -> Any:
    return np.ma.array([2, 1], mask=[False, c == 2])


@read(next)
def generator(c: int) -> Any:
    return (c for _ in itertools.count())


@read(lambda o: o[0])
def view_of_bytes(c: int) -> Any:
    return memoryview(bytes([c]))


# --- callbacks that belong to a process ---


def _io(function: Function) -> Function:
    return lambda a: io_callback(function, a, a)


@_add("io_callback of a cell")
def _(c: int) -> Function:
    return _io(lambda v: v * np.float32(c))


@_add("io_callback of a partial")
def _(c: int) -> Function:
    return _io(functools.partial(times, c))


# --- transformations and lowering of JAX ---


def partitioned(whole: Function, own: Function) -> Function:
    """`whole`; a device's part is computed by `own` where XLA partitions the program."""

    @custom_partitioning
    def function(v: Any) -> Any:
        return whole(v)

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        del result
        return mesh, own, args[0].sharding, (args[0].sharding,)

    function.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="i j -> i j",
    )
    return function


@_add(PARTITIONED)
def _(c: int) -> Function:
    return partitioned(lambda v: v * 1, lambda v: v * c)


_scale_p = Primitive("scale_by_an_object")
_scale_p.def_abstract_eval(lambda x, *, by: x)
mlir.register_lowering(_scale_p, mlir.lower_fun(lambda x, *, by: x * by(), multiple_results=False))


class _By:
    def __init__(self, by: int):
        self.by = by

    def __call__(self) -> int:
        return self.by


def _scaled_by(by: Any) -> Function:
    return lambda a: _scale_p.bind(a, by=by)


PAIRS["object as a parameter"] = lambda c: _scaled_by(_By(c))


@_add("custom_jvp")
def _(c: int) -> Function:
    scale = jax.custom_jvp(lambda x: x * 7.0)
    scale.defjvp(lambda primals, tangents: (scale(*primals), tangents[0] * c))
    return jax.grad(lambda a: scale(a).sum())


@_add("custom_vjp")
def _(c: int) -> Function:
    scale = jax.custom_vjp(lambda x: x * 7.0)
    scale.defvjp(lambda x: (scale(x), None), lambda _, g: (g * c,))
    return jax.grad(lambda a: scale(a).sum())


@_add("custom_root")
def _(c: int) -> Function:
    def newton(f: Function, x: Any) -> Any:
        return jax.lax.fori_loop(0, 20, lambda i, v: v - f(v) / (2 * v), x)

    def root(u: Any) -> Any:
        return jax.lax.custom_root(lambda v: v * v - c**2, u, newton, lambda g, y: y / g(1.0))

    return lambda a: a * root(a[0, 0])


@_add("piece for a platform")
def _(c: int) -> Function:
    return jaxhet.per_platform(lambda a: a * c, island1=lambda a: c * a)


@_add("kernel of Pallas")
def _(c: int) -> Function:
    def kernel(x: Any, y: Any) -> None:
        y[...] = x[...] * c

    return lambda a: pl.pallas_call(kernel, jax.typeof(a), interpret=True)(a)


# --- objects of Python's library and of JAX ---

_KEPT: list[Any] = []  # targets of weak references


def _queue(made: Any, c: int) -> Any:
    made.put(c)
    return made


def _turned(of: Any) -> Any:
    value = of.get()
    of.put(value)
    return value


def _kept(c: int) -> Any:
    _KEPT.append(_Frozen(c))
    return _KEPT[-1]


class _Array(np.ndarray):
    by: int

    def __new__(cls, c: int) -> "_Array":
        made = np.zeros(1).view(cls)
        made.by = c
        return made


def _dispatched(c: int) -> Any:
    function = functools.singledispatch(lambda v: 0)
    function.register(int)(lambda v: c)
    return function


for _name, _make, _get in (
    ("path", lambda c: pathlib.Path(f"/data/{c}"), lambda o: int(o.name)),
    ("queue", lambda c: _queue(queue.Queue(), c), lambda o: o.queue[0]),
    ("weak reference", lambda c: weakref.ref(_kept(c)), lambda o: o().by),
    ("context variable", lambda c: contextvars.ContextVar("by", default=c), lambda o: o.get()),
    ("queue in C", lambda c: _queue(queue.SimpleQueue(), c), _turned),
    ("random key", jax.random.key, lambda o: jax.random.key_data(o)[1]),
    ("single dispatch", _dispatched, lambda o: o(1)),
    ("subclass of an array", _Array, lambda o: o.by),
):
    read(_get, _name)(_make)


@_add("exported function")
def _(c: int) -> Function:
    return export.export(jax.jit(lambda a: a * c))(jax.ShapeDtypeStruct((1, 6), "float32")).call


@_add("random bits of one's own")
def _(c: int) -> Function:
    impl = custom_random.define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jnp.zeros(2, "uint32"),
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, 2)),
        random_bits=lambda key, width, shape: jnp.full(shape, c, f"uint{width}"),
        fold_in=lambda key, data: key,
        name="equal",
        tag="equal",
    )
    return lambda a: a * jax.random.bits(jax.random.key(0, impl=impl), a.shape).astype("float32")


@_add("callback in a loop")
def _(c: int) -> Function:
    scale = called(lambda v: v * np.float32(c))
    return lambda a: jax.lax.scan(lambda x, _: (scale(x), None), a, None, length=1)[0]


@_add("linear solver")
def _(c: int) -> Function:
    return lambda a: jax.lax.custom_linear_solve(lambda v: v * 1, a, lambda f, b: b * c)
