"""`jaxhet.per_platform`: one piece of a program, written in another way for each vendor."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxhet import _jax_compat, _session
from jaxhet._errors import UsageError
from jaxhet.compiler import PER_PLATFORM

Function = Callable[..., Any]


def per_platform(default: Function | None = None, /, **functions: Function) -> Function:
    """Declares a piece of a program that differs between platforms on purpose.

    All islands of a job must trace the same program, and a difference is a `PlanMismatchError`.
    Inside this piece they may differ: each process traces its own function only. Arguments and
    results must have the same shapes and dtypes; islands compare them. Values may differ as far as
    the arithmetic of two vendors does.

        attend = jaxhet.per_platform(attention, cuda=flash_attention)
        y = attend(q, k, v)

    The functions must not exchange data over islands themselves, and take all arrays as
    arguments. `jax.jit`, `jax.vmap`, `jax.grad` and `jax.checkpoint` work; forward-mode
    differentiation does not. The backward pass runs the function again, so that all platforms keep
    the same values for it: the arguments.

    Args:
      default: the function for platforms and islands that are not named.
      **functions: by platform (`cpu`, `cuda`, `rocm`) or by name of an island, which has priority.

    Returns:
      A function of the same arguments; its call raises UsageError if no function is given for this
      process's platform.
    """
    if default is None and not functions:
        raise UsageError("jaxhet.per_platform needs a function, for example cuda=f, rocm=g")

    def call(*args: Any) -> Any:
        return _declared(_choose(default, functions))(*args)

    return call


def _choose(default: Function | None, functions: dict[str, Function]) -> Function:
    session = _session.current()
    island = session.island if session is not None and session.islands else None
    platform = island.platform if island else _jax_compat.expected_platform()
    names = (island.name, platform) if island else (platform,)
    chosen = next((functions[name] for name in names if name in functions), default)
    if chosen is None:
        given = ", ".join(sorted(functions))
        raise UsageError(
            f"jaxhet.per_platform has functions for {given}, and none for {' or '.join(names)};"
            f" pass one by name ({platform}=…), or first, as the default"
        )
    return chosen


@functools.lru_cache(maxsize=1024)
def _declared(function: Function) -> Function:
    """The function as one equation, and its backward pass as another one."""

    def forward(*args: Any) -> Any:
        return function(*args)

    def backward(args: tuple[Any, ...], cotangents: Sequence[Any]) -> list[Any]:
        leaves, tree = jax.tree.flatten(args)
        floats = [x for x in leaves if _is_float(x)]

        def of_floats(*floats: Any) -> list[Any]:
            left = iter(floats)
            merged = [next(left) if _is_float(x) else x for x in leaves]
            return _floats(function(*jax.tree.unflatten(tree, merged)))

        return list(jax.vjp(of_floats, *floats)[1](list(cotangents)))

    forward.__name__, backward.__name__ = PER_PLATFORM, f"{PER_PLATFORM}_backward"
    run, run_back = jax.jit(forward), jax.jit(backward)

    def pull_back(args: tuple[Any, ...], cotangents: Any) -> tuple[Any, ...]:
        leaves, tree = jax.tree.flatten(args)
        gradients = iter(run_back(args, _floats(cotangents)))
        return jax.tree.unflatten(
            tree, [next(gradients) if _is_float(x) else _no_gradient(x) for x in leaves]
        )

    declared = jax.custom_vjp(run)
    declared.defvjp(lambda *args: (run(*args), args), pull_back)
    return declared


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _floats(tree: Any) -> list[Any]:
    """The arrays of a tree that have a gradient."""
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if getattr(x, "dtype", None) != jax.dtypes.float0 and _is_float(x)]


def _no_gradient(x: Any) -> np.ndarray:
    return np.zeros(np.shape(x), jax.dtypes.float0)
