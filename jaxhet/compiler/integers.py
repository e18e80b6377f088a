"""Values of integer scalars that follow from constants and from values that the caller knows."""

import operator
from collections.abc import Callable

from jaxhet.compiler import hlo
from jaxhet.compiler import proto as pb

_ARITHMETIC: dict[str, Callable[..., int | None]] = {
    "add": operator.add,
    "and": operator.and_,
    "clamp": lambda low, x, high: max(low, min(x, high)),
    "divide": lambda x, y: x // y if x >= 0 and y > 0 else None,
    "maximum": max,
    "minimum": min,
    "multiply": operator.mul,
    "or": operator.or_,
    "remainder": lambda x, y: x % y if x >= 0 and y > 0 else None,
    "select": lambda mask, x, y: x if mask else y,
    "shift-left": lambda x, y: x << y if 0 <= y < 64 else 0,
    "shift-right-logical": lambda x, y: (x >> y if 0 <= y < 64 else 0) if x >= 0 else None,
    "subtract": operator.sub,
}
_COMPARISONS = {
    "EQ": operator.eq,
    "GE": operator.ge,
    "GT": operator.gt,
    "LE": operator.le,
    "LT": operator.lt,
    "NE": operator.ne,
}
_SAME = ("bitcast", "convert", "copy", "reshape")


def value(
    c: hlo.Computation, scalar: hlo.Instruction, known: Callable[[hlo.Instruction], int | None]
) -> int | None:
    """The value of an integer scalar, or None if constants and `known` do not determine it.

    Values wrap around at the ends of their types, as XLA's do.

    Args:
      c: The computation of the scalar.
      scalar: The instruction that computes it.
      known: The value of an instruction, if the caller knows it.
    """
    found: dict[int, int | None] = {}  # by instruction id: a value may be read many times

    def evaluate(i: hlo.Instruction) -> int | None:
        if i.id not in found:
            result = known(i)
            if result is None:
                result = compute(i)
            found[i.id] = None if result is None else _wrapped(result, i.shape.element_type)
        return found[i.id]

    def compute(i: hlo.Instruction) -> int | None:
        operands = c.operands(i)
        if i.opcode == "constant":
            return next(iter(elements(i)), None)
        if i.opcode in _SAME:
            return evaluate(operands[0])
        if i.opcode in _ARITHMETIC or i.opcode == "compare":
            values = [evaluate(operand) for operand in operands]
            function = _ARITHMETIC.get(i.opcode) or _COMPARISONS[i.comparison_direction]
            return None if None in values else function(*values)
        if i.opcode == "dynamic-slice" and operands[0].opcode == "constant":
            place, table = evaluate(operands[1]), elements(operands[0])
            if place is not None and list(i.dynamic_slice_sizes) == [1] and table:
                return table[min(max(place, 0), len(table) - 1)]
        return None

    return evaluate(scalar)


def _wrapped(value: int, element_type: int) -> int | None:
    """The value in an integer type; None in other types."""
    if hlo.is_float(element_type) or hlo.is_complex(element_type):
        return None
    if element_type == pb.PRED:
        return int(value != 0)
    bits = hlo.bit_width(element_type)
    lowest = 0 if pb.PrimitiveType.Name(element_type).startswith("U") else -(1 << bits - 1)
    return (value - lowest) % (1 << bits) + lowest


def elements(constant: hlo.Instruction) -> list[int]:
    """The elements of a constant; none if it is not of integers of 32 or 64 bits."""
    literal = constant.literal
    return [*literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s]
