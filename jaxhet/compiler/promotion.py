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
    befores = [_source_shape(c, x) for x in operands]
    is_tuple = instruction.shape.element_type == pb.TUPLE
    results = c.users(instruction) if is_tuple else [instruction]
    if c.root.id in (instruction.id, *(y.id for y in results)):
        return
    if is_tuple and any(y.opcode != "get-tuple-element" for y in results):
        return
    narrow: list[tuple[Instruction, Shape]] = []
    for y in results:
        before = befores[y.tuple_index]
        if before is None:
            return
        shape = hlo.with_type(y.shape, before.element_type)
        if not all(_is_conversion(c, user) and _is_same(user.shape, shape) for user in c.users(y)):
            return
        narrow.append((y, shape))
    shapes = [
        hlo.with_type(x.shape, before.element_type)
        for x, before in zip(operands, befores, strict=True)
        if before is not None
    ]
    if len(shapes) < len(operands):
        return
    new = hlo.Instruction()
    new.CopyFrom(instruction)
    new.operand_ids[:] = [source(c, x).id for x in operands]
    new.shape.CopyFrom(hlo.tuple_shape(shapes) if is_tuple else shapes[0])
    c.replace(instruction, new)
    for y, shape in narrow:
        users = c.users(y)
        if is_tuple:
            c.rewrite(y, y.opcode, [instruction], shape=shape, tuple_index=y.tuple_index)
        for user in users:
            c.rewrite(user, "bitcast", [y])


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
    root = c.module.computations[x.called_computation_ids[0]].root
    if root.opcode != "convert" or len(x.operand_ids) != 1:
        return False
    (before,) = c.module.computations[x.called_computation_ids[0]].operands(root)
    return before.opcode == "parameter"


def _is_same(a: Shape, b: Shape) -> bool:
    return hlo.shape_text(a) == hlo.shape_text(b)
