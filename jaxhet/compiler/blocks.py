"""Exchanges the whole array where an all-to-all has blocks of one array as operands.

XLA's CPU compiler cuts an all-to-all's array into one operand per member, and joins the results to
one array. Both are copies that an exchange of the array itself does not need.
"""

from collections.abc import Sequence

from jaxhet.compiler import hlo, promotion
from jaxhet.compiler.hlo import Instruction


def cut(c: hlo.Computation, blocks: Sequence[Instruction]) -> tuple[Instruction, int] | None:
    """The array that consists of these blocks in this order, and along which dimension, if any."""
    sources = [_slice(c, block) for block in blocks]
    if None in sources or len({source[0].id for source in sources if source}) > 1:
        return None
    found = [source for source in sources if source]
    x = found[0][0]
    for dim, size in enumerate(blocks[0].shape.dimensions):
        expected = [
            [(i * size, (i + 1) * size) if d == dim else (0, n) for d, n in _sizes(x)]
            for i in range(len(blocks))
        ]
        if size * len(blocks) == x.shape.dimensions[dim] and expected == [b for _, b in found]:
            return x, dim
    return None


def _sizes(x: Instruction) -> list[tuple[int, int]]:
    return list(enumerate(x.shape.dimensions))


def _slice(
    c: hlo.Computation, block: Instruction
) -> tuple[Instruction, list[tuple[int, int]]] | None:
    """The source of a slice, and its first and last index in each dimension."""
    element_type, cutter, source = block.shape.element_type, block, c
    if block.opcode == "fusion" and len(block.operand_ids) == 1:
        source = c.module.computations[block.called_computation_ids[0]]
        cutter = promotion.before_conversions(source, source.root, element_type)
    if cutter.opcode != "slice" or any(s.stride != 1 for s in cutter.slice_dimensions):
        return None
    bounds = [(s.start, s.limit) for s in cutter.slice_dimensions]
    (x,) = source.operands(cutter)
    if source is c:
        return x, bounds
    x = promotion.before_conversions(source, x, element_type)
    if x.opcode != "parameter" or x.shape.element_type != element_type:
        return None
    return c.operands(block)[0], bounds


def joined(c: hlo.Computation, collective: Instruction) -> tuple[Instruction, int] | None:
    """The concatenation of all results of a collective and nothing else, and its axis."""
    ids: list[int] = []
    users: dict[int, Instruction] = {}
    for y in sorted(c.users(collective), key=lambda y: y.tuple_index):
        result, used_by = _after_bitcasts(c, y)
        ids.append(result.id)
        users |= {user.id: user for user in used_by}
    if len(ids) != len(collective.shape.tuple_shapes) or len(users) != 1:
        return None
    (whole,) = users.values()
    if whole.opcode == "concatenate":
        return (whole, whole.dimensions[0]) if list(whole.operand_ids) == ids else None
    if whole.opcode != "fusion":
        return None
    element_type = whole.shape.element_type
    fused = c.module.computations[whole.called_computation_ids[0]]
    root = promotion.before_conversions(fused, fused.root, element_type)
    if root.opcode != "concatenate":
        return None
    parts = fused.operands(root)
    parameters = [promotion.before_conversions(fused, part, element_type) for part in parts]
    if any(p.opcode != "parameter" or p.shape.element_type != element_type for p in parameters):
        return None
    is_all = [whole.operand_ids[p.parameter_number] for p in parameters] == ids
    return (whole, root.dimensions[0]) if is_all else None


def _after_bitcasts(c: hlo.Computation, y: Instruction) -> tuple[Instruction, list[Instruction]]:
    """The value of y behind bitcasts that change nothing, and its users."""
    users = c.users(y)
    while len(users) == 1 and users[0].opcode == "bitcast" and users[0].shape == y.shape:
        (y,) = users
        users = c.users(y)
    return y, users


def remove(c: hlo.Computation, collective: Instruction, successor: Instruction) -> None:
    """Removes a collective whose results nobody takes; what waits for it waits for `successor`."""
    for y in c.users(collective):
        _remove(c, y, successor)
    c.remove(collective, successor)


def _remove(c: hlo.Computation, y: Instruction, successor: Instruction) -> None:
    for user in c.users(y):
        _remove(c, user, successor)
    c.remove(y, successor)
