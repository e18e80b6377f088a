"""Programs on islands give what one world gives; replicas are equal to the bit."""

import compare
import mapped_programs  # noqa: F401  (registers its programs)
import programs
import pytest

from jaxhet.testing import Shape
from tests.support.jobs import Start

pytestmark = pytest.mark.early

CASES = ((Shape(2, 1, 2), "hierarchical"),)
SLOW_CASES = (
    (Shape(3, 1, 1), "auto"),
    (Shape(2, 1, 2), "flat"),
    (Shape(2, 1, 1), "auto"),
    (Shape(2, 2, 1), "flat"),
    (Shape(2, 2, 1), "hierarchical"),
)
UNEQUAL_GROUPS = "sums_over_unequal_groups"
REPLICATED = {
    "grad_step",
    "grad_step_donated",
    "grad_step_remat",
    "grad_step_bfloat16",
    "grad_step_float16",
    "psum_large",
    "pmax_pmin_pmean",
    "permuted_mesh",
    "vmap_of_psum",
}


@pytest.mark.parametrize(
    ("shape", "algorithm"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
    ids=str,
)
@pytest.mark.parametrize("name", sorted(programs.NAMED))
def test_program(name: str, shape: Shape, algorithm: str, start: Start) -> None:
    result = compare.run(start(shape, JAXHET__ALGORITHM=algorithm), {"name": name})
    world = compare.run(start(shape.num_devices), {"name": name})
    compare.assert_same(result, world)
    assert result.exchanges > 0
    _assert_replicas_are_bit_equal(name, result)


def _assert_replicas_are_bit_equal(name: str, result: compare.Result) -> None:
    for i, shards in enumerate(result.shards):
        groups = [list(range(len(shards)))] if name in REPLICATED else []
        if name == UNEQUAL_GROUPS:
            divisions = programs.unequal_groups(len(shards))
            groups = divisions[i * len(divisions) // len(result.shards)]
        for group in groups:
            compare.assert_bit_equal([shards[member] for member in group])


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("psum_two_axes", "hierarchical"),
        ("grad_step", "hierarchical"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("psum_one_axis", "flat"),
                ("psum_one_axis", "hierarchical"),
                ("psum_two_axes", "flat"),
                ("grad_step", "flat"),
                (UNEQUAL_GROUPS, "flat"),
                (UNEQUAL_GROUPS, "hierarchical"),
            ]
        ),
    ],
)
def test_islands_of_unequal_size(name: str, algorithm: str, start: Start) -> None:
    shape = Shape(2, processes=(1, 3), devices=(4, 2))
    result = compare.run(start(shape, JAXHET__ALGORITHM=algorithm), {"name": name})
    compare.assert_same(result, compare.run(start(shape.num_devices), {"name": name}))
    assert result.exchanges > 0
    _assert_replicas_are_bit_equal(name, result)


@pytest.mark.slow
def test_eight_islands(start: Start) -> None:
    result = compare.run(start(Shape(8)), {"name": "psum_two_axes"})
    compare.assert_same(result, compare.run(start(8), {"name": "psum_two_axes"}))
    assert result.exchanges > 0
