"""The only place that touches JAX's internals.

What each function relies on is tested in tests/python/test_jax_compat.py.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax._src.lib import Device as Device  # jax.Device, which pyright takes for a variable
from jaxlib import version as jaxlib_version

from jaxhet._errors import UsageError

MINIMUM_JAX = (0, 11, 2)
_HEARTBEAT_TIMEOUT_S = 100
_FOREVER_S = 7 * 24 * 3600

Hook = Callable[[bytes], bytes | None]


def versions() -> dict[str, str]:
    """The versions that must be equal in the whole job."""
    return {"jax": jax.__version__, "jaxlib": jaxlib_version.__version__}


def require_supported_jax() -> None:
    """Checks that this JAX can run our passes.

    Raises:
      UsageError: JAX is too old.
    """
    try:
        from jax.extend import xla

        _ = xla.register_hlo_module_transformation
    except (ImportError, AttributeError):
        wanted = ".".join(map(str, MINIMUM_JAX))
        raise UsageError(
            f"jax {jax.__version__} has no hook for HLO passes; install jax>={wanted}"
        ) from None


def start_coordination_service(host: str, num_processes: int) -> tuple[str, Any]:
    """Starts JAX's coordination service on a free port.

    It is recoverable: the death of one process does not end the others.

    Returns:
      Its address, and the service (`shutdown()`).
    """
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        port = probe.getsockname()[1]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    service = _jax.get_distributed_runtime_service(
        address,
        num_processes,
        heartbeat_timeout=_HEARTBEAT_TIMEOUT_S,
        shutdown_timeout=5,
        recoverable=True,
    )
    return address, service


def connect_client(address: str, num_processes: int, process: int) -> Any:
    """Connects this process to the coordination service and makes it JAX's own.

    That is what `jax.distributed.initialize` does. Blocks until every process of the job has come.
    """
    from jax._src import distributed
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    client = _jax.get_distributed_runtime_client(
        address,
        process,
        init_timeout=_FOREVER_S,
        heartbeat_timeout=_HEARTBEAT_TIMEOUT_S,
        shutdown_timeout=5,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state = distributed.global_state
    state.client = client
    state.coordinator_address = address
    state.process_id = process
    state.num_processes = num_processes
    state.initialize_preemption_sync_manager()
    return client


def cancel_barriers() -> None:
    """Ends all waits at barriers of the coordination service, with an error."""
    from jax._src import distributed

    client = distributed.global_state.client
    if client is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.shutdown()


def disconnect_client() -> None:
    """Takes this process out of the coordination service."""
    from jax._src import distributed

    distributed.global_state.shutdown()


def backend_exists() -> bool:
    """Whether a JAX backend was created in this process."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def distributed_is_initialized() -> bool:
    """Whether `jax.distributed.initialize` (or ours) ran in this process."""
    return jax.distributed.is_initialized()


def expected_platform() -> str:
    """The platform that JAX will use, without creating a backend."""
    chosen = jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS")
    return chosen.split(",")[0] if chosen else "cpu"


def configure_cpu(num_devices: int | None) -> None:
    """Sets up the CPU platform for several processes, before its backend exists.

    Executions are dispatched in program order: two executions of one program must not overlap,
    since the engine numbers them in the order of their starts.
    """
    if num_devices is not None:
        jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def unblock_backend(client: Any, platform: str, dead_process: int) -> None:
    """Makes the topology exchange of a backend that waits for a dead process fail at once.

    It does so by an answer that is not valid.
    """
    for key in (
        f"{platform}:local_topology/{platform}/{dead_process}",
        f"{platform}:global_topology/{platform}",
    ):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.key_value_set_bytes(key, b"\xff")


def register_passes(pre: Hook, post: Hook, platform: str) -> None:
    """Registers the two compiler passes with XLA's hook."""
    from jax.extend import xla

    for name, hook, stage in (
        ("jaxhet_decompose", pre, xla.PipelineStage.PRE_SCHEDULER),
        ("jaxhet_bridge", post, xla.PipelineStage.POST_SCHEDULER),
    ):
        xla.register_hlo_module_transformation(hook, name=name, stage=stage, platforms=platform)


def module_text(module: bytes) -> str:
    """A serialized HloModuleProto as HLO text."""
    from jax._src.lib import hlo  # pyright: ignore[reportAttributeAccessIssue]

    return hlo.HloModule.from_serialized_hlo_module_proto(module).to_string()


def run_with_checks(
    function: Callable[[], Any], check: Callable[[], None], period_s: float = 0.02
) -> Any:
    """Runs a blocking call of JAX on a thread, and calls `check` until it returns.

    What either raises is raised.
    """
    result: list[Any] = []
    error: list[BaseException] = []

    def body() -> None:
        try:
            result.append(function())
        except BaseException as e:
            error.append(e)

    thread = threading.Thread(target=body, name="jaxhet-blocking-call", daemon=True)
    thread.start()
    while True:
        thread.join(period_s)
        if not thread.is_alive():
            break
        check()
    if error:
        raise error[0]
    return result[0]
