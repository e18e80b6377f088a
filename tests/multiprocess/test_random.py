"""Random programs agree with one world.

Only programs in which the engine counted an exchange count.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import compare
import numpy as np
import pytest
import random_programs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxhet.testing import Shape
from tests.support.jobs import Start

pytestmark = pytest.mark.early

Case = tuple[Shape, str]  # islands, and the algorithm
CASES: tuple[Case, ...] = (
    (Shape(2, 1, 1), "flat"),
    (Shape(2, 1, 2), "flat"),
    (Shape(2, 1, 2), "hierarchical"),
    (Shape(2, 1, (1, 3)), "flat"),
    (Shape(2, 1, 4), "hierarchical"),
    (Shape(2, (1, 2), (2, 1)), "hierarchical"),
    (Shape(3, 1, 1), "flat"),
)
QUICK_CASES = (CASES[3], CASES[5], CASES[6])  # islands of unequal size, and three: few jobs
MESHES = {2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2)]}
DTYPES = (
    "float32",
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "bool",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
)
SIZES = (1, 2, 3, 7, 24, 64, 127, 1000, 40_000, 40_001)
MOST_ELEMENTS = 100_000
# Values in a sum, at most, so that whether it overflows is not for rounding to say.
MOST_PARTS = {"float16": 4096, "float8_e4m3fn": 64, "float8_e5m2": 4096}
EQUAL_IN_GROUP = {"sum", "max", "min", "gather", "stack"}
X64 = {"JAX_ENABLE_X64": "1"}


@dataclasses.dataclass
class Array:
    """A rank's block of an array, between the steps.

    Attributes:
      parts: how many values of the first array are in a sum; 1 without sums.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: int = 1

    def steps(self, size: int, is_whole: bool, is_flat: bool) -> list[tuple[Any, ...]]:
        """Kinds, with their dimensions, of the steps that it may take over `size` ranks."""
        kinds: list[tuple[Any, ...]] = [("permute",)]
        dims = [d for d, extent in enumerate(self.shape) if extent]  # which StableHLO demands
        divisible = [d for d in dims if self.shape[d] % size == 0]
        if self.parts * size <= MOST_PARTS.get(self.dtype, math.inf):
            kinds.append(("sum",))
            if self.dtype != "bool":
                kinds += [("scatter", d) for d in divisible]
        # A maximum inside one island is XLA's own, which drops NaN.
        is_exact = np.dtype(self.dtype).kind in "iub"
        if is_exact or ("float" in self.dtype and is_whole and is_flat):
            kinds += [("max",), ("min",)]
        if math.prod(self.shape) * size <= MOST_ELEMENTS:
            kinds += [("gather", d) for d in dims] + [("stack", 0), ("stack", len(self.shape))]
        return kinds + [("all_to_all", d, e) for d in divisible for e in dims]

    def take(self, kind: str, details: tuple[int, ...], size: int) -> None:
        """Becomes the result of a step."""
        shape = list(self.shape)
        if kind == "stack":
            shape.insert(details[0], size)
        elif kind == "gather":
            shape[details[0]] *= size
        elif kind == "scatter":
            shape[details[0]] //= size
        elif kind == "all_to_all":
            shape[details[0]] //= size
            shape[details[1]] *= size
        self.shape = tuple(shape)
        if kind in ("sum", "scatter"):
            self.parts *= size


@st.composite
def programs(draw: st.DrawFn, cases: Sequence[Case]) -> dict[str, Any]:
    """A program for `random_programs.run` on islands of one of the cases."""
    shape, algorithm = draw(st.sampled_from(cases))
    mesh = dict(zip("xyz", draw(st.sampled_from(MESHES[shape.num_devices])), strict=False))
    num_arrays = draw(st.integers(1, 3))
    # XLA's CPU compiler dies of a shard_map with an empty array beside another one, with or without
    # jaxhet.
    sizes = st.sampled_from((0, *SIZES) if num_arrays == 1 else SIZES)
    shapes = st.lists(sizes, max_size=2).map(tuple).filter(lambda s: math.prod(s) <= MOST_ELEMENTS)
    arrays = [Array(draw(shapes), draw(st.sampled_from(DTYPES))) for _ in range(num_arrays)]
    first = [(array.shape, array.dtype) for array in arrays]
    steps = []
    for _ in range(draw(st.integers(1, 8))):
        target = draw(st.integers(0, num_arrays - 1))
        axes = tuple(sorted(draw(st.sets(st.sampled_from(sorted(mesh)), min_size=1))))
        size = math.prod(mesh[axis] for axis in axes)
        possible = arrays[target].steps(size, len(axes) == len(mesh), algorithm == "flat")
        kind, *details = draw(st.sampled_from(possible))
        arrays[target].take(kind, tuple(details), size)
        if kind == "permute":
            targets = draw(st.permutations(range(size)))
            details = list(enumerate(targets))[: draw(st.integers(1, size))]
        steps.append((target, kind, axes, details))
    return {
        "case": (shape, algorithm),
        "mesh": list(mesh.items()),
        "arrays": first,
        "steps": steps,
        "parts": [array.parts for array in arrays],
        "permute": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


def assert_right(program: dict[str, Any], result: compare.Result, world: compare.Result) -> None:
    """Checks the values of all ranks, and the bits of those that must be equal."""
    compare.assert_same(result, world, program["parts"])
    positions = random_programs.order(program, len(result.shards[0]))
    for target, (mine, theirs) in enumerate(zip(result.shards, world.shards, strict=True)):
        steps = [step for step in program["steps"] if step[0] == target]
        if not {"sum", "scatter", "max", "min"} & {kind for _, kind, _, _ in steps}:
            assert [_bits(a) for a in mine] == [_bits(b) for b in theirs]
        elif steps[-1][1] in EQUAL_IN_GROUP:
            over = [list(dict(program["mesh"])).index(axis) for axis in steps[-1][2]]
            kept = [axis for axis in range(positions.ndim) if axis not in over]
            size = math.prod(positions.shape[axis] for axis in over)
            for group in positions.transpose(kept + over).reshape(-1, size):
                compare.assert_bit_equal([mine[p] for p in group])


def _bits(array: np.ndarray) -> bytes:
    """The bytes of an array; one NaN for all of 8-bit floats.

    XLA's CPU runtime converts 8-bit floats to move them; a NaN then has one payload or another.
    """
    if array.dtype.name.startswith("float8"):
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return array.tobytes()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("num_programs", "cases"), [(20, QUICK_CASES), pytest.param(500, CASES, marks=pytest.mark.slow)]
)
def test_random_programs(
    num_programs: int,
    cases: Sequence[Case],
    start: Start,
    record_property: Callable[[str, object], None],
) -> None:
    exchanges: list[int] = []
    attempts = 0

    @settings(
        max_examples=num_programs * 3,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
            HealthCheck.large_base_example,
            HealthCheck.too_slow,
        ],
    )
    @given(programs(cases))
    def check(program: dict[str, Any]) -> None:
        nonlocal attempts
        if len(exchanges) >= num_programs:
            return
        attempts += 1
        shape, algorithm = program["case"]
        job = start(shape, JAXHET__ALGORITHM=algorithm, **X64)
        result, world = compare.run_both(job, start(shape.num_devices, **X64), program)
        assert_right(program, result, world)
        if result.exchanges:
            exchanges.append(result.exchanges)

    check()
    summary = (
        f"{len(exchanges)} programs with exchanges of {attempts}; exchanges: min {min(exchanges)},"
        f" median {statistics.median(exchanges):g}, max {max(exchanges)}"
    )
    print(summary)
    record_property("programs", summary)
    assert len(exchanges) >= num_programs
