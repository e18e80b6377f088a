"""The plan: readiness order, independent of names, ids and the order of instructions."""

import random
import re

import pytest

from jaxhet._errors import JaxhetError
from jaxhet.compiler import Job, Options, Plan, bridge, decompose, hlo
from jaxhet.compiler import hlo_pb2 as pb
from tests.python.compiler import hlo_text
from tests.python.compiler.hlo_text import all_reduce

_JOB = hlo_text.job(0, 1)
_ALONE = Options(bucket_bytes=0)

# The backward pass of three layers: g2 is there first, g0 last. The text has them reversed.
_BACKWARD = f"""
  w0 = f32[4,4] parameter(0)
  w1 = f32[4,4] parameter(1)
  w2 = f32[4,4] parameter(2)
  d3 = f32[4,4] parameter(3)
  d2 = f32[4,4] dot(d3, w2), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  d1 = f32[4,4] dot(d2, w1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  d0 = f32[4,4] dot(d1, w0), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  {all_reduce("g0", "d0", shape="f32[4,4]")}, metadata={{op_name="g0"}}
  {all_reduce("g1", "d1", shape="f32[4,4]")}, metadata={{op_name="g1"}}
  {all_reduce("g2", "d2", shape="f32[4,4]")}, metadata={{op_name="g2"}}
  ROOT r = (f32[4,4], f32[4,4], f32[4,4]) tuple(g0, g1, g2)
"""


def _plan(data: bytes, job: Job = _JOB, order: str = "readiness") -> Plan:
    options = Options(order=order)  # type: ignore[arg-type]
    decomposed = decompose(data, job, options)
    assert decomposed is not None
    bridged = bridge(decomposed, job, options)
    assert bridged is not None
    return bridged[1]


def _module(body: str, before: str = hlo_text.SUM) -> bytes:
    return hlo_text.module(hlo_text.entry(body, before), [0, 1])


def _sources(plan: Plan) -> list[str]:
    return [e.source for e in plan.exchanges]


def test_readiness_order_follows_the_dataflow():
    assert _sources(_plan(_module(_BACKWARD))) == ["g2", "g1", "g0"]


def test_text_order_follows_the_text():
    assert _sources(_plan(_module(_BACKWARD), order="text")) == ["g0", "g1", "g2"]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_starts_are_chained_in_plan_order(platform: str):
    job = hlo_text.job(0, 1, platform=platform)
    decomposed = decompose(_module(_BACKWARD), job, _ALONE)
    assert decomposed is not None
    module = hlo.Module(decomposed)
    starts = [i for i in module.entry.instructions if "jaxhet_index" in i.frontend_attributes.map]
    starts.sort(key=lambda i: int(i.frontend_attributes.map["jaxhet_index"]))
    assert [list(i.control_predecessor_ids) for i in starts] == [
        [],
        [starts[0].id],
        [starts[1].id],
    ]


def _shuffled(data: bytes, seed: int) -> bytes:
    """The same program with other names and ids, and its instructions in another valid order."""
    rng = random.Random(seed)
    module = hlo.Module(data)
    for computation in module.computations.values():
        old = list(computation.proto.instructions)
        new_ids = [(computation.id << 32) + place for place in range(len(old))]
        rng.shuffle(new_ids)
        new_id = dict(zip((i.id for i in old), new_ids, strict=True))
        for i in old:
            i.id, i.name = new_id[i.id], f"{i.opcode}.{rng.randrange(10**6)}"
            i.operand_ids[:] = [new_id[o] for o in i.operand_ids]
        rng.shuffle(old)
        _set_instructions(computation.proto, old)
        computation.proto.root_id = new_id[computation.proto.root_id]
        in_order = hlo.Computation(module, computation.proto)
        in_order.sort()
        _set_instructions(computation.proto, in_order.instructions)
    return module.proto.SerializeToString()


def _set_instructions(proto: pb.HloComputationProto, new: list[hlo.Instruction]) -> None:
    del proto.instructions[:]
    proto.instructions.extend(new)


# Equal depth, kind, shape and groups. Outputs tell a from b; only the expression tells c from d.
_TIES = f"""
  p = f32[4] parameter(0)
  s = f32[4] sine(p)
  t = f32[4] cosine(p)
  u = f32[4] tanh(p)
  v = f32[4] exponential(p)
  {all_reduce("a", "s")}, metadata={{op_name="a"}}
  {all_reduce("b", "t")}, metadata={{op_name="b"}}
  {all_reduce("c", "u")}, metadata={{op_name="c"}}
  {all_reduce("d", "v")}, metadata={{op_name="d"}}
  e = f32[4] divide(c, d)
  ROOT r = (f32[4], f32[4], f32[4]) tuple(b, a, e)
"""


@pytest.mark.parametrize("body", [_BACKWARD, _TIES])
def test_plan_does_not_depend_on_names_ids_and_text_order(body: str):
    data = _module(body)
    expected = _plan(data)
    for seed in range(20):
        shuffled = _shuffled(data, seed)
        assert shuffled != data
        assert _plan(shuffled).text == expected.text


def test_gathers_start_in_the_order_in_which_they_are_used():
    """Each could start at once; their shapes say nothing about who needs them first."""
    steps, x = [], "x"
    for i in range(12):
        steps.append(f"w{i} = f32[2,{16 - i}] parameter({i + 1})")
        steps.append(
            f"g{i} = f32[4,{16 - i}] all-gather(w{i}), channel_id=1, replica_groups={{{{0,1}}}},"
            f' dimensions={{0}}, use_global_device_ids=true, metadata={{op_name="g{i}"}}'
        )
        steps.append(
            f"d{i} = f32[4,{16 - i}] dot({x}, g{i}), lhs_contracting_dims={{1}},"
            " rhs_contracting_dims={0}"
        )
        steps.append(f"x{i} = f32[4,4] slice(d{i}), slice={{[0:4], [0:4]}}")
        x = f"x{i}"
    body = "x = f32[4,4] parameter(0)\n" + "\n".join(steps) + f"\nROOT r = f32[4,4] negate({x})"
    plan = _plan(_module(body), hlo_text.job(0, 1, platform="cuda"))
    order = [int(source[1:]) for source in _sources(plan)]
    assert order[-3:] == [9, 10, 11]
    assert sorted(order[:9]) == list(range(9))


def test_ties_are_broken_by_outputs_and_last_by_what_is_computed():
    assert _sources(_plan(_module(_TIES)))[:2] == ["b", "a"]


def test_exchanges_that_look_alike_are_told_apart_in_the_plan():
    lines = [e.line for e in _plan(_module(_TIES)).exchanges]
    assert len(set(lines)) == len(lines)
    swapped = _TIES.replace("tuple(b, a, e)", "tuple(a, b, e)")
    assert _plan(_module(swapped)).text != _plan(_module(_TIES)).text


def test_fingerprint_differs_for_another_source():
    """Two programs may differ in nothing that is exchanged."""
    plan = _plan(_module(_BACKWARD))
    other = _plan(_module(_BACKWARD.replace('op_name="g1', 'op_name="h1')))
    assert plan.fingerprint != other.fingerprint
    assert 0 <= plan.fingerprint < 1 << 63


def test_fingerprint_does_not_depend_on_the_folder_of_the_source():
    def plan(source: str) -> Plan:
        return _plan(_module(_BACKWARD.replace('op_name="g1"', f'op_name="g1" {source}')))

    there = plan('source_file="/one/a/train.py" source_line=7')
    here = plan('source_file="/srv/b/train.py" source_line=7')
    below = plan('source_file="/srv/b/train.py" source_line=8')
    assert there.fingerprint == here.fingerprint
    assert below.fingerprint != here.fingerprint


@pytest.mark.parametrize(
    ("before", "after"),
    [("f32[4]", "f32[5]"), ("f32[4]", "f16[4]"), ("{{0,1}}", "{{1,0}}"), ("main", "other")],
)
def test_fingerprint_differs_for_another_shape_type_group_or_program(before: str, after: str):
    body = "p = f32[4] parameter(0)\nROOT " + all_reduce("r", "p")
    text = hlo_text.entry(body)
    data = hlo_text.module(text, [0, 1])
    if before == "main":
        other = pb.HloModuleProto.FromString(data)
        other.name = "jit_other"
        changed = other.SerializeToString()
    else:
        changed = hlo_text.module(text.replace(before, after), [0, 1])
    assert _plan(data).fingerprint != _plan(changed).fingerprint


def test_plan_text_is_a_line_a_tab_and_the_source():
    plan = _plan(_module(_BACKWARD))
    lines = plan.text.splitlines()
    assert len(lines) == 3
    assert all(line.count("\t") == 1 for line in lines)
    assert re.search(
        r"all_gather all-reduce sum flat f32\[16\] \{\{0,1\}\} #[0-9a-f]{8} @[0-9a-f]{8}\tg2$",
        lines[0],
    )


def test_exchange_lost_on_the_way_is_an_error():
    decomposed = decompose(_module(_BACKWARD), _JOB, Options())
    assert decomposed is not None
    module = pb.HloModuleProto.FromString(decomposed)
    for instruction in module.computations[-1].instructions:
        if instruction.frontend_attributes.map.get("jaxhet_index") == "1":
            instruction.frontend_attributes.Clear()
    with pytest.raises(JaxhetError, match=r"XLA changed the exchanges .* numbers \[0, 2\]"):
        bridge(module.SerializeToString(), _JOB, Options())


def test_bridge_on_cpu_gives_back_the_same_bytes():
    decomposed = decompose(_module(_BACKWARD), _JOB, Options())
    assert decomposed is not None
    bridged = bridge(decomposed, _JOB, Options())
    assert bridged is not None
    assert bridged[0] is decomposed


def test_bridge_on_gpu_makes_pairs_calls_at_their_places():
    job = hlo_text.job(0, 1, platform="rocm")
    decomposed = decompose(_module(_BACKWARD), job, _ALONE)
    assert decomposed is not None
    bridged = bridge(decomposed, job, _ALONE)
    assert bridged is not None
    before = [i.id for i in hlo.Module(decomposed).entry.instructions]
    assert [i.id for i in hlo.Module(bridged[0]).entry.instructions] == before
    text = hlo_text.to_text(bridged[0])
    assert "collective-permute" not in text
    assert text.count('custom_call_target="jaxhet_start"') == 3
    assert text.count("output_to_operand_aliasing={{}: (0, {})}") == 3
    assert '"custom_call_backend_config"' in text
    assert "kind = 0 : i64" in text
    assert "ranks = array<i64: 0, 1, 1, 0>" in text


def test_collective_that_appears_between_the_passes_is_an_error():
    body = "p = f32[4] parameter(0)\nROOT " + all_reduce("r", "p")
    with pytest.raises(JaxhetError, match=r"XLA added r, which crosses islands, after"):
        bridge(_module(body), _JOB, Options())


def test_start_without_its_done_is_an_error():
    job = hlo_text.job(0, 1, platform="cuda")
    decomposed = decompose(_module(_BACKWARD), job, _ALONE)
    assert decomposed is not None
    module = pb.HloModuleProto.FromString(decomposed)
    for instruction in module.computations[-1].instructions:
        if instruction.opcode == "collective-permute-done":
            instruction.opcode = "get-tuple-element"
    with pytest.raises(JaxhetError, match=r"exchange \S+ is used by \S+, not by its done alone"):
        bridge(module.SerializeToString(), job, _ALONE)
