"""Flat values whose blocks or dimensions are in another order."""

from collections.abc import Sequence

from jaxhet.compiler import arithmetic, hlo
from jaxhet.compiler.hlo import Instruction, Shape
from jaxhet.compiler.lowering import Lowering, Value


def transposed(
    lowering: Lowering, value: Value, dims: Sequence[int], permutation: Sequence[int]
) -> Value:
    """A flat value, seen as `dims`, with its dimensions in another order."""
    moved = [d for d in permutation if dims[d] != 1]
    if moved == sorted(moved):
        return value
    x = lowering.shaped(value.x, dims)
    y = lowering.loop([x], lambda c, x: arithmetic.transpose(c, x, permutation))
    return value.with_array(lowering.shaped(y, [value.size]))


def split(lowering: Lowering, value: Value, shape: Shape, dim: int, num_blocks: int) -> Value:
    """A flat array of `shape` as blocks, cut along `dim`."""
    dims = list(shape.dimensions)
    dims[dim : dim + 1] = [num_blocks, dims[dim] // num_blocks]
    others = [d for d in range(len(dims)) if d != dim]
    return transposed(lowering, value, dims, [dim, *others])


def join(lowering: Lowering, value: Value, block: Shape, dim: int, shape: Shape) -> Value:
    """Joins flat blocks of the shape `block` along `dim` to a flat array of `shape`."""
    num_blocks = shape.dimensions[dim] // max(block.dimensions[dim], 1)
    dims = [num_blocks, *block.dimensions]
    others = range(1, len(dims))
    return transposed(lowering, value, dims, [*others[:dim], 0, *others[dim:]])


def reordered(lowering: Lowering, value: Value, order: Sequence[int]) -> Value:
    """The blocks of a value in another order: block k of the result is block order[k]."""
    count = len(order)
    for rows in range(1, count + 1):  # [rows, columns] transposed
        if count % rows == 0 and list(order) == [
            row * (count // rows) + column for column in range(count // rows) for row in range(rows)
        ]:
            dims = [rows, count // rows, value.size // count]
            return transposed(lowering, value, dims, [1, 0, 2])
    size = value.size // count

    def body(c: hlo.Computation, x: Instruction) -> Instruction:
        blocks = [arithmetic.slice_1d(c, x, block * size, size) for block in order]
        return arithmetic.concatenate(c, blocks)

    return value.with_array(lowering.loop([value.x], body))
