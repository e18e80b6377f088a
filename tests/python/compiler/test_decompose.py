"""PRE on HLO text: its changes, and programs that stay as they are."""

import re
from typing import Literal

import pytest

from jaxhet.compiler import Options, bridge, decompose, hlo
from tests.python.compiler import hlo_text
from tests.python.compiler.hlo_text import SUM, all_reduce, check, decomposed

_TWO_ISLANDS = hlo_text.job(0, 1)
_FOUR = hlo_text.job(0, 0, 1, 1)


_UNEQUAL = "p = f32[4] parameter(0)\nROOT " + all_reduce("r", "p", "{{0,1,2},{3}}")


@pytest.mark.parametrize("algorithm", ["flat", "hierarchical"])
def test_groups_of_unequal_size_are_one_exchange(algorithm: Literal["flat", "hierarchical"]):
    text = decomposed(_UNEQUAL, _FOUR, Options(algorithm=algorithm, two_shot_bytes=0))
    assert "all_gather all-reduce sum flat f32[4] {{0,1,2},{3}}" in text
    data = hlo_text.module(hlo_text.entry(_UNEQUAL), [0, 1, 2, 3])
    (spec,) = hlo_text.planned(decompose(data, _FOUR, Options(algorithm=algorithm)) or b"")
    assert (spec.movement.ranks, spec.movement.group_size) == ((0, 1, 2, 3, -1, -1), 3)
    assert re.search(r"f32\[12\]\{0\} custom-call", text)
    assert ("groups have different members per island: 1, 2+1" in text) == (
        algorithm == "hierarchical"
    )


def test_reducer_is_seen_through_conversions():
    before = """
    sum {
      a = bf16[] parameter(0)
      b = bf16[] parameter(1)
      x = f32[] convert(a)
      y = f32[] convert(b)
      z = f32[] add(x, y)
      ROOT c = bf16[] convert(z)
    }
    """
    body = "p = bf16[4] parameter(0)\nROOT " + all_reduce("r", "p", shape="bf16[4]")
    assert "all_gather all-reduce sum flat" in decomposed(body, before=before)


def test_all_reduce_keeps_its_place_for_users_and_control():
    text = decomposed(f"""
      p = f32[4] parameter(0)
      n = f32[4] negate(p)
      {all_reduce("r", "p")}, control-predecessors={{n}}
      e = f32[4] exponential(p), control-predecessors={{r}}
      ROOT t = (f32[4], f32[4], f32[4]) tuple(n, r, e)
    """)
    check(
        text,
        """
        CHECK: %r = f32[4]{0} bitcast({{.*}}control-predecessors={%n}
        CHECK: %e = {{.*}}control-predecessors={%r}
        """,
    )


_WHILE = f"""
{SUM}
body {{
  t = (s32[], f32[4]) parameter(0)
  i = s32[] get-tuple-element(t), index=0
  x = f32[4] get-tuple-element(t), index=1
  {all_reduce("r", "x")}
  ROOT u = (s32[], f32[4]) tuple(i, r)
}}
condition {{
  t = (s32[], f32[4]) parameter(0)
  ROOT c = pred[] constant(false)
}}
"""


def test_exchange_in_a_loop_has_its_path_and_the_loop_is_a_link_of_the_chain():
    text = decomposed(
        f"""
      p = f32[4] parameter(0)
      n = s32[] parameter(1)
      {all_reduce("a", "p")}
      t = (s32[], f32[4]) tuple(n, a)
      w = (s32[], f32[4]) while(t), condition=condition, body=body
      x = f32[4] get-tuple-element(w), index=1
      ROOT {all_reduce("b", "x")}
    """,
        before=_WHILE,
    )
    check(
        text,
        """
        CHECK-LABEL: ENTRY
        CHECK: [[FIRST:%.*]] = {{.*}} custom-call(
        CHECK: %w = {{.*}} while({{.*}}control-predecessors={[[FIRST]]}
        CHECK: custom-call({{.*}}control-predecessors={%w}
        CHECK: plan: test all_gather
        CHECK-NEXT: plan: test/while0.body all_gather
        CHECK-NEXT: plan: test all_gather
        CHECK-NOT: plan:
        """,
    )


def test_local_collectives_and_those_of_one_island_are_left_alone():
    body = "p = f32[4] parameter(0)\nROOT " + all_reduce("r", "p", "{{0,1},{2,3}}")
    data = hlo_text.module(hlo_text.entry(body), [0, 1, 2, 3])
    assert decompose(data, _FOUR, Options()) is None
    assert decompose(data, hlo_text.job(0, 0, 0, 0), Options()) is None


def test_module_without_collectives_is_left_alone():
    data = hlo_text.module(hlo_text.entry("ROOT p = f32[4] parameter(0)"), [0, 1])
    assert decompose(data, _TWO_ISLANDS, Options()) is None
    assert bridge(data, _TWO_ISLANDS) is None


_GATHER = "channel_id=1, replica_groups={{0,1,2,3}}, dimensions={1}, use_global_device_ids=true"
_SCATTER = f"{_GATHER}, to_apply=sum"


@pytest.mark.parametrize(
    ("op", "line"),
    [
        (
            f"f32[4,16] all-gather(p), {_GATHER}",
            "all_gather all-gather dim 1 hierarchical f32[16] {{0,2},{1,3}}",
        ),
        (
            f"f32[4,1] reduce-scatter(p), {_SCATTER}",
            "all_to_all reduce-scatter sum dim 1 hierarchical f32[8] {{0,2},{1,3}}",
        ),
        (
            "f32[4,4] all-to-all(p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}",
            "all_to_all all-to-all dim 0 flat f32[16] {{0,1,2,3}}",
        ),
        (
            "f32[4,4] collective-permute(p), channel_id=1, source_target_pairs={{0,1},{1,2}}",
            "permute collective-permute f32[16] {{0,1},{1,2}}",
        ),
    ],
)
def test_each_collective_on_cpu(op: str, line: str):
    text = decomposed(
        f"p = f32[4,4] parameter(0)\nROOT r = {op}", _FOUR, Options(algorithm="hierarchical")
    )
    assert re.findall(r"plan: \S+ (.*?) @", text) == [line]


_ASYNC = f"""
{SUM}
wrapped {{
  q = f32[8] parameter(0)
  ROOT s = f32[4] reduce-scatter(q), channel_id=1, replica_groups={{{{0,1}}}}, dimensions={{0}},
    use_global_device_ids=true, to_apply=sum
}}
"""


@pytest.mark.parametrize(
    ("start", "done", "line"),
    [
        (
            "f32[8] all-reduce-start(p), channel_id=1, replica_groups={{0,1}},"
            " use_global_device_ids=true, to_apply=sum",
            "f32[8] all-reduce-done(s)",
            "all_gather all-reduce sum flat f32[8]",
        ),
        (
            "(f32[8], f32[16]) all-gather-start(p), channel_id=1, replica_groups={{0,1}},"
            " dimensions={0}, use_global_device_ids=true",
            "f32[16] all-gather-done(s)",
            "all_gather all-gather dim 0 flat f32[8]",
        ),
        (
            "(f32[8], f32[8]) collective-permute-start(p), channel_id=1,"
            " source_target_pairs={{0,1}}",
            "f32[8] collective-permute-done(s)",
            "permute collective-permute f32[8]",
        ),
        (
            "((f32[8]), f32[4]) async-start(p), calls=wrapped",
            "f32[4] async-done(s)",
            "all_to_all reduce-scatter sum dim 0 flat f32[8]",
        ),
    ],
)
def test_asynchronous_collectives_are_taken_as_one(start: str, done: str, line: str):
    body = f"""
      p = f32[8] parameter(0)
      s = {start}
      n = f32[8] negate(p), control-predecessors={{s}}
      d = {done}
      ROOT t = (f32[8], {done.split()[0]}) tuple(n, d)
    """
    text = decomposed(body, before=_ASYNC)
    assert re.findall(r"plan: \S+ (.*?) \{", text) == [line]
    assert "-start(" not in text
    assert "-done(" not in text


def test_wrapped_collective_has_the_name_of_its_start():
    body = """
      p = f32[8] parameter(0)
      s = ((f32[8]), f32[4]) async-start(p), calls=wrapped, metadata={op_name="its start"}
      ROOT d = f32[4] async-done(s)
    """
    module = hlo.Module(hlo_text.module(hlo_text.entry(body, _ASYNC), [0, 1]))
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode == "reduce-scatter":  # XLA names it so for GPUs
                instruction.metadata.op_name = "the function around"
    decomposed = hlo_text.after_pre(module.serialize(), _TWO_ISLANDS)
    assert [spec.source for spec in hlo_text.planned(decomposed)] == ["its start"]
