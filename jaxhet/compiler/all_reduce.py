"""An all-reduce over islands as exchanges and arithmetic.

flat          every rank of a group exchanges with every other one
hierarchical  reduce-scatter among the ranks of a group on one island, all-reduce over the rail,
              all-gather on the island

in shape      two ranks, with `Options.one_world_kernels`: they exchange their operands, and each
              adds the received one, in its shape, to its own

In all three the exchange combines the same rows in the same order on every rank (in order of the
group, or of the islands), so that results are equal to the bit. Groups of unequal size are flat.
"""

from collections.abc import Sequence

from jaxhet.compiler import arithmetic, groups, wire
from jaxhet.compiler.hlo import Computation, Instruction
from jaxhet.compiler.lowering import Lowering, Value


def lower(lowering: Lowering, opcode: str, split: groups.Split | None) -> None:
    """Makes an all-reduce the last step of its decomposition."""
    if _is_in_shape(lowering):
        _in_shape(lowering, opcode)
        return
    values, unpack = lowering.pack(lowering.flattened())
    if split is None:
        results = wire.all_reduce(lowering, values, lowering.collective.groups, opcode)
    else:
        results = [
            y
            for bundle in lowering.bundles(values)
            for y in _hierarchical(lowering, bundle, opcode, split)
        ]
    lowering.replace_flat(unpack(results))


def _is_in_shape(lowering: Lowering) -> bool:
    members = lowering.collective.groups
    are_pairs = groups.are_equal(members) and len(members[0]) == 2
    is_plain = not lowering.codec
    return is_plain and lowering.job.is_gpu and lowering.options.one_world_kernels and are_pairs


def _in_shape(lowering: Lowering, opcode: str) -> None:
    """Each operand plus the other rank's operand; x + y = y + x to the bit.

    XLA gives the operands and the result of a sum one layout, as it does for a collective. So the
    kernels that compute an operand write it in the layout that it has in one world.
    """
    values, unpack = lowering.pack(lowering.flattened())
    pairs = groups.both_ways(lowering.collective.groups)
    others = unpack([other for v in values for other in lowering.permute([v], pairs)])
    lowering.replace(
        [
            _combined(lowering, own, lowering.restore(other, own.shape), opcode)
            for own, other in zip(lowering.operands, others, strict=True)
        ]
    )


def _combined(lowering: Lowering, own: Instruction, other: Instruction, opcode: str) -> Instruction:
    def body(c: Computation, own: Instruction, other: Instruction) -> Instruction:
        element_type = own.shape.element_type
        combined = arithmetic.combine(c, [own, other], opcode, element_type)
        return arithmetic.convert(c, combined, element_type)

    return lowering.loop([own, other], body)


def _hierarchical(
    lowering: Lowering, values: Sequence[Value], opcode: str, split: groups.Split
) -> list[Value]:
    if split.local_size == 1:
        return wire.all_reduce(lowering, values, split.rails, opcode)
    first = len(lowering.added)
    shards = [_reduce_scatter(lowering, v, opcode, split) for v in values]
    sums = wire.all_reduce(lowering, shards, split.rails, opcode)
    wholes = [lowering.local("all-gather", v, v.size * split.local_size, split.local) for v in sums]
    lowering.added[first].scatters.extend(shard.x for shard in shards)
    lowering.added[first].gathers.extend(whole.x for whole in wholes)
    return [_cut(lowering, whole, v.size) for whole, v in zip(wholes, values, strict=True)]


def _reduce_scatter(lowering: Lowering, value: Value, opcode: str, split: groups.Split) -> Value:
    """A shard of the combined value; shards have equal sizes, and the last one is padded."""
    shard_size = -(-value.size // split.local_size)
    padded_size = shard_size * split.local_size
    if padded_size != value.size:
        x = lowering.loop([value.x], lambda c, x: arithmetic.pad_1d(c, x, padded_size))
        value = value.with_array(x)
    return lowering.local("reduce-scatter", value, shard_size, split.local, opcode)


def _cut(lowering: Lowering, value: Value, size: int) -> Value:
    if value.size == size:
        return value
    return value.with_array(
        lowering.loop([value.x], lambda c, x: arithmetic.slice_1d(c, x, 0, size))
    )
