"""More of `pairs.PAIRS`: objects of Python's library, of NumPy and of JAX."""

import contextvars
import copy
import dataclasses
import functools
import pathlib
import queue
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pairs
from jax import export
from jax.extend import random as custom_random

_KEPT: list[Any] = []  # targets of weak references


def _queue(made: Any, c: int) -> Any:
    made.put(c)
    return made


def _turned(of: Any) -> Any:
    value = of.get()
    of.put(value)
    return value


def _kept(c: int) -> Any:
    _KEPT.append(_Held(c))
    return _KEPT[-1]


@dataclasses.dataclass
class _Held:
    by: int


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


def _described(c: int) -> Any:
    get = types.new_class("By", exec_body=lambda held: held.update(__get__=lambda *args: c))
    return type("Scale", (), {"by": get()})()


# Name -> the function that makes the object of c, and the one that reads c from it.
_OBJECTS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "NumPy generator": (
        np.random.default_rng,
        lambda o: 2 if copy.deepcopy(o).random() == np.random.default_rng(2).random() else 3,
    ),
    "path": (lambda c: pathlib.Path(f"/data/{c}"), lambda o: int(o.name)),
    "mapped iterator": (lambda c: map(int, [c] * 9), next),
    "queue": (lambda c: _queue(queue.Queue(), c), lambda o: o.queue[0]),
    "weak reference": (lambda c: weakref.ref(_kept(c)), lambda o: o().by),
    "context variable": (lambda c: contextvars.ContextVar("by", default=c), lambda o: o.get()),
    "queue in C": (lambda c: _queue(queue.SimpleQueue(), c), _turned),
    "method of a ufunc": (lambda c: {2: np.multiply, 3: np.add}[c].reduce, lambda o: o([2, 1])),
    "subclass of an array": (_Array, lambda o: o.by),
    "random key": (jax.random.key, lambda o: jax.random.key_data(o)[1]),
    "single dispatch": (_dispatched, lambda o: o(1)),
    "descriptor": (_described, lambda o: o.by),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Static:
    x: Any
    by: int = dataclasses.field(metadata={"static": True})


def _static_field(c: int) -> pairs.Function:
    def scale(node: _Static) -> Any:
        return node.x * np.float32(node.by)

    return lambda a: jax.pure_callback(scale, a, _Static(a, c))


def _exported(c: int) -> pairs.Function:
    return export.export(jax.jit(lambda a: a * c))(jax.ShapeDtypeStruct((1, 6), "float32")).call


def _random_bits(c: int) -> pairs.Function:
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


def _in_a_loop(c: int) -> pairs.Function:
    scale = pairs.called(lambda v: v * np.float32(c))
    return lambda a: jax.lax.scan(lambda x, _: (scale(x), None), a, None, length=1)[0]


def _mapped(c: int) -> pairs.Function:
    def fill(v: Any) -> Any:
        return np.full(v.shape, c, np.float32)

    def row(r: Any) -> Any:
        return jax.pure_callback(fill, jax.typeof(r), r, vmap_method="expand_dims")

    return jax.vmap(row)


def _rematted(c: int) -> pairs.Function:
    scale = jax.custom_vjp(lambda x: x * 7.0)
    scale.defvjp(lambda x: (x * c, x), lambda x, g: (g * c,), optimize_remat=True)

    def both(a: Any) -> Any:
        value, back = jax.vjp(scale, a)
        return back(a)[0] + 0 * value

    return both


_PROGRAMS: dict[str, Callable[[int], pairs.Function]] = {
    "static field of a registered dataclass": _static_field,
    "exported function": _exported,
    "random bits of one's own": _random_bits,
    "callback in a loop": _in_a_loop,
    "callback of vmap": _mapped,
    "remat of a custom derivative": _rematted,
    "linear solver": lambda c: (
        lambda a: jax.lax.custom_linear_solve(lambda v: v * 1, a, lambda f, b: b * c)
    ),
}


for _name, (_make, _get) in _OBJECTS.items():
    pairs.read(_get, _name)(_make)
pairs.PAIRS.update(_PROGRAMS)
