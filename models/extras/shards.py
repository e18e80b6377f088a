"""Tokens on disk, as they are mapped into memory: a folder of shards and an index.

A shard is a file of unsigned integers, little-endian, without header: the tokens of one document
after the other. `index.json` says what they are:

    {"format": "jaxhet-tokens-1", "dtype": "uint16", "vocab": 50257, "end": 50256,
     "tokenizer": "<SHA-256 of tokenizer.json>", "shards": [["00000.bin", 134217728], ...]}

`end` is the token after each document (null: none), `tokenizer` is empty for bytes, and `shards`
has the number of tokens of each file. The index is written last: without one, a folder is not
complete.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FORMAT = "jaxhet-tokens-1"
INDEX = "index.json"


@dataclasses.dataclass(frozen=True)
class Index:
    """The contents of `index.json`, but for its format."""

    dtype: str
    vocab: int
    end: int | None
    tokenizer: str
    shards: tuple[tuple[str, int], ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens of all shards."""
        return sum(size for _, size in self.shards)


def dtype_for(vocab: int) -> str:
    """The narrowest of the two types of shards that holds all tokens of a vocabulary."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def write(folder: Path, index: Index, arrays: Iterable[npt.NDArray[Any]], longest: int) -> Index:
    """Writes shards, then the index.

    Args:
      folder: Folder to write to, empty or not yet there.
      index: Index without the shards.
      arrays: Arrays of tokens.
      longest: Number of tokens of a shard; the last shard may be shorter.

    Returns:
      The index with the shards.

    Raises:
      ValueError: The folder holds anything.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give a new folder as --out.")
    written = []
    for number, shard in enumerate(_chunks(arrays, longest)):
        name = f"{number:05}.bin"
        shard.astype(f"<{np.dtype(index.dtype).str[1:]}").tofile(folder / name)
        written.append((name, shard.size))
    index = dataclasses.replace(index, shards=tuple(written))
    text = json.dumps({"format": FORMAT, **dataclasses.asdict(index)}, indent=1) + "\n"
    temporary = folder / f"{INDEX}.tmp"
    temporary.write_text(text)
    os.replace(temporary, folder / INDEX)
    return index


def read_index(folder: Path) -> Index:
    """The index of a folder.

    Raises:
      ValueError: The index is missing or of another format.
    """
    path = folder / INDEX
    if not path.exists():
        raise ValueError(
            f"{folder} has no {INDEX}: it holds no complete shards; make them with "
            "python -m models.extras.tokenize."
        )
    contents = json.loads(path.read_text())
    if contents.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not of the format {FORMAT}: make the shards anew.")
    shards = tuple((name, size) for name, size in contents.pop("shards"))
    return Index(**contents, shards=shards)


def open_shards(folder: Path, index: Index) -> Iterator[npt.NDArray[Any]]:
    """The shards, mapped.

    Raises:
      ValueError: A file is not as long as the index says.
    """
    dtype = np.dtype(index.dtype).newbyteorder("<")
    for name, size in index.shards:
        path = folder / name
        found = path.stat().st_size
        if found != size * dtype.itemsize:
            raise ValueError(
                f"{path} has {found} bytes, but {INDEX} says {size} tokens of {dtype.itemsize}: "
                "copy it again, or make the shards anew."
            )
        yield np.memmap(path, dtype=dtype, mode="r")


def _chunks(arrays: Iterable[npt.NDArray[Any]], longest: int) -> Iterator[npt.NDArray[Any]]:
    """The same tokens in arrays of `longest`, and a shorter last one."""
    waiting: list[npt.NDArray[Any]] = []
    for array in arrays:
        waiting.append(array)
        if sum(w.size for w in waiting) < longest:
            continue
        whole = np.concatenate(waiting)
        full = whole.size // longest * longest
        yield from whole[:full].reshape(-1, longest)
        waiting = [whole[full:]]
    if waiting and (rest := np.concatenate(waiting)).size:
        yield rest
