"""Runs a program on a job, and compares its result with one world's and ranks with each other."""

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxhet.testing import Job

# Sums are taken in another order than in one world: a few roundings of the working precision apart.
_TOLERANCE = {
    "float8_e4m3fn": 0.25,
    "float8_e5m2": 0.5,
    "bfloat16": 3e-2,
    "float16": 4e-3,
    "float32": 2e-6,
    "float64": 1e-14,
    "complex64": 2e-6,
    "complex128": 1e-14,
}


@dataclasses.dataclass(frozen=True)
class Result:
    """Results of a program.

    Attributes:
      names: by output, its path in the result.
      shards: by output and device position.
      exchanges: how many exchanges the engine of each process counted, at least.
    """

    names: list[str]
    shards: list[list[np.ndarray]]
    exchanges: int
    error: str | None


def run(job: Job, program: dict[str, Any]) -> Result:
    """Runs `program` (see worker.py) on all workers of `job`."""
    answers = job.ask(program)
    error = next((a["error"] for a in answers if a["error"]), None)
    if error:
        return Result([], [], 0, error)
    outputs = [
        {k: v for a in answers for k, v in a["shards"][i].items()}
        for i in range(len(answers[0]["shards"]))
    ]
    shards = [[o[k] for k in sorted(o)] for o in outputs]
    return Result(answers[0]["names"], shards, min(a["exchanges"] for a in answers), None)


def run_both(job: Job, world: Job, program: dict[str, Any]) -> tuple[Result, Result]:
    """Runs `program` on two jobs at the same time."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        theirs = pool.submit(run, world, program)
        return run(job, program), theirs.result()


def assert_same(result: Result, world: Result, parts: Sequence[int] | None = None) -> None:
    """Checks that every device holds what the device at its place holds in one world.

    Args:
      result: Result on the islands.
      world: Result in one world.
      parts: By output, of how many values near 1 its sums are; they may cancel.
    """
    assert result.error is None, result.error
    assert world.error is None, world.error
    assert len(result.shards) == len(world.shards)
    for i, (mine, theirs) in enumerate(zip(result.shards, world.shards, strict=True)):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            _assert_close(a, b, parts[i] if parts else 0)


def assert_bit_equal(shards: list[np.ndarray]) -> None:
    """Checks that replicas are equal to the bit."""
    for shard in shards[1:]:
        assert shard.tobytes() == shards[0].tobytes()


def _assert_close(a: np.ndarray, b: np.ndarray, least_scale: float) -> None:
    tolerance = _TOLERANCE.get(a.dtype.name)
    if tolerance is None:
        np.testing.assert_array_equal(a, b)
        return
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    x, y = a.astype(wide), b.astype(wide)
    scale = np.max(np.abs(y[np.isfinite(y)]), initial=least_scale)
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * scale)


assert ml_dtypes.bfloat16  # registers the names of the small float types with numpy
