"""Meshes and shares that islands could train with, and the time of a step with each: pure.

The time of a step is the time of the slowest island alone plus that of the exposed exchanges.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import jaxhet
from models.configs import PIPELINES, Config
from models.extras import staged
from models.extras.shares import Cost, longest

# The mesh axis inside an island, beside one that crosses islands.
INNER = ("data", "fsdp", "model")


@dataclasses.dataclass(frozen=True)
class Alone:
    """Seconds that each island takes alone, on its devices along one axis.

    Attributes:
      steps: Cost of a step with a share of a batch, for each island.
      stages: Seconds of a pipeline's microbatch as in `staged.decide`, [islands, 3]; None: the
        model has no layer for each island.
    """

    steps: Sequence[Cost]
    stages: npt.NDArray[np.float32] | None


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Options of a run, and seconds of its step without exchanges."""

    options: dict[str, Any]
    compute: float

    @property
    def words(self) -> str:
        """The options as `models.pretrain` reads them."""
        return " ".join(f"--{name} {value}" for name, value in self.options.items())


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A candidate with the seconds of its exposed exchanges, and bytes of a device.

    Attributes:
      measured_seconds: Time of a step that ran, None: it was not tried.
      measured_bytes: Memory of a device in this step, None: not known.
    """

    candidate: Candidate
    exchange: float
    num_bytes: int
    measured_seconds: float | None = None
    measured_bytes: int | None = None

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return self.candidate.compute + self.exchange


def mesh(outer: str, islands: int, inner: str, devices: int) -> str:
    """Text for `--mesh`.

    Args:
      outer: Mesh axis that crosses islands.
      islands: Number of islands.
      inner: Mesh axis of an island's devices.
      devices: Number of devices of each island.
    """
    if outer == inner:
        return f"{outer}={islands * devices}"
    return f"{outer}={islands},{inner}={devices}"


def candidates(
    config: Config, inner: str, devices: int, parts: int, alone: Alone
) -> list[Candidate]:
    """All candidates with one axis inside of islands.

    Args:
      config: Config of the model.
      inner: Mesh axis of an island's devices, one of `INNER`.
      devices: Number of devices of each island.
      parts: Mean number of microbatches of a position of the axis `data`.
      alone: Times of the islands.
    """
    num, size = len(alone.steps), devices if inner == "data" else 1
    costs = [cost for cost in alone.steps for _ in range(size)]
    even = (parts,) * len(costs)
    split = jaxhet.balanced_split(
        sum(even), [c.microbatch for c in costs], fixed=[c.fixed for c in costs]
    )
    found = [
        Candidate(
            {
                "mesh": mesh("data", num, inner, devices),
                "accumulate": parts,
                "balance": ",".join(map(str, counts)),
            },
            longest(costs, counts),
        )
        for counts in dict.fromkeys((split, even))
    ]
    options = {"mesh": mesh("fsdp", num, inner, devices), "accumulate": parts}
    found.append(Candidate(options, longest(costs, even)))
    if alone.stages is not None:
        found += _pipelines(config, inner, devices, parts * num, alone)
    return found


def _pipelines(
    config: Config, inner: str, devices: int, microbatches: int, alone: Alone
) -> list[Candidate]:
    assert alone.stages is not None
    num = len(alone.steps)
    found = []
    for order in PIPELINES:
        own = dataclasses.replace(config, pipeline=order, stages=())
        chosen = staged.decide(own, alone.stages)
        options = {
            "mesh": mesh("stage", num, inner, devices),
            "accumulate": 1,
            "microbatches": microbatches,
            "stages": ",".join(map(str, chosen.layers)),
            "pipeline": order,
            "remat": staged.kept(config),  # so were the times of layers measured
        }
        # The update, of which a stage has its part.
        rest = max(cost.fixed for cost in alone.steps) / num
        turns = microbatches + 2 * (num - 1)
        compute = turns * chosen.seconds + microbatches * chosen.ends
        found.append(Candidate(options, compute + rest))
    return found


def ranked(found: Sequence[Suggestion], room: int | None) -> list[Suggestion]:
    """Sorted by time; candidates that need more than `room` bytes of a device come last."""
    return sorted(found, key=lambda s: (room is not None and s.num_bytes > room, s.seconds))
