"""`jax.experimental.multihost_utils` over islands.

tests/multiprocess/test_jax_api.py tests it.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxhet._jax import compat
from jaxhet._jax.replacements import install

_SLICE_MS = 100  # time between looks for a failure


def synchronize_by(meet: Callable[[str], bool]) -> None:
    """Makes `sync_global_devices` call `meet`: threads of Orbax call it.

    In a thread that launches no exchanges it can't be one, which needs one order on all islands.

    Args:
      meet: Gets the name. If it returns False, JAX's own function is called.
    """

    @install("jax.experimental.multihost_utils:sync_global_devices")
    def synchronized(sync: Any, name: str) -> None:
        if not meet(name):
            sync(name)


def missing_at(
    meeting: str, process: int, num_processes: int, timeout_s: float, check: Callable[[], None]
) -> str:
    """Waits for all processes at JAX's coordination service.

    Args:
      meeting: Name that is used once.
      process: This process.
      num_processes: Size of the job.
      timeout_s: Longest wait.
      check: Called while it waits; what it raises is raised.

    Returns:
      The processes that have not come in time; "" if all have.
    """
    client, folder = compat.coordination_client(), f"jaxhet/meeting/{meeting}"

    def has_come(sign: str, deadline: float) -> bool:
        while time.monotonic() < deadline:
            check()
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # not yet
                client.blocking_key_value_get(f"{folder}/{sign}", _SLICE_MS)
                return True
        return False

    deadline = time.monotonic() + timeout_s
    if process != 0:
        client.key_value_set(f"{folder}/{process}", "here")
        return "" if has_come("all", deadline) else "0, or one that it waits for,"
    late = [i for i in range(1, num_processes) if not has_come(str(i), deadline)]
    if not late:
        client.key_value_set(f"{folder}/all", "here")
    return ", ".join(map(str, late))


def forget(meeting: str) -> None:
    """Deletes what `missing_at` has kept; call it when all processes have returned from there."""
    compat.coordination_client().key_value_delete(f"jaxhet/meeting/{meeting}/")


def allow_unequal_processes() -> None:
    """Makes `multihost_utils` work where processes have unequal numbers of devices.

    JAX lays out all devices as a rectangle of processes and their devices. Here the first device of
    each process holds what the process gives. `jax.device_put` of host values relies on it too.
    """
    first = {d.process_index: d for d in sorted(jax.devices(), key=lambda d: -d.id)}
    mesh = jax.sharding.Mesh(np.array([first[i] for i in sorted(first)], dtype=object), "processes")
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("processes",), ()))
    gather_rows = jax.jit(lambda x: x, out_shardings=whole)

    def gather(x: Any) -> np.ndarray:
        """Rows of all processes, in the order of processes."""
        own = jax.device_put(x, first[jax.process_index()])
        shape = (len(first) * x.shape[0], *x.shape[1:])
        y = gather_rows(jax.make_array_from_single_device_arrays(shape, rows, [own]))
        return np.asarray(y.addressable_data(0))

    @install("jax.experimental.multihost_utils:_handle_array_process_allgather")
    def gathered(gather_by_jax: Any, x: Any, tiled: bool) -> Any:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return gather_by_jax(x, tiled)
        x = np.asarray(x)
        return gather(x if tiled and x.ndim else x[None])

    @install("jax.experimental.multihost_utils:broadcast_one_to_all")
    def broadcast(_: Any, tree: Any, is_source: bool | None = None) -> Any:
        source = jax.process_index() == 0 if is_source is None else is_source
        place = int(np.argmax(gather(np.array([source]))))
        return jax.tree.map(lambda x: gather(np.asarray(x)[None])[place], tree)
