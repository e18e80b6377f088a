"""Gathers and scatters along an array's first dimension, on GPUs.

XLA's layout assignment gives the dimension of such a collective the largest stride, and matrix
products read and write that layout at no cost. Exchanges are flat, and XLA could not choose a
layout for them: the blocks would be put in order by copies of whole arrays. So the array is
transposed before and after, and XLA chooses a layout for the transpose.
"""

import dataclasses

from jaxhet.compiler import arithmetic, hlo
from jaxhet.compiler.collectives import Collective


def along_first(collective: Collective) -> Collective:
    """The same gather or scatter along the first dimension, between two transposes."""
    c, instruction = collective.computation, collective.instruction
    if instruction.opcode not in ("all-gather", "reduce-scatter"):
        return collective
    (dim,), operands = instruction.dimensions, c.operands(instruction)
    if len(operands) != 1 or all(size == 1 for size in operands[0].shape.dimensions[:dim]):
        return collective
    shape = instruction.shape
    others = [d for d in range(len(shape.dimensions)) if d != dim]
    there, back = [dim, *others], [*range(1, dim + 1), 0, *range(dim + 1, len(shape.dimensions))]
    inner = c.add_copy(instruction, [arithmetic.transpose(c, operands[0], there)])
    inner.dimensions[:] = [0]
    inner.shape.CopyFrom(hlo.array_shape(shape.element_type, [shape.dimensions[d] for d in there]))
    c.rewrite(instruction, "transpose", [inner], dimensions=back)
    inner.name, instruction.name = instruction.name, inner.name  # errors and plans tell the first
    return dataclasses.replace(collective, instruction=inner)
