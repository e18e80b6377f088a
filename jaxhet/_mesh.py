"""Meshes whose outer axes run over islands."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxhet import _session
from jaxhet._errors import UsageError
from jaxhet._jax.compat import Device


def make_mesh(
    axes: Mapping[str, int], *, devices: Sequence[Device] | None = None, **kwargs: Any
) -> jax.sharding.Mesh:
    """A plain `jax.sharding.Mesh` over all devices of the job, in island-aware order.

    Devices are ordered by island, process and id, and fill the mesh row by row: the last axes stay
    inside an island as far as their sizes allow, and the first ones cross islands. Works without
    `jaxhet.initialize` too.

    Args:
      axes: axis names and sizes, outermost first; one size may be -1: the remaining devices.
      devices: the devices to use, in this order; default: all.
      **kwargs: passed on to `Mesh` (`axis_types`).

    Raises:
      UsageError: the sizes don't multiply to the number of devices.

    Examples:
      `data` crosses the two islands, and `model` stays inside each of them:

      >>> mesh = jaxhet.make_mesh({"data": 2, "model": -1})
      >>> with jax.set_mesh(mesh):
      ...     x = jax.device_put(jax.numpy.ones((8, 4)), jax.P("data"))
    """
    chosen = list(devices) if devices is not None else ordered_devices()
    shape = _fill(axes, len(chosen))
    return jax.sharding.Mesh(np.array(chosen, dtype=object).reshape(shape), tuple(axes), **kwargs)


def ordered_devices() -> list[Device]:
    """All devices of the job by island, process and id."""
    session = _session.current()
    if session is None:
        return sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    return [device for island in session.islands for device in island.devices]


def _fill(axes: Mapping[str, int], num_devices: int) -> tuple[int, ...]:
    sizes = list(axes.values())
    if sizes.count(-1) == 1:
        rest = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = num_devices // rest if rest else 0
    if any(size < 1 for size in sizes) or math.prod(sizes) != num_devices:
        raise UsageError(
            f"mesh {dict(axes)} does not hold the job's {num_devices} devices; choose sizes whose"
            f" product is {num_devices}"
        )
    return tuple(sizes)
