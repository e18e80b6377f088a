"""Compares with `transformers` itself, in the environment that `tools/setup.sh test` makes."""

import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file

from models.huggingface import load, save
from tests.python.models.golden_models import FAMILIES, GOLDEN, assert_same_bits, expected
from tests.support.jobs import ROOT

PYTHON = ROOT / ".cache" / "transformers" / "bin" / "python"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="no torch and transformers: tools/setup.sh test installs them"
)


def run_golden(*arguments: str) -> None:
    """Runs `make_golden.py` in that environment."""
    script = ROOT / "tests" / "python" / "models" / "make_golden.py"
    subprocess.run([PYTHON, script, *arguments], check=True, timeout=280)


@pytest.mark.slow
def test_golden_files_are_what_transformers_gives(tmp_path):
    run_golden(str(tmp_path))
    for path in GOLDEN.glob("*/*.safetensors"):
        made = load_file(tmp_path / path.relative_to(GOLDEN))
        for name, values in load_file(path).items():
            if name == "logits":
                np.testing.assert_allclose(made[name], values, atol=1e-5)
            elif name != "bfloat16_error":
                np.testing.assert_array_equal(made[name], values)


@pytest.mark.slow
def test_exports_of_all_families_open_in_transformers_and_have_the_same_bits(tmp_path, make_mesh):
    for family in FAMILIES:
        config, params = load(GOLDEN / family, make_mesh(data=1))
        save(tmp_path / family, config, params, file_bytes=8000)
        shutil.copy(GOLDEN / family / "expected.safetensors", tmp_path / family)
        assert_same_bits(GOLDEN / family, tmp_path / family)
    run_golden("--load", *(str(tmp_path / family) for family in FAMILIES))
    for family in FAMILIES:
        found = load_file(tmp_path / family / "logits.safetensors")["logits"]
        np.testing.assert_allclose(found, expected(family)["logits"], atol=1e-5)
