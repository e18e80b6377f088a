"""`jaxhet.per_platform`: one piece of a program, written in another way for each vendor."""

import functools
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
from jaxhet._traced import jaxprs, words
from jaxhet._traced.words import Held, first_difference
from jaxhet.compiler import PER_PLATFORM

Function = Callable[..., Any]
_MOST_KEPT = 128  # functions in each of the caches below, with the arrays that they hold
_FROM_OUTSIDE = (
    "a function of jaxhet.per_platform uses an array that is being traced outside it; pass it as an"
    " argument"
)


_held: dict[str, list[Held]] = {}  # by digest of functions: objects that no word describes


# --- a piece as an equation ---

# A piece is one equation that JAX does not split. It would split a nested `jit`: it removes unused
# operands, and moves loop-invariant code out of loops. The programs of two platforms would then
# differ around the piece as well.
_piece_p = core.Primitive(PER_PLATFORM)


@functools.lru_cache(_MOST_KEPT)
def _runner(name: str, jaxpr: core.Jaxpr) -> Function:
    run = core.jaxpr_as_fun(jaxpr)
    run.__name__ = name  # pyright: ignore[reportAttributeAccessIssue]
    return jax.jit(run)


def _evaluate(*args: Any, name: str, jaxpr: core.Jaxpr) -> list[Any]:
    return _runner(name, jaxpr)(*args)


def _lower(context: Any, *args: Any, name: str, jaxpr: core.Jaxpr) -> Any:
    return mlir.lower_fun(_runner(name, jaxpr), multiple_results=True)(context, *args)


def _map(
    args: Sequence[Any], axes: Sequence[int | None], *, name: str, jaxpr: core.Jaxpr
) -> tuple[list[Any], list[int]]:
    mapped = jax.jit(_mapped(jaxpr, tuple(axes))).trace(*args).jaxpr
    results = _piece_p.bind(*args, name=name, jaxpr=mapped)
    return results, [0] * len(results)


@functools.lru_cache(_MOST_KEPT)
def _mapped(jaxpr: core.Jaxpr, axes: tuple[int | None, ...]) -> Function:
    return jax.vmap(core.jaxpr_as_fun(jaxpr), in_axes=axes)


def _differentiate(*_: Any, **__: Any) -> Any:
    """Refuses derivatives beyond the first one, which `custom_vjp` in `_declared` defines."""
    raise UsageError(
        "a piece of jaxhet.per_platform has no second derivative, and no forward-mode one: write"
        " what is differentiated twice in one way for all platforms"
    )


_piece_p.multiple_results = True
_piece_p.def_impl(_evaluate)
_piece_p.def_effectful_abstract_eval(lambda *_, name, jaxpr: (jaxpr.out_avals, jaxpr.effects))
batching.primitive_batchers[_piece_p] = _map
ad.primitive_jvps[_piece_p] = _differentiate
mlir.register_lowering(_piece_p, _lower)


# --- its declaration ---


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
    differentiation and second derivatives do not. The backward pass runs the function again, so
    that all platforms keep the same values for it: the arguments.

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
    """Digest of all functions: equal on all islands, whichever function they choose."""
    try:
        text, held = jaxprs.describe_value({"": default, **dict(sorted(functions.items()))})
    except jax.errors.ConcretizationTypeError as error:
        raise UsageError(_FROM_OUTSIDE) from error
    digest = words.digest(text)
    if (other := first_difference(_held.setdefault(digest, held), held)) is not None:
        raise UsageError(
            f"two pieces of jaxhet.per_platform differ in nothing but an object of {other.what},"
            " which jaxhet can't compare between processes; pass what it holds as an argument, or"
            " give the functions another name"
        )
    return digest


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


@functools.lru_cache(_MOST_KEPT)
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
    traced_function = jax.jit(function)

    def run(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        traced = traced_function.trace(*args)
        if len(traced.jaxpr.invars) != len(leaves):
            raise UsageError(_FROM_OUTSIDE)
        results = _piece_p.bind(*leaves, name=name, jaxpr=traced.jaxpr)
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), results)

    return run


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _floats(tree: Any) -> list[Any]:
    """The arrays of a tree that have a gradient."""
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if getattr(x, "dtype", None) != jax.dtypes.float0 and _is_float(x)]


def _no_gradient(x: Any) -> np.ndarray:
    return np.zeros(np.shape(x), jax.dtypes.float0)
