"""The variables that `jax.distributed.initialize` reads itself."""

from jaxhet._clusters.cluster import Environ, Found, number, numbers

_TEXTS = {
    "JAX_COORDINATOR_ADDRESS": "coordinator_address",
    "JAX_COORDINATOR_BIND_ADDRESS": "coordinator_bind_address",
}
_DEVICES = "JAX_LOCAL_DEVICE_IDS"
_PARTITION = "JAX_PARTITION_INDEX"


def find(environ: Environ) -> Found:
    """Options found in JAX's own variables; empty where no variable is set."""
    found: Found = {option: environ[name] for name, option in _TEXTS.items() if environ.get(name)}
    if environ.get(_DEVICES):
        found["local_device_ids"] = tuple(numbers(environ, _DEVICES, ","))
    if environ.get(_PARTITION):
        found["partition_index"] = number(environ, _PARTITION)
    return found
