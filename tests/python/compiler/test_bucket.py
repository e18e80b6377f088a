"""Buckets of small all-reduces: which ones may share a bucket."""

import re

from jaxhet.compiler import Options
from tests.python.compiler import hlo_text
from tests.python.compiler.hlo_text import SUM, all_reduce, feeding, named, of_two, shuffled

_JOB = hlo_text.job(0, 1, platform="cuda")


def _feeding(data: bytes, most_bytes: int = 1024) -> list[list[str]]:
    return feeding(data, _JOB, Options(bucket_bytes=most_bytes))


def _lines(data: bytes, most_bytes: int = 1024) -> list[str]:
    """Reducer, algorithm, members and shape of each exchange, by index."""
    decomposed = hlo_text.after_pre(data, _JOB, Options(bucket_bytes=most_bytes))
    lines = (spec.line for spec in hlo_text.planned(decomposed))
    return [re.sub(r".* permute all-reduce (.*?) \{.*", r"\1", line) for line in lines]


_THREE = f"""
  p = f32[4] parameter(0)
  q = f32[3] parameter(1)
  n = f32[3] negate(q)
  {all_reduce("a", "p", path="e0d0/psum")}
  {all_reduce("b", "q", shape="f32[3]", path="e1d0/psum")}
  {all_reduce("c", "n", shape="f32[3]", path="e3d0/psum")}
  ROOT r = (f32[4], f32[3], f32[3]) tuple(a, b, c)
"""


def test_independent_ones_are_one_exchange():
    data = of_two(_THREE)
    assert _lines(data) == ["sum hierarchical of 3 f32[10]"]
    assert _feeding(data) == [["parameter 0", "parameter 1", "negate"]]


def test_members_lie_in_the_order_of_the_equations_and_not_of_the_text():
    first, second = "e0d0/psum", "e1d0/psum"
    swapped = _THREE.replace(first, "?").replace(second, first).replace("?", second)
    assert _feeding(of_two(swapped)) == [["parameter 1", "parameter 0", "negate"]]


def test_a_bucket_is_not_larger_than_allowed():
    data = of_two(_THREE)
    assert _lines(data, 30) == [
        "sum hierarchical of 2 f32[7]",
        "sum hierarchical f32[3]",
    ]
    assert _feeding(data, 30) == [["parameter 0", "parameter 1"], ["negate"]]
    alone = [["parameter 0"], ["parameter 1"], ["negate"]]
    assert _feeding(data, 12) == _feeding(data, 0) == alone


def test_another_type_reducer_or_group_stays_apart():
    data = of_two(
        f"""
      p = f32[4] parameter(0)
      q = bf16[4] parameter(1)
      s = f32[4] sine(p)
      t = f32[4] cosine(p)
      {all_reduce("a", "p")}
      {all_reduce("b", "q", shape="bf16[4]")}
      {all_reduce("c", "s").replace("to_apply=sum", "to_apply=most")}
      {all_reduce("d", "t", groups="{{1,0}}")}
      ROOT r = (f32[4], bf16[4], f32[4], f32[4]) tuple(a, b, c, d)
    """,
        before=SUM + SUM.replace("sum", "most").replace("add", "maximum"),
    )
    moved = _feeding(data)
    assert sorted(moved) == [["cosine"], ["parameter 0"], ["parameter 1"], ["sine"]]
    assert dict(zip((name for (name,) in moved), _lines(data), strict=True)) == {
        "parameter 0": "sum hierarchical f32[4]",
        "parameter 1": "sum hierarchical bf16[4]",
        "sine": "max hierarchical f32[4]",
        "cosine": "sum hierarchical f32[4]",
    }


def test_buckets_never_wait_for_each_other():
    """a1 -> b1 and b2 -> a2: {a1, a2} and {b1, b2} would be a cycle, {a1, a2} make b1 wait."""
    most = SUM.replace("sum", "most").replace("add", "maximum")

    def largest(name: str, operand: str, path: str) -> str:
        text = all_reduce(name, operand, path=path)
        return text.replace("to_apply=sum", "to_apply=most")

    data = of_two(
        f"""
      p = f32[4] parameter(0)
      q = f32[4] parameter(1)
      {all_reduce("a1", "p", path="e0d0/psum")}
      {largest("b2", "q", "e3d0/pmax")}
      {largest("b1", "a1", "e1d1/pmax")}
      {all_reduce("a2", "b2", path="e4d1/psum")}
      ROOT r = (f32[4], f32[4], f32[4], f32[4]) tuple(a1, a2, b1, b2)
    """,
        before=SUM + most,
    )
    assert _lines(data) == [
        "sum hierarchical f32[4]",
        "max hierarchical f32[4]",
        "max hierarchical f32[4]",
        "sum hierarchical f32[4]",
    ]
    assert _feeding(data) == [["parameter 0"], ["parameter 1"], ["exchange 0"], ["exchange 1"]]


def test_what_is_used_soon_does_not_wait_for_what_is_ready_later():
    product = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    data = of_two(f"""
      w = f32[4,4] parameter(0)
      x = f32[4,4] parameter(1)
      {all_reduce("a", "x", shape="f32[4,4]", path="e0d0u1/psum")}
      used = f32[4,4] dot(a, w), {product}{named("e1d2/dot_general")}
      y = f32[4,4] dot(x, w), {product}{named("e2d1/dot_general")}
      z = f32[4,4] dot(y, w), {product}{named("e3d2/z")}
      {all_reduce("b", "z", shape="f32[4,4]", path="e4d2/psum")}
      ROOT r = (f32[4,4], f32[4,4]) tuple(used, b)
    """)
    assert _feeding(data) == [["parameter 1"], ["z"]]


def test_all_reduces_across_depths_go_together_whatever_the_order_of_the_text():
    """The scales of norms in a backward pass: each is ready at another time."""
    steps = "\n".join(
        f"""
      d{i} = f32[4,4] dot(d{i + 1}, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
      cut{i} = f32[1,4] slice(d{i}), slice={{[0:1], [0:4]}}{named(f"cut{i}")}"""
        for i in reversed(range(3))
    )
    data = of_two(f"""
      w = f32[4,4] parameter(0)
      d3 = f32[4,4] parameter(1)
      {steps}
      {all_reduce("g0", "cut0", shape="f32[1,4]", path="e9d3/psum")}
      {all_reduce("g1", "cut1", shape="f32[1,4]", path="e6d2/psum")}
      {all_reduce("g2", "cut2", shape="f32[1,4]", path="e3d1/psum")}
      ROOT r = (f32[1,4], f32[1,4], f32[1,4]) tuple(g0, g1, g2)
    """)
    assert _lines(data) == ["sum hierarchical of 3 f32[12]"]
    for seed in range(20):
        assert _feeding(shuffled(data, seed)) == [["cut2", "cut1", "cut0"]]


def test_permutes_between_the_same_ranks_are_one_exchange_on_cpus() -> None:
    def permute(
        name: str, operand: str, number: int, shape: str = "f32[4]", pairs: str = ""
    ) -> str:
        pairs = pairs or "{0,1},{1,0}"
        path = named(f"e{number}d{number // 3}/ppermute")
        return (
            f"{name} = {shape} collective-permute({operand}), channel_id=1,"
            f" source_target_pairs={{{pairs}}}{path}"
        )

    body = f"""
      p = f32[4] parameter(0)
      q = u8[64] parameter(1)
      {permute("a", "p", 0)}
      {permute("b", "q", 1, "u8[64]")}
      {permute("c", "p", 2, pairs="{0,1}")}
      {permute("d", "a", 3)}
      ROOT r = (f32[4], u8[64], f32[4], f32[4]) tuple(a, b, c, d)
    """
    decomposed = hlo_text.after_pre(of_two(body, ""))
    lines = [spec.local_line.partition("@")[0] for spec in hlo_text.planned(decomposed)]
    assert sorted(lines) == [
        "permute collective-permute f32[4] {{0,1},{1,0}} ",
        "permute collective-permute f32[4] {{0,1}} ",
        "permute collective-permute of 2 f32[4],u8[64] {{0,1},{1,0}} ",
    ]
