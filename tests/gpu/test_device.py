"""The device layer on real GPUs; `sh tests/gpu/run.sh` is the same without pytest."""

import ctypes
import pathlib
import subprocess

import pytest

_ROOT = pathlib.Path(__file__).parents[2]


def _why_no_gpu() -> str:
    """Empty if there is a GPU. Asked of the driver itself: a build takes its time."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no NVIDIA driver: {error}"
    count = ctypes.c_int()
    result = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return "" if result == 0 and count.value else f"no GPU: the driver says {result}"


@pytest.mark.timeout(1800)
def test_device_layer_on_gpus():
    if reason := _why_no_gpu():
        pytest.skip(reason)
    result = subprocess.run(
        ["sh", "tests/gpu/run.sh"], cwd=_ROOT, check=False, capture_output=True, text=True
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
