"""Batches of a corpus that depend on nothing but seed, step and row."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from models.extras.corpus import Corpus

ORDERS = ("windows", "epochs")


@dataclasses.dataclass(frozen=True)
class Batches:
    """Rows of a corpus: row `r` of step `s` is a function of (seed, s, r) alone.

    A resumed run therefore sees what the first one would have seen, whatever its number of
    processes, and the position of the data is the step. A process makes only the rows of its own
    devices. `permute`, if not 0, is the seed of another order of the rows: the same loss, but for
    rounding.

    `order` is "windows": random windows, which may overlap; or "epochs": the corpus is cut into
    rows, and each is seen once in an epoch, in another order in each (Grain's `MapDataset`, whose
    shuffle takes no memory).
    """

    corpus: Corpus
    seed: int
    batch: int
    positions: int
    permute: int = 0
    order: str = "windows"

    def __post_init__(self) -> None:
        if self.corpus.size < self.positions + 1:
            raise ValueError(
                f"{self.corpus.name} has {self.corpus.size} tokens, too few for rows of "
                f"{self.positions} + 1: give a longer --data or a smaller --seq."
            )

    def rows(self, step: int, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Rows [start, stop) of a step, int32 [stop - start, positions + 1].

        Args:
          step: Number of the step, from 0.
          start: First row.
          stop: Row behind the last one.
        """
        begins = [self._begin(step, int(row)) for row in self._order()[start:stop]]
        return np.stack([self.corpus.read(b, b + self.positions + 1) for b in begins])

    def __call__(self, step: int, sharding: jax.sharding.Sharding) -> jax.Array:
        """The batch of a step as a global array, int32 [batch, positions + 1], split by rows."""
        shape = (self.batch, self.positions + 1)

        def local(index: tuple[slice, ...] | None) -> npt.NDArray[np.int32]:
            start, stop, _ = (index or (slice(None),))[0].indices(self.batch)
            return self.rows(step, start, stop)

        return jax.make_array_from_callback(shape, sharding, local)

    def shares(
        self,
        step: int,
        counts: Sequence[int],
        sizes: tuple[int, int],
        sharding: jax.sharding.Sharding,
    ) -> jax.Array:
        """The batch of a step in unequal shares, one after another in the order of its rows.

        Args:
          step: Number of the step, from 0.
          counts: Number of microbatches of each share.
          sizes: Room of a share in microbatches, and rows of a microbatch.
          sharding: Sharding of the array.

        Returns:
          int32 [shares, microbatches, rows, positions + 1]; zeros behind a share's microbatches.
        """
        most, rows = sizes
        shape = (len(counts), most, rows, self.positions + 1)
        begins = np.cumsum([0, *counts]) * rows

        def local(index: tuple[slice, ...] | None) -> npt.NDArray[np.int32]:
            index = index or (slice(None),) * 4
            shares, (start, stop, _) = range(*index[0].indices(shape[0])), index[2].indices(rows)
            part = np.zeros((len(shares), most, stop - start, shape[3]), np.int32)
            for i, share in enumerate(shares):
                for k in range(counts[share]):
                    begin = int(begins[share]) + k * rows
                    part[i, k] = self.rows(step, begin + start, begin + stop)
            return part

        return jax.make_array_from_callback(shape, sharding, local)

    def passes(self, steps: int) -> float:
        """Mean number of times that `steps` steps read each row of the corpus."""
        return steps * self.batch / self._num_rows

    def _order(self) -> npt.NDArray[np.int64]:
        rows = np.arange(self.batch)
        return np.random.default_rng(self.permute).permutation(rows) if self.permute else rows

    def _begin(self, step: int, row: int) -> int:
        """Index of a row's first token in the corpus."""
        if self.order == "epochs":
            return int(self._epochs[step * self.batch + row]) * self.positions
        # Philox (Salmon et al., 2011) has no state: its output depends on key and counter only.
        draw = int(np.random.Philox(key=self.seed, counter=[0, 0, row, step]).random_raw())
        return draw % (self.corpus.size - self.positions)

    @property
    def _num_rows(self) -> int:
        """Number of whole rows in the corpus."""
        return (self.corpus.size - 1) // self.positions

    @cached_property
    def _epochs(self) -> Any:
        """The number of the row of the corpus at each place of the endless order.

        Rows share a token: the last of one is given to the first of the next one as its input.
        """
        import grain  # pyright: ignore[reportMissingImports]

        return grain.MapDataset.range(self._num_rows).seed(self.seed).shuffle().repeat()


def segments(tokens: npt.NDArray[Any], end: int) -> npt.NDArray[np.int32]:
    """The number of the document in its row of each of tokens [rows, positions], int32.

    Documents end with the token `end` (`Corpus.end`). The model numbers them in the same way
    (`models.extras.documents`), if it is to keep them apart.
    """
    ends = (tokens == end).astype(np.int32)
    return np.cumsum(ends, axis=1, dtype=np.int32) - ends
