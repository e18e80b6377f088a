"""Attention of `models` on a real GPU (attention_errors.py)."""

import pathlib

import pytest

from jaxhet._jax import jaxlib
from tests.gpu.scripts_on_gpus import ON_GPUS
from tests.support.commands import python


def test_chosen_attention_is_as_exact_as_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if jaxlib.installed_platform(None) != "cuda" or not jaxlib.count_gpus("cuda"):
        pytest.skip("no NVIDIA GPU with JAX's CUDA plugin")
    script = pathlib.Path(__file__).with_name("attention_errors.py")
    print(python(script, env=ON_GPUS).stdout)
