"""Pairs of programs that differ in one object: `PAIRS[name](c)` multiplies by c, which is 2 or 3.

The object is where a jaxpr does not show its value.
"""

import collections
import dataclasses
import enum
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
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
        "io_callback of a default",
        "io_callback of a method",
        "io_callback of a partial",
        "context variable",
        "queue in C",
        "weak reference",
    )
)


def called(function: Function) -> Function:
    return lambda a: jax.pure_callback(function, a, a)


def read(get: Callable[[Any], Any], name: str = "") -> Callable[[Function], Function]:
    """Adds the pair of a callback that reads its number from the object that a function makes."""

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


class _Slots:
    __slots__ = ("__by",)

    def __init__(self, by: int):
        self.__by = by

    def scale(self, v: Any) -> Any:
        return v * np.float32(self.__by)


class _Named(NamedTuple):
    by: int


class _Number(int):
    pass


class _Level(enum.Enum):
    TWO = 2
    THREE = 3


@jax.tree_util.register_pytree_node_class
class _Node:
    def __init__(self, x: Any, by: int):
        self.x, self.by = x, by

    def tree_flatten(self) -> Any:
        return (self.x,), self.by

    @classmethod
    def tree_unflatten(cls, by: int, children: Any) -> Any:
        (x,) = children
        return cls(x, by)


read(lambda o: o.by, "frozen dataclass")(_Frozen)
read(lambda o: o.by, "named tuple")(_Named)
read(lambda o: o, "subclass of int")(_Number)


@read(lambda o: o.value)
def enum_member(c: int) -> Any:
    return _Level(c)


@_calls("bound method")
def _(c: int) -> Function:
    return _Slots(c).scale


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


@read(lambda o: o.by)
def metaclass(c: int) -> Any:
    class Meta(type):
        by = c

    class Scale(metaclass=Meta):
        pass

    return Scale


# --- functions and what wraps them ---


def times(by: Any, v: Any) -> Any:
    return v * np.float32(by)


@_calls("keyword default")
def _(c: int) -> Function:
    def scale(v: Any, *, by: int = c) -> Any:
        return v * np.float32(by)

    return scale


@_calls("attribute of a function")
def _(c: int) -> Function:
    def scale(v: Any) -> Any:
        return v * np.float32(scale.by)  # type: ignore[attr-defined]

    scale.by = c  # type: ignore[attr-defined]
    return scale


@_calls("cached function")
def _(c: int) -> Function:
    by = functools.cache(lambda: np.float32(c))
    return lambda v: v * by()


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


@read(lambda o: o["a"][0])
def list_in_a_dict(c: int) -> Any:
    return {"a": [c]}


@read(lambda o: o["absent"])
def defaultdict(c: int) -> Any:
    return collections.defaultdict(lambda: c)


@read(lambda o: next(iter(o)))
def order_of_a_dict(c: int) -> Any:
    return dict.fromkeys((2, 3) if c == 2 else (3, 2))


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
def iterator(c: int) -> Any:
    return itertools.repeat(c)


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


@_add("io_callback of a default")
def _(c: int) -> Function:
    return _io(lambda v, by=c: v * np.float32(by))


@_add("io_callback of a method")
def _(c: int) -> Function:
    return _io(_Slots(c).scale)


@_add("io_callback of a partial")
def _(c: int) -> Function:
    return _io(functools.partial(times, c))


# --- transformations and lowering of JAX ---


@_add(PARTITIONED)
def _(c: int) -> Function:
    @custom_partitioning
    def scaled(v: Any) -> Any:
        return v * 1

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        del result
        return mesh, lambda v: v * c, args[0].sharding, (args[0].sharding,)

    scaled.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="i j -> i j",
    )
    return scaled


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


@_add("custom_vmap")
def _(c: int) -> Function:
    scale = jax.custom_batching.custom_vmap(lambda x: x * 7)

    @scale.def_vmap
    def _(size: int, is_mapped: Any, x: Any) -> Any:
        return x * c, True

    return jax.vmap(scale)


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


@_add("index map of Pallas")
def _(c: int) -> Function:
    def kernel(x: Any, y: Any) -> None:
        y[...] = x[...]

    spec = pl.BlockSpec((1, 6), lambda i: (c - 2, 0))
    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((1, 6), jnp.float32),
        grid=(1,),
        in_specs=[spec],
        out_specs=pl.BlockSpec((1, 6), lambda i: (0, 0)),
        interpret=True,
    )
    return lambda a: call(jnp.concatenate([a * 2, a * 3]))


@_add("data of a pytree")
def _(c: int) -> Function:
    def scale(node: _Node) -> Any:
        return node.x * np.float32(node.by)

    return lambda a: jax.pure_callback(scale, a, _Node(a, c))
