"""Collectives of types of less than a byte that XLA runs itself, on CPUs.

XLA's collectives of 2-bit integers on CPUs lose elements and damage memory. Such collectives are
done in a type of whole bytes, like exchanges.
"""

from collections.abc import Collection

from jaxhet.compiler import arithmetic, collectives, hlo
from jaxhet.compiler import proto as pb
from jaxhet.compiler.hlo import Instruction, Shape


def widen(module: hlo.Module, crossing: Collection[int]) -> bool:
    """Widens the collectives of a module but for those with the ids `crossing`.

    Returns:
      Whether there was one.
    """
    found = [
        (c, i)
        for c in module.computations.values()
        for i in c.instructions
        if i.opcode in hlo.COLLECTIVES and i.id not in crossing and _is_small(c, i)
    ]
    for c, instruction in found:
        _widen(c, instruction)
    return bool(found)


def _is_small(c: hlo.Computation, instruction: Instruction) -> bool:
    return any(_carried(x.shape) != x.shape for x in c.operands(instruction))


def _carried(shape: Shape) -> Shape:
    if shape.element_type in (pb.TUPLE, pb.TOKEN):
        return shape
    carried = arithmetic.carried_type(shape.element_type)
    return shape if carried == shape.element_type else hlo.with_type(shape, carried)


def _widen(c: hlo.Computation, instruction: Instruction) -> None:
    wide = c.add_copy(
        instruction, [_converted(c, x, _carried(x.shape)) for x in c.operands(instruction)]
    )
    reducer = collectives.reducer(c.module, instruction)
    if reducer is not None:
        element_type = c.operands(wide)[0].shape.element_type
        wide.called_computation_ids[:] = [arithmetic.reducer(c.module, reducer, element_type).id]
    shape = instruction.shape
    if shape.element_type != pb.TUPLE:
        c.reshape(wide, _carried(shape))
        c.rewrite(instruction, "bitcast", [_converted(c, wide, shape)])
        return
    shapes = [_carried(part) for part in shape.tuple_shapes]
    c.reshape(wide, hlo.tuple_shape(shapes))
    parts = [
        _converted(c, c.add("get-tuple-element", part, [wide], tuple_index=i), narrow)
        for i, (part, narrow) in enumerate(zip(shapes, shape.tuple_shapes, strict=True))
    ]
    c.rewrite(instruction, "tuple", parts)


def _converted(c: hlo.Computation, x: Instruction, shape: Shape) -> Instruction:
    element_type = shape.element_type
    if x.shape.element_type == element_type:
        return x
    return arithmetic.loop_fusion(c, [x], lambda c, x: arithmetic.convert(c, x, element_type))
