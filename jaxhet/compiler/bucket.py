"""Buckets: several collectives of one kind share one exchange.

On GPUs a bucket has small all-reduces. On CPUs it has permutes, since only sums overlap there, and
XLA has combined all-reduces. Buckets depend on the program, as the plan's order does, so that all
ranks have the same ones.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxhet.compiler import collectives, halves, hlo, order
from jaxhet.compiler import groups as groups_lib
from jaxhet.compiler.collectives import Collective


@dataclasses.dataclass
class _Bucket:
    """Collectives that share one exchange.

    Attributes:
      members: The collectives in this bucket.
      num_bytes: Their total size.
      bits: The members as a set, each a bit.
      until: Depth at which something that takes time uses a result; see `order.Key`.
    """

    members: list[Collective] = dataclasses.field(default_factory=list)
    num_bytes: int = 0
    bits: int = 0
    until: float = math.inf


def bucketed(
    crossing: Sequence[Collective], opcode: str, most_bytes: float = math.inf
) -> list[Collective]:
    """The same collectives, with one of several operands in place of small ones of an opcode.

    Args:
      crossing: All collectives of a module that cross islands.
      opcode: "all-reduce" or "collective-permute".
      most_bytes: Largest size of all operands of one bucket.
    """
    small: dict[int, list[Collective]] = {}
    for collective in crossing:
        instruction = collective.instruction
        is_one = instruction.opcode == opcode and len(instruction.operand_ids) == 1
        if (
            is_one
            and halves.of(instruction) is None
            and hlo.num_bytes(instruction.shape) <= most_bytes
        ):
            small.setdefault(collective.computation.id, []).append(collective)
    replaced: dict[int, Collective | None] = {}
    for members in small.values():
        for bucket in _buckets(members, most_bytes):
            if len(bucket.members) > 1:
                replaced |= {m.instruction.id: None for m in bucket.members[1:]}
                replaced[bucket.members[0].instruction.id] = _merge(bucket.members)
    result = (replaced.get(c.instruction.id, c) for c in crossing)
    return [collective for collective in result if collective is not None]


def _buckets(members: Sequence[Collective], most_bytes: float) -> list[_Bucket]:
    """Buckets of the collectives of one computation.

    A bucket is closed at the first collective that depends on one of its results. So everything
    that a bucket depends on precedes it, and everything that depends on it follows. It is also
    closed where the user of a result would otherwise wait for another member.
    """
    computation = members[0].computation
    computation.sort()
    by_id = {m.instruction.id: m for m in members}
    kinds = {i: _kind(m) for i, m in by_id.items()}
    steps = {
        i: order.Step(f"{kinds[i]} {m.identities[0]}", m.identities[0].key, m.identities[0].use)
        for i, m in by_id.items()
    }
    flow = order.Dataflow(computation, list(by_id))
    uses = _uses(steps, flow.needs)
    buckets: list[_Bucket] = []
    is_open: dict[str, _Bucket] = {}
    for instruction, _ in order.ordered(computation, steps, flow):
        i = instruction.id
        is_open = {
            kind: b
            for kind, b in is_open.items()
            if not b.bits & flow.needs[i] and steps[i].key[0] < b.until
        }
        num_bytes = hlo.num_bytes(instruction.shape)
        bucket = is_open.get(kinds[i])
        if bucket is None or bucket.num_bytes + num_bytes > most_bytes:
            bucket = is_open[kinds[i]] = _Bucket()
            buckets.append(bucket)
        bucket.members.append(by_id[i])
        bucket.num_bytes += num_bytes
        bucket.bits |= flow.bit_of[i]
        bucket.until = min(bucket.until, uses[i])
    return buckets


def _uses(steps: Mapping[int, order.Step], needs: Mapping[int, int]) -> dict[int, float]:
    """Instruction id to the depth at which something that takes time uses the result."""
    ids = list(steps)
    # Instructions of the partitioner have no depth; their uses are one deeper.
    uses = {i: max(steps[i].use, steps[i].key[0] + 1) for i in ids}
    for i in ids:
        for place in order.places(needs[i]):
            uses[ids[place]] = min(uses[ids[place]], steps[i].key[0])
    return uses


def _kind(collective: Collective) -> str:
    """The properties that all members of a bucket share."""
    module, instruction = collective.computation.module, collective.instruction
    groups = groups_lib.to_text(collective.groups)
    if instruction.opcode == "collective-permute":
        return groups
    reducer = collectives.reducer(module, instruction)
    return f"{reducer} {instruction.shape.element_type} {groups}"


def _merge(members: Sequence[Collective]) -> Collective:
    first, computation = members[0], members[0].computation
    instructions = [m.instruction for m in members]
    operands = [x for i in instructions for x in computation.operands(i)]
    shape = hlo.tuple_shape([i.shape for i in instructions])
    merged = computation.add(first.instruction.opcode, shape, operands, like=first.instruction)
    new = hlo.Instruction()
    new.CopyFrom(first.instruction)
    for field in ("name", "id", "shape", "operand_ids", "control_predecessor_ids", "metadata"):
        new.ClearField(field)
    merged.MergeFrom(new)
    before = {p for i in instructions for p in i.control_predecessor_ids}
    computation.set_control_predecessors(merged, sorted(before))
    for place, instruction in enumerate(instructions):
        computation.set_control_predecessors(instruction, [])
        computation.rewrite(instruction, "get-tuple-element", [merged], tuple_index=place)
    identities = tuple(identity for m in members for identity in m.identities)
    return dataclasses.replace(
        first,
        instruction=merged,
        identities=identities,
        is_pipelined=all(m.is_pipelined for m in members),
    )
