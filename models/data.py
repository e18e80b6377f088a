"""Byte-level text: a corpus, and batches that depend on nothing but seed, step and row."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text as bytes, uint8 [length]. A file is mapped, not read: only touched pages are loaded."""

    name: str
    text: npt.NDArray[np.uint8]

    @property
    def identity(self) -> str:
        """Tells one corpus from another, cheaply: name and size."""
        return f"{self.name}:{self.text.size}"


def open_corpus(path: str | None = None) -> Corpus:
    """The file at `path`, or the language reference that comes with every Python."""
    if path is not None:
        return Corpus(Path(path).name, np.memmap(path, dtype=np.uint8, mode="r"))
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return Corpus("pydoc_data.topics", np.frombuffer(text.encode(), dtype=np.uint8))


@dataclasses.dataclass(frozen=True)
class Batches:
    """Random windows of a corpus: row `r` of step `s` is a function of (seed, s, r) alone.

    A resumed run therefore sees what the first one would have seen, and a process makes only the
    rows of its own devices. `permute`, if not 0, is the seed of another order of the rows: the same
    loss, but for rounding.
    """

    corpus: Corpus
    seed: int
    batch: int
    positions: int
    permute: int = 0

    def __post_init__(self) -> None:
        if self.corpus.text.size < self.positions + 1:
            raise ValueError(
                f"{self.corpus.name} has {self.corpus.text.size} bytes, too few for windows of "
                f"{self.positions} + 1: give a longer --data or a smaller --seq."
            )

    def rows(self, step: int, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Rows [start, stop) of a step, int32 [stop - start, positions + 1]."""
        windows = [self._window(step, int(row)) for row in self._order()[start:stop]]
        return np.stack(windows).astype(np.int32)

    def __call__(self, step: int, sharding: jax.sharding.Sharding) -> jax.Array:
        """The batch of a step as a global array, int32 [batch, positions + 1], split by rows."""
        shape = (self.batch, self.positions + 1)

        def local(index: tuple[slice, ...] | None) -> npt.NDArray[np.int32]:
            start, stop, _ = (index or (slice(None),))[0].indices(self.batch)
            return self.rows(step, start, stop)

        return jax.make_array_from_callback(shape, sharding, local)

    def _order(self) -> npt.NDArray[np.int64]:
        rows = np.arange(self.batch)
        return np.random.default_rng(self.permute).permutation(rows) if self.permute else rows

    def _window(self, step: int, row: int) -> npt.NDArray[np.uint8]:
        # Philox (Salmon et al., 2011) has no state: its output is a function of key and counter.
        draw = int(np.random.Philox(key=self.seed, counter=[0, 0, row, step]).random_raw())
        start = draw % (self.corpus.text.size - self.positions)
        return self.corpus.text[start : start + self.positions + 1]
