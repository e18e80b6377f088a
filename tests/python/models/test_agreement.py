"""Comparison of the processes of a run before the first step."""

import dataclasses
import pathlib
import re

import numpy as np
import pytest

from models.extras import agreement
from models.extras.corpus import Corpus
from models.extras.options import Options

_DIGEST = "0" * 16


def _corpus(tokens: np.ndarray, *ends: int) -> Corpus:
    return Corpus("text", tuple(np.split(tokens, ends)))


@pytest.mark.parametrize("size", [0, 1, 7, 1 << 14, (1 << 14) + 1, (1 << 22) + 3])
def test_sample_tells_tokens_and_sizes_apart_but_not_how_they_are_stored(size: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 250, size, np.uint8)
    corpus = _corpus(tokens)
    assert corpus.sample() == _corpus(tokens.astype(np.uint16), size // 3).sample()
    assert corpus.sample() != _corpus(np.append(tokens, np.uint8(1))).sample()
    for place in {0, size - 1} if size else ():
        other = tokens.copy()
        other[place] += 1
        assert corpus.sample() != _corpus(other).sample()


def test_every_option_is_compared_or_has_a_reason() -> None:
    names = {field.name for field in dataclasses.fields(Options)}
    assert agreement.MAY_DIFFER.keys() <= names
    assert all(agreement.MAY_DIFFER.values())


def test_parameters_are_compared_by_their_bytes(tmp_path: pathlib.Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder, content in zip(folders, (b"one", b"one", b"two"), strict=True):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
        (folder / "README.md").write_text(folder.name)
    first, same, other = (agreement.parameters(str(folder)) for folder in folders)
    assert first == same != other
    assert first.startswith("3 bytes, digest ")
    assert agreement.parameters(str(folders[0] / "model.safetensors")) == first


def test_difference_names_field_values_and_processes() -> None:
    def texts(*values: str) -> list[str]:
        return [_DIGEST + value for value in values]

    names = ["--seed", "the data", "--keep"]
    assert agreement.difference(names, [texts("0", "x", "2")] * 3) == ""
    found = agreement.difference(
        names, [texts("0", "x", "2"), texts("1", "x", "2"), texts("1", "x", "3")]
    )
    assert found == (
        "--seed (0 in process 0, 1 in processes 1, 2); --keep (2 in processes 0, 1, 3 in process 2)"
    )


def test_difference_of_long_texts_is_seen_by_their_digests() -> None:
    found = agreement.difference(["--stages"], [["0" * 16 + "same"], ["1" * 16 + "same"]])
    assert found == "--stages (same in process 0, same in process 1)"


def test_difference_names_a_few_of_many() -> None:
    names = [f"--option{i}" for i in range(9)]
    found = agreement.difference(names, [[_DIGEST + "1"] * 9, [_DIGEST + "2"] * 9])
    assert re.search(r"--option3 .*; and 5 more$", found)
    assert "--option4" not in found
