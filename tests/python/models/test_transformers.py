"""Compares with `transformers` itself, in the environment that `tools/setup.sh test` makes."""

import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.python.models.golden_models import FAMILIES, GOLDEN, assert_same_bits, expected
from tests.python.models.reference import PYTHON, ROOT, logits_of_exports, run_golden

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="no torch and transformers: tools/setup.sh test installs them"
)


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
    opened = logits_of_exports(FAMILIES, tmp_path, make_mesh(data=1))
    for family in FAMILIES:
        assert_same_bits(GOLDEN / family, tmp_path / family)
        np.testing.assert_allclose(opened[family], expected(family)["logits"], atol=1e-5)


@pytest.mark.slow
def test_table_of_families_is_green(tmp_path):
    command = [sys.executable, "-m", "tests.python.models.family_table", tmp_path / "table.md"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=280)
    lines = (tmp_path / "table.md").read_text().splitlines()
    written = (ROOT / "models" / "reports" / "families.md").read_text().splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| `")]
    assert rows == [f"`{family}`" for family in FAMILIES]
    assert [line for line in lines if not line.startswith("| `")] == [
        line for line in written if not line.startswith("| `")
    ]
