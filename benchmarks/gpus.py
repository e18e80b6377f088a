"""Asks the driver for this machine's NVIDIA GPUs; needs neither a JAX backend nor a build."""

import ctypes
import os


def visible() -> tuple[list[str], str]:
    """Names of GPUs for `CUDA_VISIBLE_DEVICES`, and the reason if there are none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return [], f"no NVIDIA driver: {error}"
    count = ctypes.c_int()
    if result := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return [], f"no GPU: the driver says {result}"
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = chosen.split(",") if chosen else [str(i) for i in range(count.value)]
    return names[: count.value], "" if count.value else "no GPU: the driver counts none"


def why_fewer_than(count: int) -> str:
    """Why a job of `count` GPUs can't run here; empty if it can."""
    names, reason = visible()
    return reason or ("" if len(names) >= count else f"{len(names)} GPU(s), and {count} are needed")


def shared_by(count: int) -> dict[str, str]:
    """Options that give a job `count` GPUs; where there are fewer, its processes share them."""
    names, _ = visible()
    fraction = 0.75 * min(1, len(names) / count)
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(names[i % len(names)] for i in range(count)),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{fraction:.3f}",
    }
