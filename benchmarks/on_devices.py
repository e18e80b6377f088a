"""Common work of the benchmarks' processes on their devices."""

from typing import Any

import jax


def facts() -> dict[str, Any]:
    """The hardware and software of this process."""
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
