"""Slices (partitions), JAX's words for islands; uses JAX's internals, as `_jax/compat.py` does.

tests/python/test_jax_compat.py tests what the functions rely on.
"""

from collections.abc import Mapping
from typing import Any

from jaxhet._jax.replacements import put


def set_partitions(partitions: Mapping[int, int], process: int, platform: str) -> None:
    """Puts the devices of each process into a partition (slice), before JAX's backend exists.

    Plugins of GPUs get the partitions as options. On CPUs XLA always makes a slice of each host.

    Args:
      partitions: The partition of each process.
      process: This process.
      platform: The devices' platform.
    """
    from jax._src import distributed

    distributed.global_state.partition_index = partitions[process]
    if platform == "cpu":
        of_device = property(lambda device: partitions[device.process_index])
        put("jax._src.lib:Device.slice_index", of_device)


def accept_in_make_mesh() -> None:
    """Makes `jax.make_mesh` accept devices of several slices, also where it was imported before.

    JAX's function refuses them by a call of `hasattr`. That name is replaced in its module:
    programs may hold the function itself already.
    """

    def has_attribute(value: Any, name: str) -> bool:
        return name != "slice_index" and hasattr(value, name)

    put("jax._src.sharding_impls:hasattr", has_attribute)
