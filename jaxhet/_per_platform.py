"""`jaxhet.per_platform`: one piece of a program, written in another way for each vendor."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jaxhet import _session
from jaxhet._errors import UsageError
from jaxhet._jax import platforms
from jaxhet._traced import jaxprs
from jaxhet._traced.functions import function_text
from jaxhet.compiler import PER_PLATFORM

Function = Callable[..., Any]
_DIGEST_BYTES = 8


# Returns its operands. JAX removes what a function does not use from its equation; in this way all
# platforms' functions use all arguments, and compute all results themselves.
_keep_p = core.Primitive(f"{PER_PLATFORM}_keep")
_keep_p.multiple_results = True
_keep_p.def_impl(lambda *args: list(args))
_keep_p.def_abstract_eval(lambda *args: list(args))
batching.primitive_batchers[_keep_p] = lambda args, axes: (_keep_p.bind(*args), axes)
ad.primitive_jvps[_keep_p] = lambda args, tangents: (_keep_p.bind(*args), tangents)
mlir.register_lowering(_keep_p, lambda _, *args: list(args))


def per_platform(default: Function | None = None, /, **functions: Function) -> Function:
    """Declares a piece of a program that differs between platforms on purpose.

    All islands of a job must trace the same program, and a difference is a `PlanMismatchError`.
    Inside this piece they may differ: each process traces its own function only. Arguments and
    results must have the same shapes and dtypes; islands compare them. Values may differ as far as
    the arithmetic of two vendors does.

    All islands must pass the same functions under the same names, even those of other platforms:
    their source, and the values that they hold, are part of the program. A function that needs a
    library of one vendor imports it when it is called.

    The functions must not exchange data over islands themselves, and take all arrays as
    arguments. `jax.jit`, `jax.vmap`, `jax.grad` and `jax.checkpoint` work; forward-mode
    differentiation does not. The backward pass runs the function again, so that all platforms keep
    the same values for it: the arguments.

    Args:
      default: the function for platforms and islands that are not named.
      **functions: by platform (`cpu`, `cuda`, `rocm`) or by name of an island, which has priority.

    Returns:
      A function of the same arguments.

    Raises:
      UsageError: no function is given at all; or, in a call of the result, none for this process's
        platform.

    Examples:
      >>> def attend(q, k, v):
      ...     return jax.nn.dot_product_attention(q, k, v)
      >>> def attend_with_cudnn(q, k, v):
      ...     return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
      >>> attend_anywhere = jaxhet.per_platform(attend, cuda=attend_with_cudnn)
      >>> q = jax.numpy.ones((1, 8, 2, 4))
      >>> y = jax.jit(attend_anywhere)(q, q, q)
    """
    if default is None and not functions:
        raise UsageError("jaxhet.per_platform needs a function, for example cuda=f, rocm=g")

    def call(*args: Any) -> Any:
        return _declared(_choose(default, functions), _digest(default, functions))(*args)

    return call


def _digest(default: Function | None, functions: dict[str, Function]) -> str:
    """Equal on all islands, whichever function they choose; other functions have another one."""
    words = [
        f"{name} {function_text(function, jaxprs.text)}"
        for name, function in (("", default), *sorted(functions.items()))
        if function is not None
    ]
    return hashlib.blake2b("\n".join(words).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _choose(default: Function | None, functions: dict[str, Function]) -> Function:
    session = _session.current()
    island = session.island if session is not None and session.islands else None
    platform = island.platform if island else platforms.expected_platform()
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
def _declared(function: Function, digest: str) -> Function:
    """The function as one equation, and its backward pass as another one.

    Args:
      function: the function that this process runs.
      digest: digest of the functions of all platforms, for the names of the equations.
    """

    def backward(args: tuple[Any, ...], cotangents: Sequence[Any]) -> list[Any]:
        leaves, tree = jax.tree.flatten(args)
        floats = [x for x in leaves if _is_float(x)]

        def of_floats(*floats: Any) -> list[Any]:
            left = iter(floats)
            merged = [next(left) if _is_float(x) else x for x in leaves]
            return _floats(function(*jax.tree.unflatten(tree, merged)))

        return list(jax.vjp(of_floats, *floats)[1](list(cotangents)))

    run = _equation(function, f"{PER_PLATFORM}_{digest}")
    run_back = _equation(backward, f"{PER_PLATFORM}_backward_{digest}")

    def pull_back(args: tuple[Any, ...], cotangents: Any) -> tuple[Any, ...]:
        leaves, tree = jax.tree.flatten(args)
        gradients = iter(run_back(args, _floats(cotangents)))
        return jax.tree.unflatten(
            tree, [next(gradients) if _is_float(x) else _no_gradient(x) for x in leaves]
        )

    declared = jax.custom_vjp(run)
    declared.defvjp(lambda *args: (run(*args), args), pull_back)
    return declared


def _equation(function: Function, name: str) -> Function:
    """The function as one equation of that name, with all arguments as operands."""

    def keeping(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        kept = _keep_p.bind(*leaves)
        results, results_tree = jax.tree.flatten(function(*jax.tree.unflatten(tree, kept)))
        return jax.tree.unflatten(results_tree, _keep_p.bind(*kept, *results)[len(kept) :])

    keeping.__name__ = name
    return jax.jit(keeping)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _floats(tree: Any) -> list[Any]:
    """The arrays of a tree that have a gradient."""
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if getattr(x, "dtype", None) != jax.dtypes.float0 and _is_float(x)]


def _no_gradient(x: Any) -> np.ndarray:
    return np.zeros(np.shape(x), jax.dtypes.float0)
