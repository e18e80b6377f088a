"""Undoes the promotion of collectives to f32.

XLA's CPU compiler promotes collectives of small floats to f32. The promoted operands are exact
conversions, so the original, smaller values can be exchanged instead.
"""

from jaxhet.compiler import arithmetic, hlo
from jaxhet.compiler import proto as pb
from jaxhet.compiler.collectives import Collective
from jaxhet.compiler.hlo import Instruction, Shape


def undo(collective: Collective) -> None:
    """Gives a collective its smaller types again, if the program rounds all results to them."""
    c, instruction = collective.computation, collective.instruction
    operands = c.operands(instruction)
    sources = [shape for x in operands if (shape := _source_shape(c, x)) is not None]
    is_tuple = instruction.shape.element_type == pb.TUPLE
    wide = list(instruction.shape.tuple_shapes) if is_tuple else [instruction.shape]
    results = c.users(instruction) if is_tuple else [instruction]
    if len(sources) < len(operands) or c.root.id in (instruction.id, *(y.id for y in results)):
        return
    if is_tuple and any(y.opcode != "get-tuple-element" for y in results):
        return
    pairs = zip(wide, sources, strict=True)
    shapes = [hlo.with_type(shape, narrow.element_type) for shape, narrow in pairs]
    users = {y.id: c.users(y) for y in results}
    for y in results:
        shape = shapes[y.tuple_index]
        if not all(_rounds(c, x, y, shape) for x in users[y.id]):
            return
    new = hlo.Instruction()
    new.CopyFrom(instruction)
    new.operand_ids[:] = [source(c, x).id for x in operands]
    new.shape.CopyFrom(hlo.tuple_shape(shapes) if is_tuple else shapes[0])
    c.replace(instruction, new)
    for y in results:
        shape = shapes[y.tuple_index]
        if is_tuple:
            c.rewrite(y, y.opcode, [instruction], shape=shape, tuple_index=y.tuple_index)
        for x in users[y.id]:
            if _is_conversion(c, x):
                c.rewrite(x, "bitcast", [y])
            else:
                _narrow_parameters(c, x, y, shape)


def _rounds(c: hlo.Computation, x: Instruction, y: Instruction, shape: Shape) -> bool:
    """Whether x uses its operand y only after rounding it to `shape`."""
    if _is_conversion(c, x):
        return _is_same(x.shape, shape)
    if x.opcode != "fusion" or len(c.module.callers[x.called_computation_ids[0]]) > 1:
        return False
    fused, parameters = _parameters(c, x, y)
    return all(
        p.id != fused.root.id
        and all(u.opcode == "convert" and _is_same(u.shape, shape) for u in fused.users(p))
        for p in parameters
    )


def _narrow_parameters(c: hlo.Computation, x: Instruction, y: Instruction, shape: Shape) -> None:
    """Gives a fusion's parameters for y the type of `shape`, to which the fusion converts them."""
    fused, parameters = _parameters(c, x, y)
    for parameter in parameters:
        fused.reshape(parameter, shape)
        fused.proto.program_shape.parameters[parameter.parameter_number].CopyFrom(shape)


def _parameters(
    c: hlo.Computation, x: Instruction, y: Instruction
) -> tuple[hlo.Computation, list[Instruction]]:
    """The computation of a fusion, and its parameters that are y."""
    fused = c.module.computations[x.called_computation_ids[0]]
    numbers = {number for number, i in enumerate(x.operand_ids) if i == y.id}
    return fused, [
        p for p in fused.instructions if p.opcode == "parameter" and p.parameter_number in numbers
    ]


def source(c: hlo.Computation, x: Instruction) -> Instruction:
    """The value of a smaller type that x is the exact conversion of; else x itself."""
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
    """Shape of the unpromoted operand, or None if x was not promoted."""
    conversion, computation = x, c
    if x.opcode == "fusion" and x.fusion_kind == "kLoop":
        computation = c.module.computations[x.called_computation_ids[0]]
        conversion = computation.root
    if conversion.opcode != "convert":
        return None
    (before,) = computation.operands(conversion)
    types = (before.shape.element_type, conversion.shape.element_type)
    wide = hlo.with_type(before.shape, types[1])
    return before.shape if is_exact(*types) and _is_same(wide, conversion.shape) else None


def is_exact(narrow: int, wide: int) -> bool:
    """Whether a larger float type has every value of a smaller one."""
    if narrow == pb.F8E8M0FNU and wide == pb.F16:
        return False
    return (
        hlo.is_float(narrow)
        and hlo.is_float(wide)
        and arithmetic.carried_type(narrow) == narrow
        and hlo.bit_width(narrow) < hlo.bit_width(wide)
    )


def _is_conversion(c: hlo.Computation, x: Instruction) -> bool:
    """Whether x is only a conversion of its operand."""
    if x.opcode != "fusion":
        return x.opcode == "convert"
    fused = c.module.computations[x.called_computation_ids[0]]
    if fused.root.opcode != "convert" or len(x.operand_ids) != 1:
        return False
    (before,) = fused.operands(fused.root)
    return before.opcode == "parameter"


def _is_same(a: Shape, b: Shape) -> bool:
    return hlo.shape_text(a) == hlo.shape_text(b)
