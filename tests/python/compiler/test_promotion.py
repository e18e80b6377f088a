"""All-reduces of small floats. XLA's CPU compiler turns them to f32 before PRE sees them."""

import re

import pytest

from jaxhet.compiler import Options
from tests.python.compiler import hlo_text
from tests.python.compiler.hlo_text import SUM, all_reduce, decomposed

_WIDEN = "w = f32[4] convert(p)"
_ROUND = "ROOT o = bf16[4] convert(r)"


def _summed(text: str) -> str:
    """The element type in which the fused loop adds."""
    fused = re.findall(r"-> (\w+)\[4\] \{\n(?:(?!\n\}).)*add\(", text, re.DOTALL)
    (element_type,) = fused
    return element_type


@pytest.mark.parametrize("element_type", ["bf16", "f16", "f8e4m3fn"])
def test_sum_that_is_rounded_to_its_operands_type_is_one_of_that_type(element_type: str):
    body = f"p = bf16[4] parameter(0)\n{_WIDEN}\n{all_reduce('r', 'w')}\n{_ROUND}"
    text = decomposed(body.replace("bf16", element_type))
    assert f"all-reduce sum flat {element_type}[4]" in text
    assert _summed(text) == element_type
    assert f"ROOT %o = {element_type}[4]{{0}} bitcast(" in text


def test_conversions_may_be_fused():
    more = """
    widen {
      a = bf16[4] parameter(0)
      n = bf16[4] negate(a)
      ROOT c = f32[4] convert(n)
    }
    round {
      a = f32[4] parameter(0)
      ROOT c = bf16[4] convert(a)
    }
    """
    body = f"""
      p = bf16[4] parameter(0)
      w = f32[4] fusion(p), kind=kLoop, calls=widen
      {all_reduce("r", "w")}
      ROOT o = bf16[4] fusion(r), kind=kLoop, calls=round
    """
    text = decomposed(body, before=SUM + more)
    assert _summed(text) == "bf16"
    assert "ROOT %o = bf16[4]{0} bitcast(" in text


_BOTH = """
  p = bf16[4] parameter(0)
  q = f16[4] parameter(1)
  w = f32[4] convert(p)
  v = f32[4] convert(q)
  r = (f32[4], f32[4]) all-reduce(w, v), channel_id=1, replica_groups={{0,1}},
    use_global_device_ids=true, to_apply=sum
  a = f32[4] get-tuple-element(r), index=0, metadata={op_name="e0d0/psum"}
  b = f32[4] get-tuple-element(r), index=1, metadata={op_name="e1d0/psum"}
"""


def test_sums_of_several_types_are_of_their_own():
    body = f"""{_BOTH}
      x = bf16[4] convert(a)
      y = bf16[4] convert(a)
      z = f16[4] convert(b)
      ROOT t = (bf16[4], bf16[4], f16[4]) tuple(x, y, z)
    """
    text = decomposed(body)
    assert "of 2 bf16[4],f16[4] {{0,1}}" in text
    for name, element_type in (("x", "bf16"), ("y", "bf16"), ("z", "f16")):
        assert f"%{name} = {element_type}[4]{{0}} bitcast(" in text


@pytest.mark.parametrize(
    "rest",
    [
        "x = bf16[4] convert(a)\nROOT t = (bf16[4], f32[4]) tuple(x, b)",
        "x = bf16[4] convert(a)\nz = bf16[4] convert(b)\nROOT t = (bf16[4], bf16[4]) tuple(x, z)",
        "x = bf16[4] convert(a)\nz = f16[4] convert(b)\nn = f32[4] negate(b)\n"
        "ROOT t = (bf16[4], f16[4], f32[4]) tuple(x, z, n)",
    ],
    ids=["one is not rounded", "one to another type", "one is used as it is, too"],
)
def test_if_one_sum_is_needed_as_it_is_all_stay(rest: str):
    text = decomposed(f"{_BOTH}\n{rest}")
    assert "of 2 bf16[4],f16[4] {{0,1}}" in text  # travels small nevertheless
    assert "%x = bf16[4]{0} convert(" in text


@pytest.mark.parametrize(
    ("body", "travels"),
    [
        (f"p = f32[4] parameter(0)\n{all_reduce('r', 'p')}\n{_ROUND}", "f32[4]"),
        (f"p = bf16[4] parameter(0)\n{_WIDEN}\nROOT {all_reduce('r', 'w')}", "bf16[4]"),
        (f"p = s8[4] parameter(0)\n{_WIDEN}\n{all_reduce('r', 'w')}\n{_ROUND}", "f32[4]"),
    ],
    ids=["no promotion", "the result is f32", "of integers"],
)
def test_other_sums_stay_what_they_are(body: str, travels: str):
    text = decomposed(body)
    assert f"sum flat {travels} {{{{0,1}}}}" in text
    assert _summed(text) == "f32"


def test_results_of_the_program_stay_what_they_are():
    body = _BOTH[: _BOTH.index("  a = ")].replace("  r = ", "  ROOT r = ")
    assert "of 2 bf16[4],f16[4] {{0,1}}" in (text := decomposed(body))
    assert "ROOT %r = (f32[4]{0}, f32[4]{0}) tuple(" in text


def test_sum_that_begins_on_the_island_stays_promoted_for_xla():
    job = hlo_text.job(0, 0, 1, 1)
    reduced = all_reduce("r", "w").replace("{{0,1}}", "{{0,1,2,3}}")
    body = f"p = bf16[4] parameter(0)\n{_WIDEN}\n{reduced}\n{_ROUND}"
    text = decomposed(body, job, Options(algorithm="hierarchical"))
    assert re.search(r"f32\[2\]\{0\} reduce-scatter\(", text)
    assert "ROOT %o = bf16[4]{0} convert(" in text
