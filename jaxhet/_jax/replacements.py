"""All names of JAX that jaxhet replaces.

tests/python/test_jax_replacements.py compares the table with the installed JAX.
"""

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

from jaxhet._errors import UsageError
from jaxhet._jax import jaxlib

# Replaced names of JAX, each with the reason. All tested versions have the functions
# (`jaxlib.TESTED`). `put` replaces the last two names, which are values.
REPLACEMENTS = {
    "jax._src.interpreters.mlir:jaxpr_subcomp": "number equations in the names of operations",
    "jax._src.interpreters.mlir:lower_jaxpr_to_module": "tell programs apart",
    "jax._src.callback:emit_python_callback": "know of callbacks that raise",
    "jax._src.compiler:compile_or_get_cached": "know, share and give options to programs",
    "jax._src.compiler:backend_compile_and_load": "share programs, and raise errors of the passes",
    "jax._src.compiler:_cache_write": "choose the processes that write to the compilation cache",
    "jax._src.compilation_cache:get_cache_key": "tell plans apart in the compilation cache",
    "jax._src.compilation_cache:get_executable_and_time": "check and share cached programs",
    "jax._src.compilation_cache:put_executable_and_time": "serialize a program once",
    "jax._src.pjit:_get_fastpath_data": "check which thread launches",
    "jax._src.interpreters.pxla:ExecuteReplicated.__call__": "check which thread launches",
    "jax.experimental.serialize_executable:_JaxPjrtUnpickler.persistent_load": (
        "check programs that were serialized"
    ),
    "jax._src.dispatch:_device_put_sharding_impl": "move arrays between islands",
    "jax._src.xla_bridge:backends": "join the job before the first use of a device",
    "jax.experimental.multihost_utils:_handle_array_process_allgather": (
        "gather from processes with unequal numbers of devices"
    ),
    "jax.experimental.multihost_utils:broadcast_one_to_all": (
        "broadcast to processes with unequal numbers of devices"
    ),
    "jax.experimental.multihost_utils:sync_global_devices": "let any thread synchronize",
    "jax._src.lib:Device.slice_index": "give CPUs the slices of their islands",
    "jax._src.sharding_impls:hasattr": "let jax.make_mesh accept several slices",
}


def install(name: str) -> Callable[[Callable[..., Any]], None]:
    """Replaces a function of JAX; the new one gets the old one as its first argument.

    If a name is replaced more than once, the newest function is called, and its first argument is
    the function that it has replaced.

    Args:
      name: Key of `REPLACEMENTS`.

    Raises:
      UsageError: This JAX has no such function.
    """
    try:
        owner, attribute = place(name)
        original = getattr(owner, attribute)
    except (ImportError, AttributeError):
        import jax

        raise UsageError(
            f"jax {jax.__version__} has no {name}, which jaxhet relies on to {REPLACEMENTS[name]};"
            f" install a version that jaxhet was tested with: {jaxlib.TESTED}"
        ) from None

    def put(ours: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return ours(original, *args, **kwargs)

        setattr(owner, attribute, replaced)

    return put


def put(name: str, value: Any) -> None:
    """Replaces a value of JAX."""
    setattr(*place(name), value)


def place(name: str) -> tuple[Any, str]:
    """Splits a key of `REPLACEMENTS` into the module or class, and the name of its attribute."""
    module, _, path = name.partition(":")
    *classes, attribute = path.split(".")
    return pkgutil.resolve_name(f"{module}:{'.'.join(classes)}"), attribute
