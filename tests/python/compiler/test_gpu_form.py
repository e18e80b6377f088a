"""PRE on HLO text for GPUs: carriers, barriers, and arithmetic that XLA fuses."""

import re

import pytest

from jaxhet.compiler import Job, Options, hlo
from jaxhet.compiler.exchange import ExchangeSpec
from tests.python.compiler import hlo_text
from tests.python.compiler.hlo_text import SUM, all_reduce, decomposed, opcodes

_TWO_BY_TWO = hlo_text.job(0, 0, 1, 1, platform="cuda")
_UNEQUAL = "p = f32[4] parameter(0)\nROOT " + all_reduce("r", "p", "{{0,1,2},{3}}")
_GATHER = "channel_id=1, replica_groups={{0,1,2,3}}, dimensions={1}, use_global_device_ids=true"
_SCATTER = f"{_GATHER}, to_apply=sum"


def _planned(body: str, job: Job, options: Options | None = None) -> list[ExchangeSpec]:
    """The exchanges of an entry computation, by index."""
    data = hlo_text.module(hlo_text.entry(body), list(range(len(job.islands))))
    return hlo_text.planned(hlo_text.after_pre(data, job, options))


def test_groups_of_unequal_size_have_a_carrier_of_equal_ones_on_gpus():
    text = decomposed(_UNEQUAL, _TWO_BY_TWO)
    assert re.search(r"all-gather-start\(.*replica_groups=(\{\{0,1,2,3\}\}|\[1,4\])", text)
    assert "all_gather all-reduce sum flat f32[4] {{0,1,2},{3}}" in text
    (spec,) = _planned(_UNEQUAL, _TWO_BY_TWO)
    assert (spec.movement.ranks, spec.movement.group_size) == ((0, 1, 2, -1, 3, -1, -1, -1), 4)


@pytest.mark.parametrize(
    ("element_type", "opcode", "barriers"),
    [("f32", "add", 1), ("f32", "multiply", 2), ("bf16", "add", 2), ("s32", "maximum", 1)],
)
def test_gpu_form_fixes_what_other_ranks_must_see_alike(
    element_type: str, opcode: str, barriers: int
):
    before = SUM.replace("f32", element_type).replace("add", opcode)
    shape = f"{element_type}[4]"
    body = f"p = {shape} parameter(0)\nROOT " + all_reduce("r", "p", shape=shape)
    text = decomposed(body, hlo_text.job(0, 1, platform="cuda"), before=before)
    assert opcodes(text).count("opt-barrier") == barriers


@pytest.mark.parametrize(
    ("op", "kind", "shape", "num_bytes", "local"),
    [
        (f"f32[4,16] all-gather(p), {_GATHER}", "all_gather", "f32[16]", 64, "all-gather"),
        (f"f32[4,1] reduce-scatter(p), {_SCATTER}", "all_to_all", "f32[8]", 16, "reduce-scatter"),
        (
            "f32[4,4] all-to-all(p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}",
            "all_to_all",
            "f32[16]",
            32,
            "all-to-all",
        ),
        (
            "f32[4,4] collective-broadcast(p), channel_id=1, replica_groups={{1,0,2,3}}",
            "permute",
            "f32[16]",
            64,
            "collective-broadcast",
        ),
    ],
)
def test_each_collective_on_gpu_crosses_once_and_leaves_the_rest_to_xla(
    op: str, kind: str, shape: str, num_bytes: int, local: str
):
    text = decomposed(f"p = f32[4,4] parameter(0)\nROOT r = {op}", _TWO_BY_TWO)
    assert re.findall(r"plan: \S+ (\S+) .*? (\w+\[\d+\]) \{", text) == [(kind, shape)]
    assert opcodes(text).count(local) == 1
    assert re.findall(r"; (\d+) bytes;", text) == [str(num_bytes)]


@pytest.mark.parametrize(("narrow", "wide"), [("s16", "s32"), ("u16", "u32"), ("s8", "s8")])
def test_local_sums_are_of_types_that_nccl_sums(narrow: str, wide: str):
    body = f"p = {narrow}[4,4] parameter(0)\nROOT r = {narrow}[4,1] reduce-scatter(p), {_SCATTER}"
    text = decomposed(body, _TWO_BY_TWO, before=SUM.replace("f32[]", f"{narrow}[]"))
    assert re.findall(r"= (\w+)\[8\]\S* reduce-scatter\(", text) == [wide]
    assert re.findall(r"plan: \S+ (\S+) .*? (\w+)\[8\] \{", text) == [("all_to_all", narrow)]


@pytest.mark.parametrize("is_loop", [True, False])
def test_loops_hide_their_local_sums_from_xla(is_loop: bool):
    body = f"""
      x = f32[4] parameter(0)
      {all_reduce("local", "x", "{{0,1},{2,3}}", path="local")}
      {all_reduce("across", "local", "{{0,2},{1,3}}", path="across")}
      ROOT both = f32[4] add(local, across)
    """
    before = f"{SUM}\nalways {{\n  y = f32[4] parameter(0)\n  ROOT t = pred[] constant(true)\n}}\n"
    text = hlo_text.entry(body, before)
    if is_loop:
        loop = "x = f32[4] parameter(0)\nROOT r = f32[4] while(x), condition=always, body=step"
        text = hlo_text.entry(loop, f"{before}\nstep {{\n{body}\n}}\n")
    result = hlo_text.after_pre(hlo_text.module(text, [0, 1, 2, 3]), _TWO_BY_TWO)
    users = [
        {user.opcode for user in c.users(i)}
        for c in hlo.Module(result).computations.values()
        for i in c.instructions
        if i.opcode == "all-reduce" and i.metadata.op_name == "local"
    ]
    assert [found == {"opt-barrier"} for found in users] == [is_loop]
