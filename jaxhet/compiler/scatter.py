"""Reduce-scatters from all-reduces whose result every rank uses a block of.

XLA's partitioner writes the gradients of sharded parameters as an all-reduce and a dynamic-slice.
If the batch is split inside islands as well, an all-reduce of the block inside islands follows. The
reduce-scatter absorbs it. Otherwise each device of an island would send its own part of the sum.
"""

import dataclasses
from collections.abc import Sequence

from jaxhet.compiler import collectives, hlo, integers
from jaxhet.compiler import groups as groups_lib
from jaxhet.compiler.collectives import Collective
from jaxhet.compiler.groups import Groups
from jaxhet.compiler.options import Job


def to_reduce_scatters(crossing: Sequence[Collective], job: Job, is_flat: bool) -> list[Collective]:
    """The same collectives, with reduce-scatters in place of such all-reduces and their slices.

    Args:
      crossing: All collectives that cross islands.
      job: The job.
      is_flat: Only the flat algorithm is allowed.
    """
    found = [_to_reduce_scatter(collective) or collective for collective in crossing]
    return (
        found
        if is_flat
        else [_absorb_local_all_reduce(collective, job) or collective for collective in found]
    )


def _to_reduce_scatter(collective: Collective) -> Collective | None:
    computation, all_reduce = collective.computation, collective.instruction
    if all_reduce.opcode != "all-reduce" or len(all_reduce.operand_ids) != 1:
        return None
    kept = _only_user(computation, all_reduce)
    if kept is None or kept.opcode != "dynamic-slice":
        return None
    sizes = zip(kept.shape.dimensions, all_reduce.shape.dimensions, strict=True)
    cut = [dim for dim, (size, whole) in enumerate(sizes) if size != whole]
    groups = _by_block(collective, kept, cut[0]) if len(cut) == 1 else None
    if groups is None:
        return None
    _replace(computation, all_reduce, kept, cut[0], groups)
    return dataclasses.replace(collective, instruction=kept, groups=groups)


def _absorb_local_all_reduce(collective: Collective, job: Job) -> Collective | None:
    """A reduce-scatter together with the all-reduce inside islands that follows."""
    computation, scatter = collective.computation, collective.instruction
    if scatter.opcode != "reduce-scatter" or len(scatter.operand_ids) != 1:
        return None
    following = _only_user(computation, scatter)
    if following is None or following.opcode != "all-reduce" or len(following.operand_ids) != 1:
        return None
    reducers = [collectives.reducer(computation.module, i) for i in (scatter, following)]
    if reducers[0] is None or reducers[0] != reducers[1]:
        return None
    group_of = {p: g for g in collective.groups for p in g}
    combined: list[tuple[int, ...]] = []
    for local in collectives.groups_of(computation.module, following):
        # A column has the devices that keep one block.
        columns = tuple(zip(*(group_of[p] for p in local), strict=True))
        islands = [{job.islands[collective.rank_of[p]] for p in column} for column in columns]
        if any(len(on) != 1 for on in islands) or len(set.union(*islands)) != len(columns):
            return None
        combined.append(tuple(p for column in columns for p in column))
    if not groups_lib.are_equal(tuple(combined)):
        return None
    shard_replicas = len(combined[0]) // len(collective.groups[0])
    groups = tuple({tuple(sorted(g)): g for g in combined}.values())
    if shard_replicas == 1 or hlo.num_elements(scatter.shape) % shard_replicas:
        return None
    if sorted(p for g in groups for p in g) != sorted(group_of):
        return None
    (dim,) = scatter.dimensions
    _replace(computation, scatter, following, dim, groups)
    return dataclasses.replace(
        collective, instruction=following, groups=groups, shard_replicas=shard_replicas
    )


def _only_user(c: hlo.Computation, instruction: hlo.Instruction) -> hlo.Instruction | None:
    users = c.users(instruction)
    return users[0] if len(users) == 1 and c.root.id != instruction.id else None


def _replace(
    c: hlo.Computation, first: hlo.Instruction, last: hlo.Instruction, dim: int, groups: Groups
) -> None:
    """Makes `last` a reduce-scatter of the operand of `first`, and removes `first`."""
    before = {*first.control_predecessor_ids, *last.control_predecessor_ids} - {first.id}
    fields = {
        "called_computation_ids": list(first.called_computation_ids),
        "dimensions": [dim],
        "channel_id": first.channel_id or c.module.new_channel_id(),
        "use_global_device_ids": True,
        "collective_device_list": hlo.device_list(groups),
    }
    c.rewrite(last, "reduce-scatter", c.operands(first), **fields)
    last.metadata.CopyFrom(first.metadata)
    c.set_control_predecessors(last, sorted(before))
    c.remove(first, successor=last)


def _by_block(collective: Collective, kept: hlo.Instruction, dim: int) -> Groups | None:
    """The groups, with each member at the index of its block; None if members keep other parts."""
    computation = collective.computation
    x, *starts = computation.operands(kept)
    size, whole = kept.shape.dimensions[dim], x.shape.dimensions[dim]
    result: list[tuple[int, ...]] = []
    for group in collective.groups:
        if size * len(group) != whole:
            return None
        found = [_value(computation, starts[dim], member) for member in group]
        by_start = dict(zip(found, group, strict=True))
        if set(by_start) != set(range(0, whole, size)):
            return None
        result.append(tuple(by_start[start] for start in range(0, whole, size)))
    return tuple(result)


def _value(c: hlo.Computation, scalar: hlo.Instruction, logical_id: int) -> int | None:
    """The value of an integer on the device with a logical id, where that decides it."""
    return integers.value(c, scalar, lambda i: logical_id if i.opcode == "partition-id" else None)
