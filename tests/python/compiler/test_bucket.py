"""Buckets of small all-reduces: what goes together, what may not."""

import random
import re

from jaxhet.compiler import Options, decompose
from jaxhet.compiler import hlo_pb2 as pb
from tests.python.compiler import hlo_text
from tests.python.compiler.hlo_text import SUM, all_reduce, named

_JOB = hlo_text.job(0, 1, platform="cuda")


def _text(body: str, most_bytes: int = 1024, before: str = SUM) -> str:
    return hlo_text.decomposed(body, _JOB, Options(bucket_bytes=most_bytes), before)


def _lines(text: str) -> list[str]:
    by_index = re.findall(
        r'jaxhet_index="(\d+)",jaxhet_line="\S+ permute all-reduce (.*?) \{', text
    )
    return [line for _, line in sorted(by_index, key=lambda entry: int(entry[0]))]


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
    text = _text(_THREE)
    assert _lines(text) == ["sum hierarchical of 3 f32[10]"]
    assert text.count("collective-permute-start(") == 1
    assert "concatenate(" in text


def test_a_bucket_is_not_larger_than_allowed():
    lines = sorted(_lines(_text(_THREE, 30)))
    assert lines == ["sum hierarchical f32[3]", "sum hierarchical of 2 f32[7]"]
    assert len(_lines(_text(_THREE, 12))) == 3
    assert len(_lines(_text(_THREE, 0))) == 3


def test_another_type_reducer_or_group_stays_apart():
    text = _text(
        f"""
      p = f32[4] parameter(0)
      q = bf16[4] parameter(1)
      {all_reduce("a", "p")}
      {all_reduce("b", "q", shape="bf16[4]")}
      {all_reduce("c", "p").replace("to_apply=sum", "to_apply=most")}
      {all_reduce("d", "p", groups="{{1,0}}")}
      ROOT r = (f32[4], bf16[4], f32[4], f32[4]) tuple(a, b, c, d)
    """,
        before=SUM + SUM.replace("sum", "most").replace("add", "maximum"),
    )
    assert len(_lines(text)) == 4


def test_what_waits_for_another_is_not_with_it():
    text = _text(f"""
      p = f32[4] parameter(0)
      {all_reduce("a", "p")}
      n = f32[4] negate(a)
      {all_reduce("b", "n")}
      ROOT r = (f32[4], f32[4]) tuple(a, b)
    """)
    assert _lines(text) == ["sum hierarchical f32[4]"] * 2


def test_buckets_never_wait_for_each_other():
    """a1 -> b1 and b2 -> a2: {a1, a2} and {b1, b2} would be a cycle, {a1, a2} make b1 wait."""
    most = SUM.replace("sum", "most").replace("add", "maximum")

    def largest(name: str, operand: str, path: str) -> str:
        text = all_reduce(name, operand, path=path)
        return text.replace("to_apply=sum", "to_apply=most")

    text = _text(
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
    assert _lines(text) == [
        "sum hierarchical f32[4]",
        "max hierarchical f32[4]",
        "max hierarchical f32[4]",
        "sum hierarchical f32[4]",
    ]


def test_what_is_used_soon_does_not_wait_for_what_is_ready_later():
    product = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = _text(f"""
      w = f32[4,4] parameter(0)
      x = f32[4,4] parameter(1)
      {all_reduce("a", "x", shape="f32[4,4]", path="e0d0u1/psum")}
      used = f32[4,4] dot(a, w), {product}{named("e1d2/dot_general")}
      y = f32[4,4] dot(x, w), {product}{named("e2d1/dot_general")}
      z = f32[4,4] dot(y, w), {product}{named("e3d2/dot_general")}
      {all_reduce("b", "z", shape="f32[4,4]", path="e4d2/psum")}
      ROOT r = (f32[4,4], f32[4,4]) tuple(used, b)
    """)
    assert _lines(text) == ["sum hierarchical f32[16]"] * 2


def test_all_reduces_across_depths_go_together_whatever_the_order_of_the_text():
    """The scales of norms in a backward pass: each is ready at another time."""
    steps = "\n".join(
        f"""
      d{i} = f32[4,4] dot(d{i + 1}, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
      cut{i} = f32[1,4] slice(d{i}), slice={{[0:1], [0:4]}}"""
        for i in reversed(range(3))
    )
    body = f"""
      w = f32[4,4] parameter(0)
      d3 = f32[4,4] parameter(1)
      {steps}
      {all_reduce("g0", "cut0", shape="f32[1,4]")}
      {all_reduce("g1", "cut1", shape="f32[1,4]")}
      {all_reduce("g2", "cut2", shape="f32[1,4]")}
      ROOT r = (f32[1,4], f32[1,4], f32[1,4]) tuple(g0, g1, g2)
    """
    data = hlo_text.module(hlo_text.entry(body), [0, 1])
    expected = None
    for seed in range(5):
        module = pb.HloModuleProto.FromString(data)
        instructions = list(module.computations[-1].instructions)
        done, shuffled, waiting = set(), [], instructions
        while waiting:
            ready = [i for i in waiting if set(i.operand_ids) <= done]
            chosen = random.Random(seed).choice(ready)
            shuffled.append(chosen)
            done.add(chosen.id)
            waiting = [i for i in waiting if i.id != chosen.id]
        del module.computations[-1].instructions[:]
        module.computations[-1].instructions.extend(shuffled)
        decomposed = decompose(module.SerializeToString(), _JOB, Options(bucket_bytes=1024))
        assert decomposed is not None
        lines = _lines(hlo_text.to_text(decomposed))
        assert lines == ["sum hierarchical of 3 f32[12]"]
        expected = expected or lines
        assert lines == expected
