"""Which share of a batch each island computes, from times and options alone: pure."""

import dataclasses
from collections.abc import Sequence

import jax

import jaxhet
from models.extras.options import Options

AXIS = "data"
EVEN, AUTO = "even", "auto"
# Times that differ by less are equal. A new split must make a step faster by this part.
_DRIFT, _LEAST_GAIN = 0.1, 0.03
# Numbers of windows of steps (`--log-every`). After so many windows in a row with other times,
# islands are measured again (one alone may be a stall), and after the second number in any case:
# an island that has become faster waits for the others, so that no time shows it.
_DRIFTED_WINDOWS, _LONGEST_TRUST = 2, 50


@dataclasses.dataclass(frozen=True)
class Cost:
    """Time of an island's microbatch, and of everything else in its step, in seconds."""

    microbatch: float
    fixed: float = 0.0

    def of(self, count: int) -> float:
        """Time of a number of microbatches."""
        return self.fixed + count * self.microbatch


def fit(times: dict[int, float]) -> Cost:
    """The cost that explains the times of two numbers of microbatches, which may have noise."""
    (few, few_s), (many, many_s) = sorted(times.items())
    slope = (many_s - few_s) / (many - few)
    microbatch = min(max(slope, 0.5 * many_s / many), many_s / many)
    return Cost(microbatch, many_s - many * microbatch)


class Controller:
    """Decides which shares a run has, from times alone.

    Attributes:
      counts: Number of microbatches of each position.
    """

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts = counts
        self._is_first = True
        self._begin()

    def _begin(self) -> None:
        self._windows: list[float] = []
        self._drifted = 0

    def is_due(self, seconds: float) -> bool:
        """Whether to measure again, after a window of steps.

        Args:
          seconds: Mean time of a step in the window.
        """
        self._windows.append(seconds)
        usual = min(self._windows[:2])  # the first one can have a compilation in it
        has_drifted = abs(seconds - usual) > _DRIFT * usual
        self._drifted = self._drifted + 1 if has_drifted and len(self._windows) > 2 else 0
        return self._drifted == _DRIFTED_WINDOWS or len(self._windows) == _LONGEST_TRUST

    def decide(self, costs: Sequence[Cost]) -> bool:
        """Chooses shares from a measurement; whether they are new.

        The first measurement decides. A later one must promise a step that is shorter by 3 %, so
        that noise does not move microbatches to and fro.

        Args:
          costs: Measured cost of each position.
        """
        self._begin()
        counts = jaxhet.balanced_split(
            sum(self.counts), [c.microbatch for c in costs], fixed=[c.fixed for c in costs]
        )
        least = 0.0 if self._is_first else _LEAST_GAIN
        self._is_first = False
        is_new = longest(costs, counts) < (1 - least) * longest(costs, self.counts)
        self.counts = counts if is_new else self.counts
        return is_new


def longest(costs: Sequence[Cost], counts: Sequence[int]) -> float:
    """Time of the slowest position, in seconds."""
    return max(cost.of(count) for cost, count in zip(costs, counts, strict=True))


def parse_counts(text: str, total: int, size: int) -> tuple[int, ...]:
    """Numbers of microbatches from `--balance`.

    Args:
      text: Numbers such as `3,1`; even and auto are equal numbers.
      total: Number of microbatches of a batch.
      size: Size of the mesh axis `data`.

    Raises:
      ValueError: The text has another form, or other numbers than fit.
    """
    if text in (EVEN, AUTO):
        return (total // size,) * size
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"--balance {text!r} is not auto, even, or numbers such as 3,1.")
    counts = tuple(int(word) for word in words)
    if len(counts) != size:
        raise ValueError(
            f"--balance {text} has {len(counts)} numbers: give one for each of the {size} "
            f"positions of the mesh axis {AXIS}."
        )
    if sum(counts) != total:
        raise ValueError(
            f"--balance {text} has the sum {sum(counts)}, and a batch has {total} microbatches "
            f"(--accumulate × {AXIS}={size}): choose numbers with this sum."
        )
    if min(counts) < 1:
        raise ValueError(
            f"--balance {text}: each position computes at least one microbatch; give more to those "
            "with 0, or leave their devices out of the job."
        )
    return counts


def parse_parts(options: Options) -> dict[str, int]:
    """Numbers of parts of a microbatch by island or platform, from `--parts`.

    Raises:
      ValueError: The text has another form, or batches have no unequal shares.
    """
    pairs = [part.partition("=") for part in options.parts.split(",")] if options.parts else []
    parts = {name: int(number) for name, _, number in pairs if name and number.isdecimal()}
    if len(parts) < len(pairs) or 0 in parts.values():
        raise ValueError(f"--parts {options.parts!r} is not of the form island1=2,rocm=4.")
    if parts and options.balance is None:
        raise ValueError(
            f"--parts {options.parts} without --balance: all islands compute equal parts; give "
            "--accumulate for less memory, or --balance even."
        )
    return parts


def num_microbatches(options: Options, mesh: jax.sharding.Mesh) -> int:
    """Microbatches of a batch over all islands, 0 without `--balance`.

    Raises:
      ValueError: The mesh or `--accumulate` leave nothing to balance.
    """
    if options.balance is None:
        return 0
    if AXIS not in mesh.shape or "stage" in mesh.shape:
        raise ValueError(
            f"--balance {options.balance} on --mesh {options.mesh}: microbatches are shared along "
            f"the axis {AXIS}, on a mesh without stages; give a mesh such as data=2,fsdp=-1."
        )
    if options.accumulate < 2:
        raise ValueError(
            f"--balance {options.balance} with --accumulate {options.accumulate}: microbatches are "
            "what islands share; give --accumulate 4 or more (the mean number of microbatches of "
            f"each position of {AXIS})."
        )
    total = options.accumulate * mesh.shape[AXIS]
    parse_counts(options.balance, total, mesh.shape[AXIS])
    return total
