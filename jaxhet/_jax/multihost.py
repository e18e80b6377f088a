"""`jax.experimental.multihost_utils` over processes with unequal numbers of devices.

tests/multiprocess/test_jax_api.py tests it.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxhet._jax.replacements import install


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
