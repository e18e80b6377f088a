"""All-reduces that XLA's CPU compiler has made ones of f32, as it does with smaller floats.

Their operands are exact conversions. What these were made of can be exchanged in their place.
"""

from jaxhet.compiler import arithmetic, hlo
from jaxhet.compiler import hlo_pb2 as pb
from jaxhet.compiler.collectives import Collective
from jaxhet.compiler.hlo import Instruction, Shape


def undo(collective: Collective) -> None:
    """Makes it one of the smaller types again, if all its results are rounded to them."""
    c, instruction = collective.computation, collective.instruction
    operands = c.operands(instruction)
    shapes = [shape for x in operands if (shape := _source_shape(c, x)) is not None]
    is_tuple = instruction.shape.element_type == pb.TUPLE
    results = c.users(instruction) if is_tuple else [instruction]
    if len(shapes) < len(operands) or c.root.id in (instruction.id, *(y.id for y in results)):
        return
    if is_tuple and any(y.opcode != "get-tuple-element" for y in results):
        return
    users = {y.id: c.users(y) for y in results}
    for y in results:
        shape = shapes[y.tuple_index]
        if not all(_is_conversion(c, x) and _is_same(x.shape, shape) for x in users[y.id]):
            return
    new = hlo.Instruction()
    new.CopyFrom(instruction)
    new.operand_ids[:] = [source(c, x).id for x in operands]
    new.shape.CopyFrom(hlo.tuple_shape(shapes) if is_tuple else shapes[0])
    c.replace(instruction, new)
    for y in results:
        if is_tuple:
            fields = {"shape": shapes[y.tuple_index], "tuple_index": y.tuple_index}
            c.rewrite(y, y.opcode, [instruction], **fields)
        for x in users[y.id]:
            c.rewrite(x, "bitcast", [y])


def source(c: hlo.Computation, x: Instruction) -> Instruction:
    """What x is the exact conversion of, in a smaller type; else x itself."""
    shape = _source_shape(c, x)
    if shape is None:
        return x
    if x.opcode == "convert":
        return c.operands(x)[0]
    fused = c.module.computations[x.called_computation_ids[0]]
    (before,) = fused.operands(fused.root)
    if before.opcode == "parameter":
        return c.operands(x)[before.parameter_number]
    narrow = c.module.copy_computation(fused, before)
    return c.add(
        "fusion",
        before.shape,
        c.operands(x),
        like=x,
        fusion_kind="kLoop",
        called_computation_ids=[narrow.id],
    )


def _source_shape(c: hlo.Computation, x: Instruction) -> Shape | None:
    """Of what `source` gives, if that is not x."""
    conversion, computation = x, c
    if x.opcode == "fusion" and x.fusion_kind == "kLoop":
        computation = c.module.computations[x.called_computation_ids[0]]
        conversion = computation.root
    if conversion.opcode != "convert":
        return None
    (before,) = computation.operands(conversion)
    types = (before.shape.element_type, conversion.shape.element_type)
    is_exact = (
        all(map(hlo.is_float, types))
        and arithmetic.carried_type(types[0]) == types[0]
        and hlo.bit_width(types[0]) < hlo.bit_width(types[1])
    )
    wide = hlo.with_type(before.shape, types[1])
    return before.shape if is_exact and _is_same(wide, conversion.shape) else None


def _is_conversion(c: hlo.Computation, x: Instruction) -> bool:
    """Whether x is nothing but the conversion of its operand."""
    if x.opcode != "fusion":
        return x.opcode == "convert"
    fused = c.module.computations[x.called_computation_ids[0]]
    if fused.root.opcode != "convert" or len(x.operand_ids) != 1:
        return False
    (before,) = fused.operands(fused.root)
    return before.opcode == "parameter"


def _is_same(a: Shape, b: Shape) -> bool:
    return hlo.shape_text(a) == hlo.shape_text(b)
