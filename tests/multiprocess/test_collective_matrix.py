"""Collective × dtype × form of the groups × shape of the islands, against one world.

Every collective meets every form of groups on every shape and with every algorithm; which dtypes
meet a form changes from shape to shape. The slow cases have every dtype on the small shapes.
"""

import dataclasses
import pathlib
from collections.abc import Iterator

import compare
import matrix
import numpy as np
import pytest

from jaxhet.testing import FAST_COMPILE, Job, Shape, island_job
from tests.support.jobs import Start

pytestmark = pytest.mark.early

_WORKER = pathlib.Path(__file__).with_name("worker.py")
UNEQUAL = Shape(2, processes=(1, 3), devices=(4, 2))
# Shape, algorithm, and which of the dtypes of each form: compiling them all takes minutes.
CASES = (
    (Shape(2, 2, 2), "hierarchical", slice(1, None, 6)),
    (Shape(3, 1, 1), "flat", slice(1, None, 4)),
    (UNEQUAL, "hierarchical", slice(2, None, 6)),
)
THOROUGH_CASES = (
    (Shape(2, 1, 1), "flat", slice(None)),
    (Shape(2, 1, 2), "flat", slice(0, None, 2)),
    (Shape(2, 1, 2), "hierarchical", slice(1, None, 2)),
    (Shape(2, 2, 2), "flat", slice(0, None, 3)),
    (Shape(2, 2, 2), "hierarchical", slice(1, None, 3)),
    (Shape(3, 1, 1), "flat", slice(None)),
    (Shape(8, 1, 1), "flat", slice(2, None, 3)),
    (UNEQUAL, "flat", slice(0, None, 3)),
    (UNEQUAL, "hierarchical", slice(1, None, 3)),
)
X64 = {"JAX_ENABLE_X64": "1"}
SAME_IN_GROUP = {"sum", "max", "min", "gather"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A running job."""

    shape: Shape
    job: Job
    part: slice

    def dtypes(self, form: str) -> list[str]:
        """Types that this form is tested with in this shape."""
        first = list(matrix.FORMS).index(form) + self.shape.num_devices
        return list(matrix.DTYPES[first % len(matrix.FORMS) :: len(matrix.FORMS)][self.part])


def _params() -> Iterator[object]:
    for cases, kind, marks in ((CASES, "some", []), (THOROUGH_CASES, "all", [pytest.mark.slow])):
        for case in cases:
            yield pytest.param(case, id=f"{case[0]}-{case[1]}-{kind}", marks=marks)


@pytest.fixture(scope="module", params=_params())
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    shape, algorithm, part = request.param
    job = island_job(shape, _WORKER, {**FAST_COMPILE, **X64, "JAXHET__ALGORITHM": algorithm})
    yield Case(shape, job, part)
    job.close()


@pytest.mark.parametrize("form", matrix.FORMS)
def test_collectives_of_dtypes(form: str, case: Case, start: Start) -> None:
    devices = case.shape.devices_of_processes
    request = {"form": form, "devices": devices, "dtypes": case.dtypes(form)}
    result, world = compare.run_both(case.job, start(case.shape.num_devices, **X64), request)
    compare.assert_same(result, world)
    assert result.exchanges > 0
    groups = matrix.FORMS[form](devices).groups
    positions = sorted(groups.ravel())
    for name, mine, theirs in zip(result.names, result.shards, world.shards, strict=True):
        dtype, operation = name.split()
        if not (is_inexact(dtype) and "sum" in operation):
            for a, b in zip(mine, theirs, strict=True):
                assert a.tobytes() == b.tobytes(), name
        by_position = dict(zip(positions, mine, strict=True))
        for group in groups if operation in SAME_IN_GROUP else ():
            compare.assert_bit_equal([by_position[p] for p in group])


def is_inexact(dtype: str) -> bool:
    """Whether sums of the matrix round."""
    return np.dtype(dtype).kind in "fc" or dtype == "bfloat16"
