"""The device layer on real GPUs; `sh tests/gpu/run.sh` is the same without pytest."""

import pathlib
import subprocess

import pytest

from benchmarks import gpus

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.timeout(1800)
def test_device_layer_on_gpus():
    if reason := gpus.why_fewer_than(1):
        pytest.skip(reason)
    result = subprocess.run(
        ["sh", "tests/gpu/run.sh"], cwd=_ROOT, check=False, capture_output=True, text=True
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
