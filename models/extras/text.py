"""Text as documents, and tokenizers: bytes, or a `tokenizer.json` of the `tokenizers` library."""

import dataclasses
import hashlib
import importlib.util
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

BYTES = 256
FIELD = "text"
TOKENIZER = "tokenizer.json"
# Documents that are tokenized by one call, on all cores.
_TOGETHER = 1024
# Usual names of the token after a document, in the order in which they are tried.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


def is_plain(path: Path) -> bool:
    """Whether a file is text as it is."""
    return path.suffix not in _READERS


def documents(path: Path, field: str = FIELD) -> Iterator[str]:
    """The documents of a file: lines of .jsonl, rows of .parquet, or a whole file of other text.

    `field` is the member or column that holds the text. Raises ValueError for a file without it.
    """
    return _READERS.get(path.suffix, _text)(path, field)


def _text(path: Path, field: str) -> Iterator[str]:
    del field
    yield path.read_text(encoding="utf-8")


def _jsonl(path: Path, field: str) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[field]
            except (json.JSONDecodeError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise ValueError(
                    f"{path}, line {number}: no JSON object with a string {field!r}: correct the "
                    "line, or name the member with the text (--field of models.extras.tokenize)."
                )
            yield text


def _parquet(path: Path, field: str) -> Iterator[str]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{path} needs pyarrow, which is not installed: pip install pyarrow.")
    import pyarrow as pa  # pyright: ignore[reportMissingImports]
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from None
    with file:
        if field not in file.schema_arrow.names:
            raise ValueError(
                f"{path} has no column {field!r} but {', '.join(file.schema_arrow.names)}: name "
                "the one with the text (--field of models.extras.tokenize)."
            )
        kind = file.schema_arrow.field(field).type
        if kind not in (pa.string(), pa.large_string()):
            raise ValueError(
                f"{path}: column {field!r} has type {kind}, and not string: name the one with the "
                "text (--field of models.extras.tokenize)."
            )
        for batch in file.iter_batches(columns=[field]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)


_READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to tokens.

    Attributes:
      encode: documents to lists of tokens.
      vocab: all tokens are smaller.
      end: the token put after each document; None: documents follow one another.
      digest: SHA-256 of the tokenizer's file; empty for bytes.
    """

    encode: Callable[[list[str]], list[Any]]
    vocab: int
    end: int | None = None
    digest: str = ""

    @classmethod
    def load(cls, path: str | None, end: str | None = None) -> Self:
        """Tokenizer from a `tokenizer.json`; the byte tokenizer without a path.

        `end` is the text of the token after each document; by default one of the usual ones, if the
        vocabulary has it.

        Raises:
          ValueError: The file is of another format, or `end` is unknown.
        """
        if path is None and end is not None:
            raise ValueError(f"bytes have no token {end!r}: give --tokenizer, or no --end-token.")
        if path is None:
            return cls(lambda texts: [np.frombuffer(t.encode(), np.uint8) for t in texts], BYTES)
        text = Path(path).read_text(encoding="utf-8")
        library = _library(text, path)

        def encode(texts: list[str]) -> list[Any]:
            encoded = library.encode_batch_fast(texts, add_special_tokens=False)
            return [encoding.ids for encoding in encoded]

        ids = library.get_vocab()
        if end is not None and end not in ids:
            raise ValueError(f"{path} has no token {end!r}: give another --end-token.")
        found = ids[end] if end else next((ids[e] for e in _ENDS if e in ids), None)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return cls(encode, max(ids.values()) + 1, found, digest)

    def arrays(self, texts: Iterable[str]) -> Iterator[npt.NDArray[np.uint32]]:
        """The tokens of many documents at a time, uint32, with the end after each."""
        end = [] if self.end is None else [self.end]
        for some in itertools.batched(texts, _TOGETHER):
            parts = [part for tokens in self.encode(list(some)) for part in (tokens, end)]
            yield np.concatenate([np.asarray(part, np.uint32) for part in parts])


@dataclasses.dataclass(frozen=True)
class Codec:
    """One text to tokens, with those that the model expects around it, and back.

    Attributes:
      encode: text to tokens.
      decode: tokens to text, without special tokens.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]

    @classmethod
    def load(cls, path: Path) -> Self:
        """The codec of a `tokenizer.json`. Raises ValueError for another file."""
        library = _library(path.read_text(encoding="utf-8"), str(path))
        return cls(lambda text: library.encode(text).ids, lambda ids: library.decode(list(ids)))


def find_tokenizer(folder: Path) -> Path | None:
    """The `tokenizer.json` of a model's folder, if it has one."""
    path = folder / TOKENIZER
    return path if path.exists() else None


def byte_tokenizer_json() -> str:
    """A `tokenizer.json` whose tokens are the bytes of a text in UTF-8.

    It is a byte-level BPE without merges. GPT-2's table gives each byte a printable character:
    its own in Latin-1 if that is printable, else the next one above 255.
    """
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, BYTES)}
    above = itertools.count(BYTES)
    vocabulary = {chr(byte if byte in own else next(above)): byte for byte in range(BYTES)}
    cut = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    contents = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": cut,
        "post_processor": None,
        "decoder": cut,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    return json.dumps(contents, indent=2)


def _library(text: str, path: str) -> Any:
    """The `tokenizers.Tokenizer` of a file's text, without limits of length that it may set."""
    if importlib.util.find_spec("tokenizers") is None:
        raise ValueError(f"{path} needs tokenizers: pip install tokenizers.")
    import tokenizers  # pyright: ignore[reportMissingImports]

    try:
        found = tokenizers.Tokenizer.from_str(text)
        found.no_truncation()
        found.no_padding()
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{path} is no tokenizer.json of tokenizers: {error}.") from None
    return found
