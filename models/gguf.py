"""Reader of GGUF files, versions 2 and 3: metadata and tensors, each of which is decoded alone.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader is
our own because that of the package `gguf` checks no bounds: a damaged file ends in whatever numpy
raises, or in a loop that fills the memory. That package also needs an HTTP client.
"""

import dataclasses
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_MAX_AXES = 4

Blocks = np.ndarray


@dataclasses.dataclass(frozen=True)
class Type:
    """A type of tensors: blocks of `block` values in `num_bytes` bytes.

    `decode` makes values [n, block] of bytes [n, num_bytes].
    """

    name: str
    block: int
    num_bytes: int
    decode: Callable[[Blocks], np.ndarray]


def _q8_0(blocks: Blocks) -> np.ndarray:
    """A scale as float16, then a signed byte for each value."""
    return _floats(blocks[:, :2]) * blocks[:, 2:].view(np.int8)


def _q4_1(blocks: Blocks) -> np.ndarray:
    """A scale and a minimum as float16, then 4 bits for each value: first half low, second high."""
    pairs = blocks[:, 4:]
    nibbles = np.concatenate([pairs & 15, pairs >> 4], axis=1)
    return _floats(blocks[:, :2]) * nibbles + _floats(blocks[:, 2:4])


def _floats(halves: Blocks) -> np.ndarray:
    return halves.view("<f2").astype(np.float32)


# The types that are decoded, by their number in a file.
TYPES = {
    0: Type("F32", 1, 4, lambda blocks: blocks.view("<f4")),
    1: Type("F16", 1, 2, lambda blocks: blocks.view("<f2")),
    3: Type("Q4_1", 32, 20, _q4_1),
    8: Type("Q8_0", 32, 34, _q8_0),
    30: Type("BF16", 1, 2, lambda blocks: blocks.view(jnp.bfloat16)),
}
# Names of others, for errors.
_OTHER_TYPES = {
    number: name
    for first, names in {
        2: "Q4_0",
        6: "Q5_0 Q5_1",
        9: "Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S",
        20: "IQ4_NL IQ3_S IQ2_S IQ4_XS",
        24: "I8 I16 I32 I64 F64 IQ1_M",
        34: "TQ1_0 TQ2_0",
        39: "MXFP4",
    }.items()
    for number, name in enumerate(names.split(), first)
}

# Values of metadata: the code of `struct` by the number in a file; strings and arrays.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file: its type, its shape (the last axis is contiguous) and its first byte."""

    name: str
    type: Type
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the last axis."""
        return self.shape[-1] // self.type.block * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes


class File:
    """A GGUF file. It is mapped, not read: the host holds what `read` returns.

    Attributes:
      path: path of the file.
      metadata: numbers, strings and lists of them, by key.
      tensors: by name.

    Raises:
      ValueError: The file is not GGUF, is damaged, or has a tensor type that is not in `TYPES`.
      OSError: The file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError(f"{path} is no GGUF file: it does not begin with GGUF.")
        self._data = np.memmap(path, np.uint8, "r")
        cursor = _Cursor(path, memoryview(self._data))
        num_tensors, num_values = _counts(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string("a key of metadata")
            if key in self.metadata:
                raise cursor.damage(f"it has the key {key!r} twice")
            self.metadata[key] = cursor.value(key)
        tensors = [_tensor(cursor) for _ in range(num_tensors)]
        start = cursor.aligned(self.metadata.get(_ALIGNMENT, 32), tensors)
        self.tensors: dict[str, Tensor] = {}
        for tensor in tensors:
            placed = dataclasses.replace(tensor, start=start + tensor.start)
            if tensor.name in self.tensors:
                raise cursor.damage(f"it has the tensor {tensor.name!r} twice")
            if placed.start + placed.num_bytes > cursor.size:
                raise cursor.damage(f"it ends before the tensor {tensor.name!r} does")
            self.tensors[tensor.name] = placed

    def read(self, name: str, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
        """A tensor, or those places of its first axis; quantized ones are float32."""
        tensor = self.tensors[name]
        whole = self._data[tensor.start : tensor.start + tensor.num_bytes]
        shape = tensor.shape
        if len(shape) > 1:
            whole = whole.reshape(shape[0], -1)[rows]
            shape = (len(whole), *shape[1:])
        blocks = np.ascontiguousarray(whole).reshape(-1, tensor.type.num_bytes)
        values = tensor.type.decode(blocks).reshape(shape)
        return values if len(shape) > 1 else values[rows]


def find(path: Path) -> Path | None:
    """The GGUF file that `path` names, or that a folder without a `config.json` holds, if any.

    Raises:
      ValueError: The folder holds several GGUF files.
    """
    if path.suffix == SUFFIX and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path} holds several GGUF files: give the path of one of {names}.")
    return found[0] if found else None


class _Cursor:
    """A place in the header of a file, which is read from there on. No read is out of bounds."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self._data, self._place = path, data, 0

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self._data)

    def damage(self, what: str) -> ValueError:
        """The error for a file of which that is true."""
        return ValueError(f"{self.path} is damaged: {what}. Copy or download it again.")

    def take(self, num_bytes: int, what: str) -> memoryview:
        """The next bytes, which are a part of `what`."""
        end = self._place + num_bytes
        if end > self.size:
            raise self.damage(f"it ends inside {what}")
        taken, self._place = self._data[self._place : end], end
        return taken

    def number(self, code: str, what: str) -> Any:
        """The next number; `code` is that of `struct`."""
        return struct.unpack("<" + code, self.take(struct.calcsize(code), what))[0]

    def string(self, what: str) -> str:
        """The next string."""
        text = self.take(self.number("Q", what), what)
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError:
            raise self.damage(f"{what} is not UTF-8") from None

    def value(self, key: str) -> Any:
        """The next value of metadata, which is that of a key."""
        kind = self.number("I", key)
        if kind != _ARRAY:
            return self._scalar(kind, key)
        kind, count = self.number("I", key), self.number("Q", key)
        if kind in _NUMBERS:
            dtype = np.dtype("<" + _NUMBERS[kind])
            return np.frombuffer(self.take(count * dtype.itemsize, key), dtype).tolist()
        # A scalar has a byte at least, so that a wrong count ends with the file.
        return [self._scalar(kind, key) for _ in range(count)]

    def _scalar(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind], key)
        if kind == _STRING:
            return self.string(key)
        if kind == _BOOL:
            return self.number("?", key)
        raise self.damage(f"the value of {key} has the unknown type {kind}")

    def aligned(self, alignment: Any, tensors: list[Tensor]) -> int:
        """The first byte of the tensors' data; checks that each of them is aligned."""
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.damage(f"{_ALIGNMENT} is {alignment!r} and no power of two")
        for tensor in tensors:
            if tensor.start % alignment:
                raise self.damage(f"the tensor {tensor.name!r} is not aligned to {alignment} bytes")
        return -(-self._place // alignment) * alignment


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Reads the beginning: how many tensors, and how many values of metadata, there are."""
    cursor.take(len(_MAGIC), "its first bytes")
    version = cursor.number("I", "its version")
    if version not in _VERSIONS:
        raise ValueError(
            f"{cursor.path} has version {version} of GGUF: take a file of version 2 or 3, whose "
            "numbers are little-endian."
        )
    return cursor.number("Q", "its counts"), cursor.number("Q", "its counts")


def _tensor(cursor: _Cursor) -> Tensor:
    """Reads an entry of the table of tensors; `start` is counted from the data's first byte."""
    name = cursor.string("the name of a tensor")
    what = f"the entry of the tensor {name!r}"
    num_axes = cursor.number("I", what)
    if not 1 <= num_axes <= _MAX_AXES:
        raise cursor.damage(f"the tensor {name!r} has {num_axes} axes, and not 1 to {_MAX_AXES}")
    shape = tuple(cursor.number("Q", what) for _ in range(num_axes))[::-1]
    kind, start = cursor.number("I", what), cursor.number("Q", what)
    found = TYPES.get(kind)
    if found is None:
        known = ", ".join(t.name for t in TYPES.values())
        raise ValueError(
            f"{cursor.path}: the tensor {name!r} has the type {_OTHER_TYPES.get(kind, kind)}, "
            f"which is not decoded here: take a file with no types but {known}."
        )
    if min(shape) < 1 or shape[-1] % found.block:
        raise cursor.damage(f"the tensor {name!r} of {found.name} has the shape {shape}")
    return Tensor(name, found, shape, start)
