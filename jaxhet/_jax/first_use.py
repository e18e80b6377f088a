"""The moment before JAX creates its backends.

JAX is imported when a function is called: it may be in the middle of its own import.

tests/python/test_jax_compat.py tests the parts of JAX that these functions rely on.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxhet._jax.replacements import install


def call_before_backends(check: Callable[[], None]) -> None:
    """Calls `check` before each use of JAX that would create its backends.

    An error of `check` is raised in their place. It may create the backends itself, also on other
    threads: meanwhile JAX's cache of backends, whose entry the first use holds, is bypassed.
    """
    from jax._src import xla_bridge

    @install("jax._src.xla_bridge:backends")
    def backends(original: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        if not xla_bridge._backends:
            cached = xla_bridge.get_backend
            xla_bridge.get_backend = xla_bridge._get_backend_uncached
            try:
                check()
            finally:
                xla_bridge.get_backend = cached
        return original()
