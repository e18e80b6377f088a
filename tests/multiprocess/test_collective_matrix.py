"""Collective × dtype × form of the groups × shape of the islands, against numpy.

Every collective meets every form of groups on every shape and with every algorithm; which dtypes
meet a form changes from shape to shape. The slow cases have every dtype on the small shapes.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import pytest

from jaxhet.testing import FAST_COMPILE, Job, Shape, island_job
from tests.support import collectives

pytestmark = pytest.mark.early

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


@dataclasses.dataclass(frozen=True)
class Case:
    """A running job."""

    shape: Shape
    job: Job
    part: slice

    def dtypes(self, form: str) -> Sequence[str]:
        """Types that this form is tested with in this shape."""
        names = list(collectives.FORMS)
        first = names.index(form) + self.shape.num_devices
        return collectives.DTYPES[first % len(names) :: len(names)][self.part]


def _params() -> Iterator[object]:
    for cases, kind, marks in ((CASES, "some", []), (THOROUGH_CASES, "all", [pytest.mark.slow])):
        for case in cases:
            yield pytest.param(case, id=f"{case[0]}-{case[1]}-{kind}", marks=marks)


def _start(shape: Shape, algorithm: str) -> Job:
    env = {**FAST_COMPILE, "JAX_ENABLE_X64": "1", "JAXHET__ALGORITHM": algorithm}
    return island_job(shape, env=env)


@pytest.fixture(scope="module", params=_params())
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    shape, algorithm, part = request.param
    with _start(shape, algorithm) as job:
        yield Case(shape, job, part)


def _check(job: Job, shape: Shape, name: str, dtypes: Sequence[str]) -> None:
    """Collectives of small blocks of odd size, along either dimension; replicas have equal bits."""
    form = collectives.FORMS[name](shape.devices_of_processes)
    size = form.groups.shape[1]
    cases = [
        collectives.Case(
            operation,
            dtype,
            (size, 3 * size) if collectives.factor(operation, size) > 1 else (1, 3 * size - 1),
            dim=number % 2,
            is_whole=False,
        )
        for number, dtype in enumerate(dtypes)
        for operation in collectives.operations(dtype, form)
    ]
    answers = job.ask((collectives.found, (name, shape.devices_of_processes, cases)))
    for title, of_devices in collectives.merged(answers).items():
        assert not any(text for text, _ in of_devices.values()), (title, of_devices)
        assert of_devices.keys() == set(form.groups.ravel().tolist())
        for group in form.groups if title.split()[0] in collectives.SAME_IN_GROUP else ():
            assert len({of_devices[position][1] for position in group}) == 1, title


@pytest.mark.parametrize("form", collectives.FORMS)
def test_collectives_of_dtypes(form: str, case: Case) -> None:
    _check(case.job, case.shape, form, case.dtypes(form))


def test_collectives_of_types_of_less_than_a_byte() -> None:
    """All groups cross: plain JAX damages memory in collectives of two bits inside an island."""
    shape = Shape(2, 1, 2)
    with _start(shape, "flat") as job:
        for form in ("all", "halves"):
            for dtypes in (
                collectives.SMALL,
                collectives.SMALL[1:],
            ):  # each type along either dimension
                _check(job, shape, form, dtypes)
