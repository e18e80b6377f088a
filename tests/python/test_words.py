"""Retired words stay retired: one word per idea, as in docs/explanation/glossary.md."""

import pathlib
import subprocess
from collections.abc import Iterable

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_PATTERNS = {  # extended regular expression -> the word in use
    r"\b(shard_)?keepers?\b": "replicas of a shard",
    r"drawn[ _]in\b": "absorbed",
    r"\b_?[Aa]dder\b": "ExchangeBuilder",
    r"(value|\bv|rows|mine|own|like|joined)\.by\(": "with_array",
    r"bucket\.together\b|def together\(": "bucket_all_reduces",
    r"scatter\.narrow\b|def _?narrow\(": "to_reduce_scatter",
    r"\b(came|came_[a-z]+)\b": "received, arrived",
    r"[Pp]atience|PATIENCE": "wait budget",
    r"[Cc]ulprit": "failed process",
    r"[Vv]erdict": "result",
    r"\b([Ss]tory|[Ss]tories)\b|_stor(y|ies)\b": "summary",
    r"\b[Bb]ur(y|ied|ies)\b": "leak on purpose",
    r"\b[Jj]udg|_judg|[a-z]Judg": "check",
    r"\b[Bb]lam(e|es|ed|ing)\b|[a-z]Blam|_blam": "attribute",
}
_SAMPLES = (
    "keepers shard_keepers was_drawn_in Adder(x) value.by(x) bucket.together(x) scatter.narrow(x)",
    "came came_result kMostPatience error.culprit() kVerdict the story Bury(x) Judge(peer)",
    "is_judged HandleBlaming error.blame",
)
_HISTORY = ("CHANGELOG.md", "tests/python/test_words.py")


def _found(root: pathlib.Path, option: str, patterns: Iterable[str]) -> list[str]:
    """The lines of files below `root`, as `file:line:text`, that match one of the patterns."""
    wanted = [argument for pattern in patterns for argument in ("-e", pattern)]
    excluded = [f":!{name}" for name in _HISTORY]
    command = ["git", "-c", "safe.directory=*", "grep", "-InE", option, *wanted]
    done = subprocess.run(
        [*command, "--", ".", *excluded], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def test_no_retired_word_is_in_the_tree() -> None:
    assert not _found(_ROOT, "--untracked", _PATTERNS)


@pytest.mark.parametrize("pattern", _PATTERNS)
def test_each_retired_word_is_found(pattern: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "sample.txt").write_text("\n".join(_SAMPLES))
    (tmp_path / "CHANGELOG.md").write_text("\n".join(_SAMPLES))
    found = _found(tmp_path, "--no-index", [pattern])
    assert found
    assert all(line.startswith("sample.txt:") for line in found)
