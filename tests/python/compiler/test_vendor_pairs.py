"""Programs that two vendors' compilers once ordered differently under one plan."""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.python.compiler import worker
from tests.python.compiler.test_deviceless import Results, require_compiler
from tests.python.compiler.vendor_pairs import PROGRAMS

pytestmark = pytest.mark.early

_VENDORS = ("cuda", "rocm")
_QUICK = (
    "cholesky and product of exp(m)",
    "cholesky and product of exp(m) and a sine, no bucket",
    "q and eigh",
    "scatters beside tanh of each vendor",
    "exported sine and product",
)
_REFUSAL = "nothing in the program tells one from the other"


@dataclasses.dataclass
class _Counts:
    """Counts of the comparison.

    Attributes:
      programs: Compiled by both vendors.
      exchanges: In the plans.
      members: Arrays in the operands of exchanges.
      refused: Programs that a vendor's passes refused in words.
    """

    programs: int = 0
    exchanges: int = 0
    members: int = 0
    refused: int = 0


def _compile_by_both(names: Sequence[str], timeout_s: int) -> list[Results]:
    for vendor in _VENDORS:
        require_compiler(vendor)

    def compile_by(vendor: str) -> Results:
        return worker.run("vendor_pairs.py", vendor, *names, timeout_s=timeout_s)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(compile_by, _VENDORS))


def _difference(cuda: dict[str, Any], rocm: dict[str, Any]) -> str:
    """Difference of two vendors' results for one program; "" for equal ones."""
    for vendor, result in zip(_VENDORS, (cuda, rocm), strict=True):
        if problem := result.get("error") or result.get("not_compiled"):
            return f"{vendor}: {problem[-1000:]}"
    for what in ("moved", "lines", "fingerprint"):
        if cuda[what] != rocm[what]:
            return f"{what} differ: cuda {cuda[what]} rocm {rocm[what]}"
    if not cuda["moved"] or not all(name for names in cuda["moved"] for name in names):
        return f"an array without a name: {cuda['moved']}"
    return ""


def _compare(
    names: Sequence[str], timeout_s: int, record: Callable[[str, object], None]
) -> _Counts:
    cuda, rocm = _compile_by_both(names, timeout_s)
    assert list(cuda) == list(rocm) == list(names)
    counts, differences = _Counts(), {}
    for name, result in cuda.items():
        refusals = [r["refused"] for r in (result, rocm[name]) if "refused" in r]
        if refusals:
            counts.refused += 1
            if unclear := [words for words in refusals if _REFUSAL not in words]:
                differences[name] = unclear[0]
        elif difference := _difference(result, rocm[name]):
            differences[name] = difference
        else:
            counts.programs += 1
            counts.exchanges += len(result["moved"])
            counts.members += sum(map(len, result["moved"]))
    print(counts)
    for field, number in dataclasses.asdict(counts).items():
        record(field, number)
    assert differences == {}
    return counts


@pytest.mark.timeout(300)
def test_both_vendors_move_the_same_arrays(record_property: Callable[[str, object], None]):
    assert _compare(_QUICK, 240, record_property).refused == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_both_vendors_move_the_same_arrays_in_every_program(
    record_property: Callable[[str, object], None],
):
    assert _compare(list(PROGRAMS), 1700, record_property).programs > len(PROGRAMS) / 2
