"""A computation with collectives that two loops or branches call becomes one for each of them."""

from jaxhet.compiler import carrier, hlo
from tests.python.compiler import hlo_text
from tests.python.compiler.hlo_text import SUM, all_reduce, named

_BODY = f"""
body {{
  s = (s32[], f32[4]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = f32[4] get-tuple-element(s), index=1
  {all_reduce("y", "x", path="jit(f)/e0d0/while/body/e1d0/psum")}
  ROOT r = (s32[], f32[4]) tuple(i, y)
}}
test {{
  s = (s32[], f32[4]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant(3)
  ROOT c = pred[] compare(i, n), direction=LT
}}
"""
_ENTRY = f"""
  i = s32[] parameter(0)
  p = f32[4] parameter(1)
  q = f32[4] sine(p)
  s = (s32[], f32[4]) tuple(i, p)
  t = (s32[], f32[4]) tuple(i, q)
  one = (s32[], f32[4]) while(s), condition=test, body=body{named("jit(f)/e0d0/while")}
  two = (s32[], f32[4]) while(t), condition=test, body=body{named("jit(f)/e7d0/while")}
  a = f32[4] get-tuple-element(one), index=1
  b = f32[4] get-tuple-element(two), index=1
  ROOT d = f32[4] divide(a, b)
"""


def _shared() -> bytes:
    return hlo_text.of_two(_ENTRY, SUM + _BODY)


def test_each_caller_has_exchanges_of_its_own_with_its_place_in_the_program() -> None:
    for platform in ("cpu", "cuda"):
        job = hlo_text.job(0, 1, platform=platform)
        assert [e.source for e in hlo_text.bridged(_shared(), job)[1].exchanges] == [
            "jit(f)/e0/while/body/e1/psum",
            "jit(f)/e7/while/body/e1/psum",
        ]
        decomposed = hlo_text.after_pre(_shared(), job)
        hlo_text.to_text(decomposed)  # XLA can read it
        module = hlo.Module(decomposed)
        names = [i.name for c in module.proto.computations for i in c.instructions]
        assert len(set(names)) == len(names)
        loops = [i for i in module.entry.instructions if i.opcode == "while"]
        bodies, conditions = zip(*(i.called_computation_ids for i in loops), strict=True)
        assert (len(set(bodies)), len(set(conditions))) == (2, 1)


def test_index_follows_the_equations_and_not_the_order_of_the_text() -> None:
    job = hlo_text.job(0, 1, platform="cuda")
    text = hlo_text.entry(_ENTRY, SUM + _BODY).replace("e0d0/while", "e9d0/while")
    data = hlo_text.module(text, [0, 1])
    module = hlo.Module(hlo_text.after_pre(data, job))
    loops = {i.metadata.op_name: i for i in module.entry.instructions if i.opcode == "while"}
    body = {name: module.computations[i.called_computation_ids[0]] for name, i in loops.items()}
    index = {
        name: [carrier.index_of_call(i) for i in c.instructions if carrier.is_start(i)]
        for name, c in body.items()
    }
    assert index == {"jit(f)/e7d0/while": [0], "jit(f)/e9d0/while": [1]}
