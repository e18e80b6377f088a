"""The view of a module: what it adds is what XLA reads, and the rest stays."""

import re

import pytest

from jaxhet._errors import JaxhetError
from jaxhet.compiler import hlo
from jaxhet.compiler import proto as pb
from tests.python.compiler import hlo_text

_BODY = """
  p = f32[2,3]{0,1} parameter(0), metadata={op_name="x"}
  q = f32[2,3]{0,1} add(p, p), backend_config={"outer_dimension_partitions":["2"]}
  ROOT r = (f32[2,3]{0,1}, f32[2,3]{0,1}) tuple(q, p)
"""


def _module(body: str = _BODY) -> hlo.Module:
    return hlo.Module(hlo_text.module(hlo_text.entry(body), [0]))


def test_round_trip_keeps_unknown_fields():
    data = hlo_text.module(hlo_text.entry(_BODY), [0])
    assert hlo_text.to_text(hlo.Module(data).serialize()) == hlo_text.to_text(data)
    assert "outer_dimension_partitions" in hlo_text.to_text(data)


def test_added_instruction_has_a_new_id_and_comes_before_its_user():
    module = _module()
    entry = module.entry
    q, p = entry.operands(entry.root)
    entry.rewrite(q, "negate", [entry.add("multiply", p.shape, [p, p], like=p)])
    ids = [i.id for i in entry.instructions]
    assert len(set(ids)) == len(ids)
    assert {i >> 32 for i in ids} == {entry.id}
    text = hlo_text.to_text(module.serialize())
    assert text.index("multiply(") < text.index("negate(")


def test_added_computation_comes_before_its_callers():
    module = _module()
    (q, _) = module.entry.operands(module.entry.root)
    shape = hlo.array_shape(pb.F32, [])

    def build(c: hlo.Computation) -> hlo.Instruction:
        return c.add("negate", shape, [c.add("parameter", shape)])

    called = module.add_computation("negative", build)
    module.entry.rewrite(q, "map", [*module.entry.operands(q)[:1]], dimensions=[0, 1])
    q.called_computation_ids.append(called.id)
    assert "map(" in hlo_text.to_text(module.serialize())


def test_control_predecessor_moves_before():
    module = _module("""
      p = f32[2] parameter(0)
      a = f32[2] negate(p)
      b = f32[2] exponential(p)
      ROOT r = (f32[2], f32[2]) tuple(a, b)
    """)
    a, b = module.entry.operands(module.entry.root)
    module.entry.add_control_predecessor(a, b)
    text = hlo_text.to_text(module.serialize())
    assert text.index("exponential(") < text.index("negate(")
    assert re.search(r"negate\(.*control-predecessors=\{%b", text)


def test_cycle_is_an_error():
    module = _module()
    q, _ = module.entry.operands(module.entry.root)
    module.entry.add_control_predecessor(q, module.entry.root)
    with pytest.raises(JaxhetError, match="waits for itself"):
        module.serialize()


def test_width_of_every_array_type():
    not_arrays = {pb.PRIMITIVE_TYPE_INVALID, pb.TUPLE, pb.OPAQUE_TYPE, pb.TOKEN, pb.BUFFER}
    for element_type in set(pb.PrimitiveType.values()) - not_arrays:
        digits = "".join(c if c.isdigit() else " " for c in pb.PrimitiveType.Name(element_type))
        width = 8 if element_type == pb.PRED else int(digits.split()[0])
        assert hlo.bit_width(element_type) == width


# Form in which XLA writes programs of JAX.
_WITH_FRAMES = """
HloModule m

FileNames
1 "/v/w.py"
2 "/x/y.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=2 function_name_id=1 line=3 end_line=4 column=5 end_column=6}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

ENTRY e {
  ROOT p = f32[2] parameter(0), metadata={op_name="q" stack_frame_id=1}
}
"""


def test_location_from_metadata_and_from_stack_frames():
    module = _module("""
      p = f32[2] parameter(0), metadata={op_name="jit(f)/add" source_file="/a/b/c.py" source_line=7}
      ROOT q = f32[2] negate(p)
    """)
    p, q = module.entry.instructions
    assert module.location(p) == "jit(f)/add b/c.py:7"
    assert module.location(q) == "q"
    module = hlo.Module(hlo_text.parsed(_WITH_FRAMES))
    assert module.location(module.entry.root) == "q x/y.py:3"
