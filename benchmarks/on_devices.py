"""What the processes of several benchmarks do with their devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def chained(links: Sequence[tuple[Callable[[jax.Array], jax.Array], jax.Array]]) -> jax.Array:
    """Runs functions on their operands, each after the one before; the last elements of all.

    To be traced. Barriers carry the order: nothing but one element is copied between two links, and
    no compiler may merge or simplify them.
    """
    ends: list[jax.Array] = []
    for run, operand in links:
        x = operand
        if ends:
            x, ends[-1] = jax.lax.optimization_barrier((operand, ends[-1]))
        y = jax.lax.optimization_barrier(run(x))
        ends.append(y[-1:])
    return jnp.concatenate(ends)


def facts() -> dict[str, Any]:
    """What this process runs on."""
    return {
        "jax": jax.__version__,
        "device": jax.local_devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    }


def peak_bytes() -> int:
    """The most memory that a local device has had in use, where JAX says it; else 0."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max(one.get("peak_bytes_in_use", 0) for one in stats)
