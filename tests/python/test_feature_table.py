"""The table of JAX's features: its tests exist, and errors in the sources have its words."""

import re

import pytest

from tests.support.jobs import ROOT

_PAGE = ROOT / "docs" / "reference" / "jax-features.md"
_ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in _PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| feature", "|---"))
]


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row[0][:40])
def test_tests_of_a_row_exist(row: list[str]) -> None:
    paths = re.findall(r"`(tests/[^`]*)`", row[-1])
    assert paths
    for path in paths:
        assert "def test_" in (ROOT / path).read_text()
