"""Random programs with the real CUDA and ROCm compilers: equal plans move the same arrays.

In loops, nothing is overwritten that is still read.
"""

import collections
import concurrent.futures
from typing import Any

import pytest

from tests.python.compiler import worker
from tests.python.compiler.test_deviceless import Results, require_compiler

pytestmark = pytest.mark.early

_VENDORS = ("cuda", "rocm")
_QUICK = range(8)
# In the second range, plans of four programs once differed.
_SLOW = (range(200), range(1484, 1984))
_TEST_OWN_S = 120  # beside the compilers' limit
_MOST_NOT_COMPILED = 0.05
# Fraction of the arrays that can't be swapped with one that looks alike without being noticed.
_ENOUGH_TOLD_APART = 0.9


def _counts(result: dict[str, Any]) -> collections.Counter[str]:
    """A program, its exchanges, and the arrays in their operands.

    An array is told apart if its name differs from all that are exchanged in the same way.
    """
    names = collections.Counter(
        (_way(line), name)
        for line, moved in zip(result["lines"], result["moved"], strict=True)
        for name in moved
    )
    apart = sum(count == 1 for count in names.values())
    exchanges = len(result["moved"])
    return collections.Counter(
        programs=1,
        exchanges=exchanges,
        members=names.total(),
        told_apart=apart,
        pipelined=result["pipelined"],
    )


def _way(line: str) -> str:
    """Line of a plan without its place in the program: equal lines have one meaning."""
    return line.partition(" ")[2].rpartition(" @")[0]


def _limit_s(count: int) -> int:
    """Limit of time for a number of programs with a vendor's compiler."""
    return 30 + 20 * count


def _compile_by_both(first: int, count: int) -> list[Results]:
    for vendor in _VENDORS:
        require_compiler(vendor)

    def compile_by(vendor: str) -> Results:
        arguments = ("vendor_programs.py", vendor, str(first), str(count))
        return worker.run(*arguments, timeout_s=_limit_s(count))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        cuda, rocm = pool.map(compile_by, _VENDORS)
    assert list(cuda) == list(rocm) == [str(seed) for seed in range(first, first + count)]
    return [cuda, rocm]


def _difference(cuda: dict[str, Any], rocm: dict[str, Any]) -> str:
    """Difference of two vendors' results for one program; "" for equal ones."""
    for vendor, result in zip(_VENDORS, (cuda, rocm), strict=True):
        if "error" in result:
            return f"{vendor}: {result['error'][-1000:]}"
        for loop in result["loops"]:
            if loop["hazards"] or loop["misplaced"] or loop["repeated"]:
                return f"{vendor}: {loop}"
    for what in ("lines", "fingerprint", "moved"):
        if cuda[what] != rocm[what]:
            return f"{what} differ: cuda {cuda[what]} rocm {rocm[what]}"
    return ""


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(seeds, marks=[pytest.mark.timeout(_limit_s(len(seeds)) + _TEST_OWN_S), *marks])
        for seeds, marks in ((_QUICK, []), *((seeds, [pytest.mark.slow]) for seeds in _SLOW))
    ],
    ids=str,
)
def test_equal_plans_of_random_programs_move_the_same_arrays(seeds: range):
    cuda, rocm = _compile_by_both(seeds.start, len(seeds))
    counts, differences = collections.Counter[str](), {}
    for seed, result in cuda.items():
        if "not_compiled" in result or "not_compiled" in rocm[seed]:
            counts["not_compiled"] += 1
        elif difference := _difference(result, rocm[seed]):
            differences[seed] = difference
        else:
            counts += _counts(result)
    print(counts)
    assert differences == {}
    assert counts["not_compiled"] < _MOST_NOT_COMPILED * len(seeds)
    assert counts["told_apart"] > _ENOUGH_TOLD_APART * counts["members"]
    assert counts["pipelined"] >= len(seeds) // 50
