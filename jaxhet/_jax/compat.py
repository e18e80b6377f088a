"""Backends, devices and JAX's client.

With the other files of this folder, this file is the only user of JAX's internals.

tests/python/test_jax_compat.py tests the parts of JAX that these functions rely on.
"""

import atexit
import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import importlib
import os
import pathlib
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax._src.lib import Device as Device  # jax.Device, which pyright takes for a variable

from jaxhet._errors import UsageError
from jaxhet._jax import hooks, jaxlib
from jaxhet._jax.hooks import Hook as Hook
from jaxhet._jax.jaxlib import HEARTBEAT_TIMEOUT_S
from jaxhet._jax.replacements import install

_FOREVER_S = 7 * 24 * 3600
_CHECK_S = 0.02  # between two checks of a job while JAX blocks
_PASSES = ("jaxhet_decompose", "jaxhet_bridge")  # names in XLA
_SIGACTION_BYTES = 256  # more than any Linux has


def versions() -> dict[str, str]:
    """The versions that must be equal in the whole job."""
    return {"jax": jax.__version__, "jaxlib": jaxlib.VERSION}


def require_supported_jax() -> None:
    """Checks that this JAX can run our passes.

    Raises:
      UsageError: JAX is too old, or has no hook for HLO passes.
    """
    jaxlib.require_supported("jax", jax.__version__)
    try:
        from jax.extend import xla

        _ = xla.register_hlo_module_transformation
    except (ImportError, AttributeError):
        raise UsageError(
            f"jax {jax.__version__} has no hook for HLO passes; install a version that jaxhet was"
            " tested with"
        ) from None


def connect_client(
    address: str,
    num_processes: int,
    process: int,
    credentials: Mapping[str, Any],
    proxy: str,
) -> Any:
    """Connects this process to the coordination service and makes it JAX's own.

    Like `jax.distributed.initialize`. Blocks until every process of the job has joined.

    Args:
      address: Address of the service.
      num_processes: Number of processes of the job.
      process: This process.
      credentials: Arguments for mutual TLS, of `jaxhet/_net/certificates.py`.
      proxy: URL of the HTTP proxy to connect through.
    """
    from jax._src import distributed
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    # gRPC takes a proxy from the environment alone, when the client is made.
    with _environment({"grpc_proxy": proxy, "no_grpc_proxy": ""}):
        client = _jax.get_distributed_runtime_client(
            address,
            process,
            init_timeout=_FOREVER_S,
            heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
            shutdown_timeout=5,
            shutdown_on_destruction=False,
            use_compression=True,
            **credentials,
        )
    client.connect()
    state = distributed.global_state
    state.client = client
    state.coordinator_address = address
    state.process_id = process
    state.num_processes = num_processes
    _sigterm_before[:] = [(_sigterm_action(), signal.getsignal(signal.SIGTERM))]
    state.initialize_preemption_sync_manager()
    return client


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables inside the context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# Action of SIGTERM before JAX's preemption notifier caught it, for the C library and for Python.
_sigterm_before: list[tuple[bytes, Any]] = []


def _sigterm_action(new: bytes | None = None) -> bytes:
    """The C library's `struct sigaction` of SIGTERM; sets it to `new` if that is given."""
    old = ctypes.create_string_buffer(_SIGACTION_BYTES)
    ctypes.CDLL(None).sigaction(int(signal.SIGTERM), new, old)
    return old.raw


def let_sigterm_end_the_process() -> None:
    """Restores the action of SIGTERM, which JAX's preemption notifier only records.

    The notifier's handler is not Python's. A handler that the program has set since stays.
    """
    for action, handler in _sigterm_before:
        if signal.getsignal(signal.SIGTERM) == handler:
            _sigterm_action(action)


def bind_gloo(address: str) -> None:
    """Makes the CPU backend's own collectives listen on `address` alone, before the backend exists.

    By default Gloo listens on the address that the host name resolves to.
    """
    from jax._src import xla_bridge
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    def make_backend() -> Any:
        client = coordination_client()  # a client kept here makes gRPC wait 2 s when Python exits
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=address)
        return xla_bridge.make_cpu_client(gloo)

    if jax.config.jax_cpu_collectives_implementation == "gloo":
        xla_bridge.register_backend_factory("cpu", make_backend, priority=0, fail_quietly=False)


def coordination_client() -> Any:
    """This process's client of the coordination service, with its key-value store; None: no job."""
    from jax._src import distributed

    return distributed.global_state.client


def cancel_barriers() -> None:
    """Ends all waits at barriers of the coordination service, with an error."""
    if (client := coordination_client()) is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.shutdown()


def disconnect_client() -> None:
    """Takes this process out of the coordination service."""
    from jax._src import distributed

    distributed.global_state.shutdown()


def abandon_client_in_child() -> None:
    """In a forked child: keeps its copy of the client, whose end would disturb the parent's."""
    from jax._src import distributed

    state = distributed.global_state
    for held in (state.client, state.preemption_sync_manager):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    state.client = state.preemption_sync_manager = None


def backend_exists() -> bool:
    """Whether a JAX backend was created in this process."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def memory_on(device: Device, num_bytes: int) -> jax.Array:
    """An array of `num_bytes` bytes on a device of this process. Its memory is allocated."""
    return jax.device_put(np.zeros(num_bytes, np.uint8), device).block_until_ready()


def local_topology_key(topology: tuple[str, str], process: int) -> str:
    """Where a process puts a message about its devices, in the key-value store.

    Args:
      topology: Names of a platform's plugin: the one it is loaded under, and its own.
      process: The process.
    """
    plugin, platform = topology
    return f"{plugin}:local_topology/{platform}/{process}"


def global_topology_key(topology: tuple[str, str]) -> str:
    """Key under which process 0 publishes the devices of all processes."""
    plugin, platform = topology
    return f"{plugin}:global_topology/{platform}"


def unblock_backend(
    client: Any, topologies: Iterable[tuple[str, str]], processes: Iterable[int]
) -> None:
    """Makes the topology exchange of a backend that waits for a dead process fail at once.

    Writes invalid answers for all messages that are still missing.
    """
    numbers = list(processes)
    for topology in topologies:
        keys = (local_topology_key(topology, process) for process in numbers)
        for key in (*keys, global_topology_key(topology)):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                client.key_value_set_bytes(key, b"\xff")


def device_wait() -> Callable[[float], bool]:
    """Makes a function that waits until this process's devices are idle.

    Each device gets one more program, which it runs last. The programs are loaded here. While a
    device waits for a peer, a driver that loads a program would wait too, and nothing could end
    the device's wait.

    Returns:
      A function that waits for at most so long, and returns whether all devices were done.
    """
    zeros = [jax.device_put(0.0, device) for device in jax.local_devices()]
    programs = [jax.jit(lambda x: x + 1).lower(zero).compile() for zero in zeros]

    def wait(timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        try:
            last = [program(zero) for program, zero in zip(programs, zeros, strict=True)]
            while not all(array.is_ready() for array in last):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
        except (RuntimeError, ValueError):  # a device that failed
            return False
        return True

    wait(_FOREVER_S)
    return wait


def wait_for_arrays(timeout_s: float) -> bool:
    """Waits until the arrays of this process that still exist are computed, on every device.

    Needed on CPUs, where a device may run programs in another order than they were given to it.

    Returns:
      Whether all of them are computed.
    """
    deadline = time.monotonic() + timeout_s
    for array in jax.live_arrays():
        with contextlib.suppress(RuntimeError, ValueError):  # deleted meanwhile, or failed
            while not array.is_ready():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
    return True


def skip_exit_waits() -> None:
    """Makes JAX's exit hooks, which wait for devices without limit, do nothing."""
    from jax._src import api, dispatch

    atexit.unregister(dispatch.wait_for_tokens)
    atexit.unregister(api.clean_up)


def forget_failed_callbacks() -> None:
    """Waits for callbacks, and forgets the errors that JAX's exit hooks would raise again.

    A hook that raises does not close JAX's backends.
    """
    from jax._src import dispatch

    with contextlib.suppress(RuntimeError, ValueError):
        jax.effects_barrier()
    dispatch.runtime_tokens.clear()


def refuse_shared_programs() -> None:
    """Checks that JAX makes each process compile its own programs.

    Raises:
      UsageError: JAX is configured to send one process's program to all others.
    """
    if jax.config.jax_share_binary_between_hosts:
        raise UsageError(
            "jax_share_binary_between_hosts gives all processes one island's program; turn it"
            " off in a job of several islands"
        )


def register_passes(pre: Hook, post: Hook, platform: str) -> None:
    """Registers the two compiler passes with XLA's hook."""
    from jax.extend import xla

    stages = (xla.PipelineStage.PRE_SCHEDULER, xla.PipelineStage.POST_SCHEDULER)
    for name, hook, stage in zip(_PASSES, hooks.raising((pre, post)), stages, strict=True):
        xla.register_hlo_module_transformation(hook, name=name, stage=stage, platforms=platform)


def serialized_modules(executable: Any) -> list[bytes]:
    """The serialized HloModuleProtos of an executable of XLA."""
    return [module.as_serialized_hlo_module_proto() for module in executable.hlo_modules()]


def prepare_to_compile_only() -> None:
    """Makes the CPU JAX's only backend, and lets every compilation run the passes.

    Before JAX has a backend.
    """
    from jax._src import xla_bridge

    xla_bridge._plugins_registered = True  # they are not looked for any more
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)


def register_unused_handlers(targets: tuple[str, ...], platform: str) -> None:
    """Registers handlers that never run: compilers refuse custom calls without one."""
    from jaxlib.cpu import _lapack  # pyright: ignore[reportAttributeAccessIssue]

    handler = next(h for name, h in _lapack.registrations().items() if name.endswith("_ffi"))
    for target in targets:
        jax.ffi.register_ffi_target(target, handler, platform=platform)


def cpu_devices(count: int) -> list[Device]:
    """Creates JAX's CPU backend with `count` devices."""
    jax.config.update("jax_num_cpu_devices", count)
    return jax.devices()


def load_compiler(vendor: str, library: pathlib.Path, extension: str, pre: Hook, post: Hook) -> Any:
    """Loads a vendor's PJRT plugin to compile with, on a machine without the vendor's GPUs.

    Args:
      vendor: "cuda" or "rocm".
      library: The plugin.
      extension: Module that registers custom calls with it.
      pre: The first compiler pass.
      post: The second one.

    Returns:
      Its C API.
    """
    from jax._src.lib import _xla, xla_client  # pyright: ignore[reportPrivateImportUsage]

    c_api = xla_client.load_pjrt_plugin_dynamically(vendor, str(library))
    xla_client.initialize_pjrt_plugin(vendor)
    register = importlib.import_module(extension).register_custom_call_target
    xla_client.register_custom_call_handler(vendor.upper(), functools.partial(register, c_api))
    named = zip(_PASSES, hooks.raising((pre, post)), strict=True)
    for stage, (name, hook) in enumerate(named):
        _xla.register_xla_transform_c_api(c_api, name, stage, hook)
    return c_api


def compile_only_devices(
    c_api: Any, vendor: str, target_config: str, topology: str
) -> list[Device]:
    """Devices to compile for; topology is islands x 1 x devices of each."""
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    return xla_client.make_c_api_device_topology(
        c_api, vendor, target_config=target_config, topology=topology
    )._make_compile_only_devices()


def guard_compilation_cache(
    salt: Callable[[tuple[int, ...]], str], accept: Callable[[bytes], bool], writes: bool
) -> None:
    """Makes JAX's persistent compilation cache safe for programs that the passes have changed.

    A hit skips the passes, JAX's key says nothing of them nor, on GPUs, of the device assignment,
    and only process 0 writes entries.

    Args:
      salt: Facts, besides JAX's key, that a program on the devices of these ids depends on. Called
        at every compilation.
      accept: Gets the compiled module of every hit before the program can run; on False the program
        is compiled.
      writes: Whether this process writes entries.
    """
    from jax._src import compilation_cache as cache

    # Plans hold source lines: an entry from before an edit is another program.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)

    @install("jax._src.compilation_cache:get_cache_key")
    def salted_key(get_key: Any, module: Any, devices: Any, *args: Any, **kwargs: Any) -> str:
        refuse_shared_programs()
        text = salt(tuple(device.id for device in devices.flat))
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return f"{get_key(module, devices, *args, **kwargs)}-{digest}"

    @install("jax._src.compilation_cache:get_executable_and_time")
    def accepted_executable(get: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        executable, seconds = get(*args, **kwargs)
        modules = serialized_modules(executable) if executable is not None else []
        if all(map(accept, modules)):
            return executable, seconds
        return None, None

    @install("jax._src.compiler:_cache_write")
    def write(_: Any, key: str, seconds: float, name: str, backend: Any, executable: Any) -> None:
        if not writes or seconds < jax.config.jax_persistent_cache_min_compile_time_secs:
            return
        try:
            cache.put_executable_and_time(key, name, executable, backend, int(seconds))
        except Exception as error:
            if jax.config.jax_raise_persistent_cache_errors:
                raise
            warnings.warn(f"can't write {name} to the compilation cache: {error}", stacklevel=2)


def module_text(module: bytes) -> str:
    """A serialized HloModuleProto as HLO text."""
    from jax._src.lib import hlo  # pyright: ignore[reportAttributeAccessIssue]

    return hlo.HloModule.from_serialized_hlo_module_proto(module).to_string()


def run_with_checks(function: Callable[[], Any], check: Callable[[], None]) -> Any:
    """Runs a blocking call of JAX on a thread, and calls `check` until it returns.

    Raises the error of `function` or of `check`.
    """
    result: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def body() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=body, name="jaxhet-blocking-call", daemon=True).start()
    while not concurrent.futures.wait([result], _CHECK_S).done:
        check()
    return result.result()


def plugin_problem(name: str, version: str) -> str:
    """Why this jaxlib would not use a vendor's plugin of that package and version, or ""."""
    from jaxlib import plugin_support

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fits = plugin_support.check_plugin_version(name.replace("-", "_"), jaxlib.VERSION, version)
    return "" if fits else str(caught[0].message)
