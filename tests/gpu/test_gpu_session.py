"""The session on real GPUs: two islands, also with a plugin of another name (mirror_double.py)."""

import pathlib
import subprocess
import sys

import pytest

from jaxhet import _jax_compat

_ROOT = pathlib.Path(__file__).parents[2]


def _why_not() -> str:
    """Empty if there are two GPUs, and JAX's plugin for them."""
    if _jax_compat.installed_platform(None) != "cuda":
        return "no NVIDIA GPU with JAX's CUDA plugin"
    return "" if _jax_compat.count_gpus("cuda") > 1 else "one GPU only; two islands need two"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("double", [[], ["--double", "mirror"]], ids=["cuda", "mirror"])
def test_session_on_gpus(double: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if reason := _why_not():
        pytest.skip(reason)
    launch = "-m jaxhet.cli launch --islands 2 --devices 1 --"
    result = subprocess.run(
        [
            *(sys.executable, *launch.split()),
            *(sys.executable, "tests/gpu/session_smoke.py", *double),
        ],
        cwd=_ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
