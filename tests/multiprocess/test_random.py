"""Random programs agree with one world.

Only programs in which the engine counted an exchange count.
"""

import compare
import hypothesis
from conftest import Start
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.jobs import Shape

NUM_PROGRAMS = 200
SHAPES = (Shape(2, 1, 2), Shape(3, 1, 1))
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
SIZES = st.sampled_from([0, 1, 2, 3, 7, 64, 127, 1000, 40_001])
X64 = {"JAX_ENABLE_X64": "1"}


@st.composite
def programs(draw: st.DrawFn) -> dict[str, object]:
    """A program for `programs.run_random`."""
    shape = draw(st.sampled_from(SHAPES))
    n = shape.num_devices
    factors = [{"x": n}] if n % 2 else [{"x": n}, {"x": 2, "y": n // 2}]
    mesh = draw(st.sampled_from(factors))
    arrays = draw(
        st.lists(
            st.tuples(st.lists(SIZES, max_size=1).map(tuple), st.sampled_from(DTYPES)),
            min_size=1,
            max_size=3,
        )
    )
    # XLA's CPU compiler dies of a shard_map with an empty array beside another one, with or without
    # jaxhet.
    hypothesis.assume(len(arrays) == 1 or not any(0 in shape for shape, _ in arrays))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        target = draw(st.integers(0, len(arrays) - 1))
        kind = arrays[target][1]
        reducers = ["sum", "max", "min"] if not kind.startswith("complex") else ["sum"]
        reducer = draw(st.sampled_from(reducers))
        # A maximum inside one island is XLA's own, which drops NaN.
        axes = draw(
            st.sets(st.sampled_from(sorted(mesh)), min_size=1 if reducer == "sum" else len(mesh))
        )
        steps.append((target, reducer, tuple(sorted(axes))))
    return {
        "shape": shape,
        "mesh": list(mesh.items()),
        "arrays": arrays,
        "steps": steps,
        "permute": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


def test_random_programs(start: Start) -> None:
    exchanges: list[int] = []
    attempts = 0

    @settings(
        max_examples=NUM_PROGRAMS * 3,
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
    @given(programs())
    def check(program: dict[str, object]) -> None:
        nonlocal attempts
        if len(exchanges) >= NUM_PROGRAMS:
            return
        attempts += 1
        shape = program["shape"]
        assert isinstance(shape, Shape)
        result = compare.run(start(shape, **X64), program)
        world = compare.run(start(shape.num_devices, **X64), program)
        compare.assert_same(result, world)
        if result.exchanges:
            exchanges.append(result.exchanges)

    check()
    print(
        f"{len(exchanges)} programs with exchanges of {attempts}; exchanges: min {min(exchanges)},"
        f" max {max(exchanges)}"
    )
    assert len(exchanges) >= NUM_PROGRAMS
