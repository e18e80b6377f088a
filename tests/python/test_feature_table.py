"""The table of JAX's features: its tests exist, and errors in the sources have its words."""

import ast
import re

import pytest

from tests.support.jobs import ROOT

_PAGE = ROOT / "docs" / "reference" / "jax-features.md"
_ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in _PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| feature", "|---"))
]


def _texts() -> str:
    """All literal texts of the package, with a space where a value is inserted, and the engine."""
    found = [path.read_text() for path in (ROOT / "xla_plugin" / "engine").rglob("*.cc")]
    for path in (ROOT / "jaxhet").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(text)):
                    found.append(text)
                case ast.JoinedStr(values=parts):
                    texts = (p.value if isinstance(p, ast.Constant) else " " for p in parts)
                    found.append("".join(map(str, texts)))
    return "\n".join(found)


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row[0][:40])
def test_tests_of_a_row_exist(row: list[str]) -> None:
    paths = re.findall(r"`(tests/[^`]*)`", row[-1])
    assert paths
    for path in paths:
        assert "def test_" in (ROOT / path).read_text()


def test_words_of_refusals_are_in_the_sources() -> None:
    words = [row[1][1:-1] for row in _ROWS if row[1].startswith('"')]
    assert len(words) >= 9
    texts = _texts()
    assert not [text for text in words if text not in texts]


def test_refusals_have_a_test_of_their_words() -> None:
    """Some three words of the quotation stand in the test that the row names."""
    missing = []
    for feature, quoted, tests in (row for row in _ROWS if row[1].startswith('"')):
        words = quoted.strip('"').split()
        parts = [" ".join(words[i : i + 3]) for i in range(len(words) - 2)]
        sources = [(ROOT / p).read_text() for p in re.findall(r"`(tests/[^`]*)`", tests)]
        joined = re.sub(r'"\s*\n\s*[rf]*"', "", "\n".join(sources))
        if not any(part in joined for part in parts):
            missing.append(feature)
    assert not missing
