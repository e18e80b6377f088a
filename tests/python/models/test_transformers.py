"""Compares with `transformers` itself, in the environment that `tools/setup.sh slow` makes."""

import pathlib
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file

from models.huggingface import load, save
from tests.python.models.golden_models import FAMILIES, GOLDEN

_ROOT = pathlib.Path(__file__).parents[3]
_PYTHON = _ROOT / ".cache" / "transformers" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not _PYTHON.exists(), reason="no torch and transformers: tools/setup.sh slow installs them"
    ),
]


def make_golden(*arguments: str) -> None:
    script = _ROOT / "tests" / "python" / "models" / "make_golden.py"
    subprocess.run([_PYTHON, script, *arguments], check=True, timeout=280)


def test_golden_files_are_what_transformers_gives(tmp_path):
    make_golden(str(tmp_path))
    for path in GOLDEN.glob("*/*.safetensors"):
        made = load_file(tmp_path / path.relative_to(GOLDEN))
        for name, values in load_file(path).items():
            if name == "logits":
                np.testing.assert_allclose(made[name], values, atol=1e-5)
            elif name != "bfloat16_error":
                np.testing.assert_array_equal(made[name], values)


@pytest.mark.parametrize("family", FAMILIES)
def test_export_opens_in_transformers(family, tmp_path, make_mesh):
    config, params = load(GOLDEN / family, make_mesh(data=1))
    save(tmp_path, config, params, file_bytes=8000)
    shutil.copy(GOLDEN / family / "expected.safetensors", tmp_path)
    make_golden("--load", str(tmp_path))
    opened = load_file(tmp_path / "logits.safetensors")["logits"]
    np.testing.assert_allclose(
        opened, load_file(tmp_path / "expected.safetensors")["logits"], atol=1e-5
    )
