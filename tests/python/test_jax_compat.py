"""What `_jax_compat` relies on in JAX."""

import inspect
import socket
import time

import jax
import pytest
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax.extend import xla

from jaxhet import _jax_compat


def test_hook_has_two_stages() -> None:
    assert xla.PipelineStage.PRE_SCHEDULER != xla.PipelineStage.POST_SCHEDULER
    parameters = inspect.signature(xla.register_hlo_module_transformation).parameters
    assert set(parameters) == {"callback", "name", "stage", "platforms"}


def test_supported_jax_is_accepted() -> None:
    _jax_compat.require_supported_jax()


def test_global_state_has_the_fields_that_are_set() -> None:
    state = distributed.State()
    for name in ("client", "coordinator_address", "process_id", "num_processes"):
        assert hasattr(state, name)
    assert callable(state.initialize_preemption_sync_manager)


def test_backend_can_be_asked_for_without_making_one() -> None:
    assert callable(xla_bridge.backends_are_initialized)


@pytest.mark.parametrize(
    "name",
    [
        "jax_num_cpu_devices",
        "jax_cpu_collectives_implementation",
        "jax_cpu_enable_async_dispatch",
        "jax_enable_compilation_cache",
    ],
)
def test_option_exists(name: str) -> None:
    jax.config.update(name, jax.config._read(name))


def test_client_and_service_take_the_arguments_that_are_given() -> None:
    client = _jax.get_distributed_runtime_client.__doc__ or ""
    service = _jax.get_distributed_runtime_service.__doc__ or ""
    assert all(f"{name}:" in client for name in ("init_timeout", "shutdown_on_destruction"))
    assert "recoverable:" in service


def test_service_listens_on_a_port_of_its_own() -> None:
    address, service = _jax_compat.start_coordination_service("127.0.0.1", 1)
    host, port = address.rsplit(":", 1)
    socket.create_connection((host, int(port)), timeout=5).close()
    service.shutdown()


def test_blocking_call_is_left_when_the_check_raises() -> None:
    def check() -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        _jax_compat.run_with_checks(lambda: time.sleep(0.5), check)
    assert _jax_compat.run_with_checks(lambda: 3, lambda: None) == 3
