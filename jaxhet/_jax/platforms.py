"""The platform that JAX will use, and its settings, before its backend exists.

tests/python/test_jax_compat.py tests the parts of JAX that these functions rely on.
"""

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Iterable

import jax

from jaxhet._errors import UsageError
from jaxhet._jax import compiler_settings
from jaxhet._jax.jaxlib import GPU_PLATFORMS
from jaxhet._log import LOGGER

# Variables that set the number of threads of XLA's CPU client.
_XLA_THREADS = {"PJRT_NPROC", "NPROC"}


def expected_platform() -> str:
    """The platform that JAX will use, "cpu", "cuda" or "rocm", without creating a backend.

    Where the user leaves the choice to JAX this loads the plugins, as creating a backend would.

    Raises:
      UsageError: the user chose CUDA alone, and there is no GPU for it.
    """
    from jax._src import hardware_utils, xla_bridge

    # JAX omits CUDA where there is no GPU.
    absent = () if hardware_utils.has_visible_nvidia_gpu() else ("cuda",)
    chosen = _chosen_platforms()
    first = next((name for name in chosen or ("gpu",) if name not in absent), None)
    if first is None:
        raise UsageError(
            "JAX_PLATFORMS is cuda, and this machine has no NVIDIA GPU that the process can open"
            " (/dev/nvidia0, …); give it one, or set JAX_PLATFORMS=cpu"
        )
    if first != "gpu":
        return first
    xla_bridge._discover_and_register_pjrt_plugins()
    factories = xla_bridge._backend_factories
    usable = [name for name in factories if name in GPU_PLATFORMS and name not in absent]
    return max(usable, key=lambda name: factories[name].priority, default="cpu")


def has_cpu_backend() -> bool:
    """Whether JAX will create a CPU backend, alone or beside another one."""
    chosen = _chosen_platforms()
    return not chosen or "cpu" in chosen


def plugin() -> str:
    """Package and version of the GPU plugin that JAX has loaded, or ""."""
    prefix = "jax_plugins.xla_"
    for name in [name.removeprefix(prefix) for name in sys.modules if name.startswith(prefix)]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"jax-{name}-pjrt {importlib.metadata.version(f'jax-{name}-pjrt')}"
    return ""


def _chosen_platforms() -> tuple[str, ...]:
    """Platforms that the user lets JAX use; empty: all of them."""
    chosen = jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS")
    return tuple(chosen.split(",")) if chosen else ()


def configure_cpu(num_devices: int | None) -> str:
    """Sets up the CPU platform for several processes, before its backend exists.

    Executions are dispatched in program order: two executions of one program must not overlap,
    since the engine numbers them in the order of their starts.

    Returns:
      A line for the log: the variable of the environment that was set, and why; or empty.
    """
    if num_devices is not None:
        own = _num_cpu_devices(none=num_devices)
        if own != num_devices:
            LOGGER.warning(
                "this process has %d CPU devices, by JAXHET_CPU_DEVICES or `--devices`, and not %d,"
                " by jax_num_cpu_devices or XLA_FLAGS; leave --devices out for that number",
                *(num_devices, own),
            )
        jax.config.update("jax_num_cpu_devices", num_devices)
    line = _leave_threads_for_launches()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return line


def _leave_threads_for_launches() -> str:
    """Gives XLA's CPU client at least two threads for each device, unless the user chose a number.

    With one thread for each device, a loop that starts many runs deadlocks: XLA accepts 32 runs for
    each device, and the launch of the next run waits in a thread that a collective of an earlier
    run needs. Twice as many threads are enough while one thread of Python launches. A second one
    that also runs far ahead can still deadlock with it. XLA itself creates as many threads as there
    are CPUs, or as devices if these are more.
    """
    threads = 2 * _num_cpu_devices()
    if _XLA_THREADS & os.environ.keys() or threads <= len(os.sched_getaffinity(0)):
        return ""
    os.environ["PJRT_NPROC"] = str(threads)
    return (
        f"PJRT_NPROC={threads} was set: XLA's CPU client has two threads for each device, so that a"
        " program that starts many runs ahead does not deadlock"
    )


def _num_cpu_devices(none: int = 1) -> int:
    """CPU devices that the backend will have; `none` if nothing says it."""
    if (chosen := jax.config.jax_num_cpu_devices) > 0:
        return chosen
    flags = compiler_settings.xla_flags(os.environ)
    return int(flags.get("xla_force_host_platform_device_count", none))


def use_gpus(platform: str, numbers: Iterable[int]) -> None:
    """Restricts the backend to some of the visible GPUs. Call it before the backend exists."""
    jax.config.update(f"jax_{platform}_visible_devices", ",".join(map(str, numbers)))
