"""The data of training: tokens, one document after the other, from text or from shards."""

import dataclasses
import hashlib
import itertools
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.extras import shards
from models.extras.text import BYTES, Tokenizer, documents, is_plain

Tokens = npt.NDArray[Any]
# Values of `--data`: texts that come with every Python. In 3.12 they have 0.5 and 10 million bytes.
LANGUAGE_REFERENCE, STANDARD_LIBRARY = "language-reference", "standard-library"
# Folders that are no part of the standard library's text: Python's own tests, which not every
# installation has; character tables, which repeat each other; other packages.
_LEFT_OUT = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
# Tokens that are read at a time for their digest.
_HASHED = 1 << 22
# Tokens of a sample, and number of samples. Data with fewer tokens are digested as a whole.
_SAMPLE, _SAMPLES = 1 << 14, 256


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokens: a file is mapped, not read, and only touched pages are loaded.

    Attributes:
      name: name for messages, and part of `identity`.
      pieces: arrays of unsigned integers; the tokens are their concatenation.
      vocab: all tokens are smaller.
      tokenizer: digest of the tokenizer; empty for bytes.
      end: the token after each document, None if there is none.
    """

    name: str
    pieces: tuple[Tokens, ...]
    vocab: int = BYTES
    tokenizer: str = ""
    end: int | None = None

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(piece.size for piece in self.pieces))

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self._ends[-1] if self._ends else 0

    @property
    def identity(self) -> str:
        """Identity of a corpus, cheap to compute: name, size and tokenizer."""
        return ":".join(filter(None, (self.name, str(self.size), self.tokenizer)))

    def digest(self) -> str:
        """SHA-256 of all tokens as they are stored; of the text itself if they are bytes."""
        digest = hashlib.sha256()
        for piece in self.pieces:
            for start in range(0, piece.size, _HASHED):
                digest.update(np.ascontiguousarray(piece[start : start + _HASHED]))
        return digest.hexdigest()

    def sample(self) -> str:
        """Short digest of the size and of tokens at places all over: cheap for any size."""
        if self.size <= _SAMPLE * _SAMPLES:
            starts = range(0, self.size, _SAMPLE)
        else:
            starts = [(self.size - _SAMPLE) * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
        digest = hashlib.sha256(str(self.size).encode())
        for start in starts:
            digest.update(self.read(start, min(start + _SAMPLE, self.size)).astype("<i4"))
        return digest.hexdigest()[:16]

    def read(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Tokens [start, stop), int32."""
        return np.concatenate([piece.astype(np.int32) for piece in self._between(start, stop)])

    def head(self, number: int) -> "Corpus":
        """The first tokens, all if there are no more."""
        return dataclasses.replace(self, pieces=self._between(0, min(number, self.size)))

    def split(self, part: float) -> tuple["Corpus", "Corpus"]:
        """All but the last `part` (0 to 1) of the tokens, and that last part."""
        middle = self.size - round(self.size * part)
        halves = self._between(0, middle), self._between(middle, self.size)
        first, last = (dataclasses.replace(self, pieces=pieces) for pieces in halves)
        return first, last

    def _between(self, start: int, stop: int) -> tuple[Tokens, ...]:
        """Views of the tokens [start, stop), one for each piece."""
        views = []
        while start < stop:
            piece = bisect_right(self._ends, start)
            begin = self._ends[piece] - self.pieces[piece].size
            view = self.pieces[piece][start - begin : stop - begin]
            views.append(view)
            start += view.size
        return tuple(views)


def open_corpus(path: str | None = None, tokenizer: str | None = None) -> Corpus:
    """The corpus at `path`, or a text that comes with every Python: the language reference.

    `STANDARD_LIBRARY` in place of a path is the source text of the standard library. A folder holds
    shards (`models.extras.shards`). A file is text, JSONL or Parquet (`models.extras.text`).
    `tokenizer` is the path of a `tokenizer.json`; without it tokens are bytes, and a text file is
    mapped into memory. Every process tokenizes other files in its memory: use
    `python -m models.extras.tokenize` for much text.
    """
    if path in (None, LANGUAGE_REFERENCE):
        texts, name = [_language_reference()], "pydoc_data.topics"
    elif path == STANDARD_LIBRARY:
        texts, name = [_standard_library()], STANDARD_LIBRARY
    elif Path(path).is_dir():
        return _sharded(Path(path), tokenizer)
    elif tokenizer is None and is_plain(Path(path)):
        return Corpus(Path(path).name, (np.memmap(path, dtype=np.uint8, mode="r"),))
    else:
        texts, name = documents(Path(path)), Path(path).name
    return tokenized(name, texts, Tokenizer.load(tokenizer))


def tokenized(name: str, texts: Iterable[str], tokenizer: Tokenizer) -> Corpus:
    """A corpus in memory, of documents that end with the tokenizer's end.

    Args:
      name: Name of the corpus, for errors.
      texts: Documents, one string each.
      tokenizer: Tokenizer of the documents.
    """
    pieces = tuple(piece for piece in tokenizer.arrays(texts) if piece.size)
    return Corpus(name, pieces, tokenizer.vocab, tokenizer.digest, tokenizer.end)


def _language_reference() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _standard_library() -> str:
    """All source files of the standard library, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    files = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    kept = sorted((p.parts, path) for p, path in files if not _LEFT_OUT & {*p.parts[:-1]})
    return "".join(path.read_text(encoding="utf-8", errors="replace") for _, path in kept)


def _sharded(folder: Path, tokenizer: str | None) -> Corpus:
    index = shards.read_index(folder)
    if tokenizer is not None and Tokenizer.load(tokenizer).digest != index.tokenizer:
        raise ValueError(
            f"the shards in {folder} were made with another tokenizer than {tokenizer}: make them "
            f"anew with `python -m models.extras.tokenize --tokenizer {tokenizer}`, or name theirs "
            "(--tokenizer)."
        )
    pieces = tuple(shards.open_shards(folder, index))
    return Corpus(folder.resolve().name, pieces, index.vocab, index.tokenizer, index.end)
