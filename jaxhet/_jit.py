"""`jaxhet.jit`: `jax.jit` with jaxhet's errors and options."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxhet import _compilation, _session
from jaxhet._compilation import BridgeOptions
from jaxhet._errors import JaxhetError, UsageError


def jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    bridge: BridgeOptions | Mapping[str, Any] | None = None,
    **jit_options: Any,
) -> Any:
    """`jax.jit` plus failure checks and options for the exchanges over islands.

    Plain `jax.jit` is bridged as well, with the job's defaults. Here a failure of the job is raised
    as jaxhet's own error: at the call, at `jaxhet.block_until_ready`, or at the next call.

    Args:
      fun: the function; without it, a decorator is returned.
      bridge: `BridgeOptions`, or a mapping of its fields: `deadline_s`, `wire`.
      **jit_options: options of `jax.jit`.

    Returns:
      A function with the methods of a jitted one (`lower`, `trace`, `eval_shape`, `clear_cache`).

    Raises:
      UsageError: an option is not known.

    Examples:
      >>> @jaxhet.jit(bridge={"deadline_s": 60})
      ... def mean(x):
      ...     return x.mean()
      >>> value = jaxhet.block_until_ready(mean(x))
      >>> gradient = jaxhet.jit(jax.grad(lambda x: (x**2).mean()), bridge={"wire": "mxint8"})
    """
    if fun is None:
        return functools.partial(jit, bridge=bridge, **jit_options)
    return _Jitted(fun, _as_options(bridge), jit_options)


def block_until_ready(tree: Any) -> Any:
    """`jax.block_until_ready`, with jaxhet's errors.

    Args:
      tree: Any pytree; its arrays are waited for.

    Returns:
      The tree.

    Raises:
      JaxhetError: The job has failed. The class is the class of the first failure.

    Examples:
      >>> value = jaxhet.block_until_ready(x + 1)
    """
    try:
        ready = jax.block_until_ready(tree)
    except (RuntimeError, ValueError) as error:  # JAX has both, by the kind of program
        _raise_ours(error)
        raise
    if (session := _session.current()) is not None:
        session.raise_if_poisoned()
    return ready


def last_error() -> Exception | None:
    """The first failure of the job, or None.

    After a failure, a process that has called this is not ended.
    """
    session = _session.current()
    if session is None:
        return None
    session.acknowledge()
    return session.error()


class _Stage:
    """A jitted, traced, lowered or compiled function whose errors are ours."""

    def __init__(self, stage: Any, options: BridgeOptions):
        self._stage = stage
        self._options = options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = _session.current()
        if session is None:
            return self._run(self._stage, args, kwargs)
        session.raise_if_failed()
        results = self._run(self._stage, args, kwargs)
        session.raise_if_poisoned()
        return results

    def trace(self, *args: Any, **kwargs: Any) -> "_Stage":
        return _Stage(self._run(self._stage.trace, args, kwargs), self._options)

    def lower(self, *args: Any, **kwargs: Any) -> "_Stage":
        return _Stage(self._run(self._stage.lower, args, kwargs), self._options)

    def compile(self, *args: Any, **kwargs: Any) -> "_Stage":
        return _Stage(self._run(self._stage.compile, args, kwargs), self._options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with _compilation.bridge_options(self._options):
                return function(*args, **kwargs)
        except JaxhetError:
            if (session := _session.current()) is not None:
                session.raise_if_failed()
            raise
        except (RuntimeError, ValueError) as error:  # JAX has both, by the kind of program
            _raise_ours(error)
            raise


class _Jitted(_Stage):
    """The function that `jit` returns."""

    def __init__(
        self, fun: Callable[..., Any], options: BridgeOptions, jit_options: dict[str, Any]
    ):
        # A function object of its own: JAX's caches must not share what was compiled with other
        # options.
        @functools.wraps(fun)
        def own(*args: Any, **kwargs: Any) -> Any:
            return fun(*args, **kwargs)

        super().__init__(jax.jit(own, **jit_options), options)
        functools.update_wrapper(self, fun, updated=())  # `fun` may be one of us

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


def _as_options(bridge: BridgeOptions | Mapping[str, Any] | None) -> BridgeOptions:
    if isinstance(bridge, BridgeOptions):
        return bridge
    try:
        return BridgeOptions(**(bridge or {}))
    except TypeError:
        names = ", ".join(BridgeOptions.__dataclass_fields__)
        raise UsageError(
            f"bridge={dict(bridge or {})!r} holds an unknown option; valid: {names}"
        ) from None


def _raise_ours(error: Exception) -> None:
    session = _session.current()
    if session is not None and (ours := session.translate(error)):
        raise ours from error
