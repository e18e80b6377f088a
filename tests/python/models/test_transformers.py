"""Compares with `transformers` itself, in the environment that `tools/setup.sh test` makes."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.python.models.golden_models import FAMILIES, GOLDEN, assert_same_bits, expected
from tests.python.models.reference import PYTHON, logits_of_exports, run_golden

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
