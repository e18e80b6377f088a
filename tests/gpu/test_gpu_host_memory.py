"""Arrays in host memory, and with layouts that a program chooses, in programs over two GPUs."""

import pathlib
import subprocess
import sys

import pytest

from benchmarks import gpus

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_arrays_have_the_memory_and_the_layout_that_the_program_says(
    monkeypatch: pytest.MonkeyPatch,
):
    if reason := gpus.why_fewer_than(2):
        pytest.skip(reason)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    launch = "-m jaxhet.cli launch --islands 2 --devices 1 --"
    program = "tests/multiprocess/host_memory.py"
    result = subprocess.run(
        [sys.executable, *launch.split(), sys.executable, program],
        cwd=_ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("all are right") == 2
