"""Pipelined loops: results equal to the bit, both vendors' schedules, and unchanged loops."""

from typing import Any

import pytest

from jaxhet.compiler import Job, collectives, hlo, pipeline
from jaxhet.testing import FAST_COMPILE
from tests.python.compiler import hlo_text, worker
from tests.python.compiler.hlo_text import SUM
from tests.python.compiler.test_deviceless import require_compiler

pytestmark = [pytest.mark.early, pytest.mark.timeout(900)]

_JOB = Job((0, 10), (0, 1), "cuda")


# --- numbers ---


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 210), marks=pytest.mark.slow)])
def test_pipelined_programs_give_the_same_bits(seeds: range):
    results = worker.run("pipelined.py", *map(str, seeds), timeout_s=880, **FAST_COMPILE)
    assert len(results) == len(seeds)
    assert {name: r for name, r in results.items() if r["failures"]} == {}
    assert sum(r["moved"] > 0 for r in results.values()) >= len(seeds) // 2


# --- schedules of the vendors' compilers ---

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def cuda() -> Results:
    require_compiler("cuda")
    return worker.run("pipelined_schedule.py", "cuda", timeout_s=880)


@pytest.fixture(scope="module")
def rocm() -> Results:
    require_compiler("rocm")
    return worker.run("pipelined_schedule.py", "rocm", timeout_s=880)


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_all_exchanges_of_pipelined_loops_run_beside_the_whole_iteration(
    vendor: str, request: pytest.FixtureRequest
):
    results = request.getfixturevalue(vendor)
    # Devices in a pair share a sum inside their island, so that starts may wait for it.
    for name in ("data, 1 each, pipelined", "fsdp, 1 each, pipelined"):
        for loop in results[name]["loops"]:
            assert loop["before"] == loop["after"] == loop["exchanges"] > 0, (name, loop)


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_no_iteration_overwrites_what_is_still_read(vendor: str, request: pytest.FixtureRequest):
    results = request.getfixturevalue(vendor)
    loops = {name: r["loops"] for name, r in results.items()}
    assert all(found for found in loops.values())
    assert {n: loop for n, found in loops.items() for loop in found if loop["hazards"]} == {}
    assert {n: loop for n, found in loops.items() for loop in found if loop["misplaced"]} == {}
    assert all(loop["repeated"] == 0 for found in loops.values() for loop in found)


def test_both_vendors_pipeline_alike(cuda: Results, rocm: Results):
    assert len(rocm) == 8
    for name, result in rocm.items():
        assert result["fingerprint"] == cuda[name]["fingerprint"], name
        plain = cuda[name.replace("pipelined", "not pipelined")]
        assert result["num_exchanges"] > plain["num_exchanges"], name


# --- exchanges that may be moved ---


def _loop(
    stored: str = "dynamic-update-slice(stack, row, i, zero)",
    more: str = "",
    limit: int = 8,
    step: int = 1,
    root: str = "next, x, stack2",
) -> str:
    """A loop that sums x over islands and stores the sums, row by row."""
    state = "(s32[], f32[4], f32[8,4])"
    return f"""{SUM}
body {{
  p = {state} parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[4] get-tuple-element(p), index=1
  stack = f32[8,4] get-tuple-element(p), index=2
  one = s32[] constant({step})
  zero = s32[] constant(0)
  next = s32[] add(i, one)
  y = f32[4] multiply(x, x)
  {hlo_text.all_reduce("sum.1", "y")}
  row = f32[1,4] reshape(sum.1)
  {more}
  stack2 = f32[8,4] {stored}
  ROOT t = {state} tuple({root})
}}

condition {{
  p = {state} parameter(0)
  i = s32[] get-tuple-element(p), index=0
  limit = s32[] constant({limit})
  ROOT less = pred[] compare(i, limit), direction=LT
}}

ENTRY main {{
  x = f32[4] parameter(0)
  zero = s32[] constant(0)
  empty = f32[] constant(0)
  stack = f32[8,4] broadcast(empty), dimensions={{}}
  t = {state} tuple(zero, x, stack)
  w = {state} while(t), condition=condition, body=body
  ROOT r = f32[8,4] get-tuple-element(w), index=2
}}
"""


def _num_moved(text: str, least_iterations: int = 4) -> int:
    module = hlo.Module(hlo_text.module(text, [0, 1]))
    found = pipeline.pipeline(module, collectives.crossing(module, _JOB), least_iterations)
    hlo_text.to_text(module.serialize())  # XLA can read it
    return len(found)


def test_a_sum_that_is_only_stored_is_moved():
    assert _num_moved(_loop()) == 1


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(_loop(more="u = f32[4] add(sum.1, x)", root="next, u, stack2"), id="used"),
        pytest.param(
            _loop(stored="dynamic-update-slice(stack, row, zero, zero)"), id="one row, again"
        ),
        pytest.param(
            _loop(
                more="two = s32[] constant(2)\n  at = s32[] divide(i, two)",
                stored="dynamic-update-slice(stack, row, at, zero)",
            ),
            id="each row twice",
        ),
        pytest.param(
            _loop(
                more="far = s32[] constant(4)\n  at = s32[] add(i, far)",
                stored="dynamic-update-slice(stack, row, at, zero)",
            ),
            id="rows outside",
        ),
        pytest.param(
            _loop(
                more="before = s32[] subtract(i, one)\n  at = s32[] shift-left(one, before)",
                stored="dynamic-update-slice(stack, row, at, zero)",
            ),
            id="rows outside, shifted by -1 first",
        ),
        pytest.param(
            _loop(
                more="own = u32[] partition-id()\n  at = s32[] convert(own)",
                stored="dynamic-update-slice(stack, row, at, zero)",
            ),
            id="a row for each device",
        ),
        pytest.param(
            _loop(
                more="old = f32[1,4] dynamic-slice(stack, i, zero), dynamic_slice_sizes={1,4}\n"
                "  o = f32[4] reshape(old)",
                root="next, o, stack2",
            ),
            id="the stack is read",
        ),
        pytest.param(_loop(step=2), id="every second"),
        pytest.param(_loop(limit=3), id="short"),
        pytest.param(_loop().replace("s32", "u32"), id="a counter that could fall below 0"),
    ],
)
def test_other_sums_stay(text: str):
    assert _num_moved(text) == 0


def test_a_loop_with_fewer_iterations_stays():
    assert (_num_moved(_loop(), 8), _num_moved(_loop(), 9)) == (1, 0)
