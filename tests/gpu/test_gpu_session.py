"""The session on real GPUs: two islands, also with a plugin of another name (mirror_double.py).

As `vendor` one island's devices are AMD's for the engine, too, by way of the double.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from benchmarks import gpus
from tools.programs import hip_double

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("double", ["", "mirror", "vendor"])
def test_session_on_gpus(double: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    if reason := gpus.why_fewer_than(2):
        pytest.skip(reason)
    for name, value in (hip_double() if double == "vendor" else {}).items():
        monkeypatch.setenv(name, os.pathsep.join(filter(None, (value, os.environ.get(name)))))
    launch = "-m jaxhet.cli launch --islands 2 --devices 1 --"
    result = subprocess.run(
        [
            *(sys.executable, *launch.split()),
            *(sys.executable, "tests/gpu/session_smoke.py"),
            *(["--double", double] if double else []),
        ],
        cwd=_ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    over_islands = re.findall(r".*NCCL INFO.* nranks (?!1\b).*", result.stdout + result.stderr)
    assert not over_islands, "XLA opened a communicator of its own over both islands"
