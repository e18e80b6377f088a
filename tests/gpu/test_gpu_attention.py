"""Attention of `models` on a real GPU (attention_errors.py)."""

import pathlib
import subprocess
import sys

import pytest

from jaxhet._jax import jaxlib


def test_chosen_attention_is_as_exact_as_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if jaxlib.installed_platform(None) != "cuda" or not jaxlib.count_gpus("cuda"):
        pytest.skip("no NVIDIA GPU with JAX's CUDA plugin")
    script = pathlib.Path(__file__).with_name("attention_errors.py")
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=script.parents[2],
        check=False,
        capture_output=True,
        text=True,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
