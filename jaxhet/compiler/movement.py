"""Collectives that gather, scatter and move, over islands as exchanges.

flat          every rank of a group exchanges with every other one
hierarchical  all-gather        over the rail, then on the island
              reduce-scatter    on the island, then over the rail
              all-to-all        on the island, then over the rail
              broadcast         to one rank of each island, then on the island
So each byte that must cross islands crosses once.
"""

from collections.abc import Sequence

from jaxhet.compiler import arithmetic, reorder, wire
from jaxhet.compiler import proto as pb
from jaxhet.compiler.gpu_form import GpuLowering
from jaxhet.compiler.groups import Groups, Split
from jaxhet.compiler.lowering import Lowering, Value


def all_gather(lowering: Lowering, split: Split | None) -> None:
    """Makes an all-gather the last step of its decomposition."""
    (dim,) = lowering.instruction.dimensions
    operands = lowering.operands
    values = lowering.flattened()
    if split is None:
        results = wire.all_gather(lowering, values, lowering.collective.groups)
    else:
        results = [_gather_over_islands(lowering, v, split) for v in values]
    shapes = lowering.result_shapes
    lowering.replace(
        [
            lowering.restore(reorder.join(lowering, v, x.shape, dim, shape), shape)
            for v, x, shape in zip(results, operands, shapes, strict=True)
        ]
    )


def _gather_over_islands(lowering: Lowering, value: Value, split: Split) -> Value:
    first = len(lowering.added)
    (rows,) = wire.all_gather(lowering, [value], split.rails)
    if split.local_size == 1:
        return reorder.reordered(lowering, rows, _by_rail(split))
    whole = lowering.local("all-gather", rows, rows.size * split.local_size, split.local)
    lowering.added[first].gathers.append(whole.x)
    return reorder.reordered(lowering, whole, _by_rail(split))


def reduce_scatter(lowering: Lowering, opcode: str, split: Split | None) -> None:
    """Makes a reduce-scatter the last step of its decomposition."""
    (dim,) = lowering.instruction.dimensions
    num_shards = len(lowering.collective.groups[0]) // lowering.collective.shard_replicas
    values = [
        reorder.split(lowering, value, x.shape, dim, num_shards)
        for value, x in zip(lowering.flattened(), lowering.operands, strict=True)
    ]
    if split is None:
        results = wire.reduce_scatter(lowering, values, lowering.collective.groups, opcode)
    elif lowering.collective.shard_replicas > 1:
        results = [_scatter_to_islands(lowering, v, opcode, split) for v in values]
    else:
        results = [_scatter_over_islands(lowering, v, opcode, split) for v in values]
    lowering.replace_flat(results)


def _scatter_over_islands(lowering: Lowering, value: Value, opcode: str, split: Split) -> Value:
    """The combined block of each rank, out of the blocks of all members."""
    value = reorder.reordered(lowering, value, _inverse(_by_rail(split)))
    first = len(lowering.added)
    if split.local_size > 1:
        size = value.size // split.local_size
        value = lowering.local("reduce-scatter", value, size, split.local, opcode)
    (result,) = wire.reduce_scatter(lowering, [value], split.rails, opcode)
    if split.local_size > 1:
        lowering.added[first].scatters.append(value.x)
    return result


def _scatter_to_islands(lowering: Lowering, value: Value, opcode: str, split: Split) -> Value:
    """The combined block of each island, out of the blocks of all islands."""
    assert split.places is not None
    islands, local_size = split.num_islands, split.local_size
    block_of = {island: place // local_size for place, (island, _) in enumerate(split.places)}
    value = reorder.reordered(lowering, value, [block_of[island] for island in range(islands)])
    dims = [islands, local_size, value.size // (islands * local_size)]
    value = reorder.transposed(lowering, value, dims, [1, 0, 2])
    first = len(lowering.added)
    shard = lowering.local("reduce-scatter", value, value.size // local_size, split.local, opcode)
    (result,) = wire.reduce_scatter(lowering, [shard], split.rails, opcode)
    whole = lowering.local("all-gather", result, result.size * local_size, split.local)
    lowering.added[first].scatters.append(shard.x)
    lowering.added[first].gathers.append(whole.x)
    return whole


def all_to_all(lowering: Lowering, split: Split | None) -> None:
    """Makes an all-to-all the last step of its decomposition."""
    if lowering.instruction.shape.element_type == pb.TUPLE:
        return _all_to_all_of_operands(lowering, split)
    (dim,) = lowering.instruction.dimensions
    (x,), (shape,) = lowering.operands, lowering.result_shapes
    num_blocks = len(lowering.collective.groups[0])
    value = reorder.split(lowering, lowering.flatten(x, 0), x.shape, dim, num_blocks)
    rows = _exchange(lowering, value, split)
    block = _resized(x.shape, dim, x.shape.dimensions[dim] // num_blocks)
    return lowering.replace(
        [lowering.restore(reorder.join(lowering, rows, block, dim, shape), shape)]
    )


def _all_to_all_of_operands(lowering: Lowering, split: Split | None) -> None:
    """Operand i is sent to member i; result i is from member i."""
    values = lowering.flattened()
    count = len(values)
    x = arithmetic.concatenate(lowering.c, [v.x for v in values])
    packed = Value(x, values[0].element_type, tuple(range(count)))
    rows = _exchange(lowering, packed, split)
    size = rows.size // count
    lowering.replace_flat(
        [
            rows.with_array(
                lowering.loop([rows.x], lambda c, x, i=i: arithmetic.slice_1d(c, x, i * size, size))
            )
            for i in range(count)
        ],
    )


def _exchange(lowering: Lowering, value: Value, split: Split | None) -> Value:
    """Block i of the value to member i; gives the received blocks, in group order."""
    if split is None:
        (rows,) = lowering.all_to_all([value], lowering.collective.groups)
        return rows.joined
    by_rail = _by_rail(split)
    value = reorder.reordered(lowering, value, _inverse(by_rail))  # [rail, island] of the receiver
    first = len(lowering.added)
    islands, local_size = split.num_islands, split.local_size
    if local_size > 1:
        value = lowering.local("all-to-all", value, value.size, split.local)
    scattered = value
    size = value.size // (islands * local_size)
    # [rail of the sender, island of the receiver] to [island of the receiver, rail of the sender]
    value = reorder.transposed(lowering, value, [local_size, islands, size], [1, 0, 2])
    (rows,) = lowering.all_to_all([value], split.rails)
    if local_size > 1:
        lowering.added[first].scatters.append(scattered.x)
    assert split.places is not None
    order = [island * local_size + rail for island, rail in split.places]
    return reorder.reordered(lowering, rows.joined, order)


def permute(lowering: Lowering) -> None:
    """Makes a collective-permute the last step of its decomposition."""
    pairs = lowering.collective.groups

    def move(lowering: Lowering, values: Sequence[Value]) -> list[Value]:
        return lowering.permute(values, pairs)

    lowering.replace_flat(wire.permute(lowering, lowering.flattened(), move))


def broadcast(lowering: GpuLowering) -> None:
    """Makes a collective-broadcast the last step of its decomposition. JAX has none for CPUs."""
    groups = lowering.collective.groups
    lowering.replace_flat([_broadcast(lowering, value, groups) for value in lowering.flattened()])


def _broadcast(lowering: GpuLowering, value: Value, groups: Groups) -> Value:
    """One exchange for each island that receives the value: a source has one target in each."""
    collective, islands = lowering.collective, lowering.job.islands
    local: list[tuple[int, ...]] = []
    pairs: dict[int, list[tuple[int, int]]] = {}  # by number of the island in its group
    for group in groups:
        by_island: dict[int, list[int]] = {}
        for member in group:
            by_island.setdefault(islands[collective.rank_of[member]], []).append(member)
        local += map(tuple, by_island.values())
        for number, members in enumerate(list(by_island.values())[1:]):
            pairs.setdefault(number, []).append((group[0], members[0]))
    received = value
    for crossing in pairs.values():
        (other,) = lowering.permute([value], tuple(crossing))
        received = lowering.at({target for _, target in crossing}, other, received)
    if all(len(members) == 1 for members in local):
        return received
    return lowering.local("collective-broadcast", received, value.size, tuple(local))


def _by_rail(split: Split) -> list[int]:
    """For each place in the group, its place in [rail, island]."""
    assert split.places is not None
    return [rail * split.num_islands + island for island, rail in split.places]


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _resized(shape: pb.ShapeProto, dim: int, size: int) -> pb.ShapeProto:
    resized = pb.ShapeProto()
    resized.CopyFrom(shape)
    resized.dimensions[dim] = size
    return resized
