"""Reasons of exchanges: matrix products, and the arguments whose shardings they follow.

XLA's partitioner may exchange activations because a leaf is sharded along a dimension of its
products. This reads a module at PRE, where every product is still a `dot`.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from jaxhet.compiler import collectives, hlo, loops, order, overlap
from jaxhet.compiler.collectives import Collective
from jaxhet.compiler.options import Job

_SUMS = ("all-reduce", "reduce-scatter")
_FROM_LEAF = (*hlo.FORMS, "dynamic-slice", "slice")
_FROM_PRODUCT = (*hlo.FORMS, "add", "dynamic-slice", "slice")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An argument of a program, and what its sharding makes a rank exchange in each step.

    Attributes:
      name: name of the argument, such as `params['w1']`.
      shape: shape of a device's shard, in HLO's notation.
      dimension: the dimension that is sharded.
      shard_bytes: bytes of a device's shard.
      activation_bytes: bytes of operands and results of products with the leaf.
      repeated_bytes: bytes of the leaf itself if a loop gathers it in every iteration.
    """

    name: str
    shape: str
    dimension: int
    shard_bytes: int
    activation_bytes: float = 0
    repeated_bytes: float = 0

    @property
    def num_bytes(self) -> float:
        """All bytes."""
        return self.activation_bytes + self.repeated_bytes


@dataclasses.dataclass(frozen=True)
class Costs:
    """Operations of a step, and the leaves that make it exchange.

    Attributes:
      flops: floating-point operations of a rank's matrix products in each step.
      leaves: the leaf with the most bytes first.
    """

    flops: float
    leaves: tuple[Leaf, ...]


@hlo.no_garbage_collection()
def costs(data: bytes, job: Job) -> Costs:
    """The costs of a serialized module at PRE, as XLA has written it."""
    module = hlo.Module(data)
    times = overlap.computation_times(module)
    flops = 0.0
    for c in module.computations.values():
        for dot in (i for i in c.instructions if i.opcode == "dot"):
            depth = (c.operands(dot)[0].shape.dimensions[d] for d in _contracting(dot)[0])
            flops += 2.0 * hlo.num_elements(dot.shape) * math.prod(depth) * (times(c.id) or 1)
    leaves: dict[str, Leaf] = {}
    for collective in collectives.crossing(module, job):
        count = times(collective.computation.id) or 1
        found, attribute = _causes(collective), "activation_bytes"
        if (own := _own_leaf(collective)) is not None:
            found, attribute = [own] if count > 1 else [], "repeated_bytes"
        for leaf in found:
            so_far = leaves.setdefault(leaf.name, leaf)
            num_bytes = getattr(so_far, attribute) + _sent(collective, job) * count / len(found)
            leaves[leaf.name] = dataclasses.replace(so_far, **{attribute: num_bytes})
    return Costs(flops, tuple(sorted(leaves.values(), key=lambda x: -x.num_bytes)))


def _contracting(dot: hlo.Instruction) -> tuple[Sequence[int], Sequence[int]]:
    numbers = dot.dot_dimension_numbers
    return numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions


def _sent(collective: Collective, job: Job) -> float:
    """Bytes that a rank sends to other islands, each time."""
    (group, *_), x = collective.ranks, collective.computation.operands(collective.instruction)[0]
    islands = len({job.islands[rank] for rank in group})
    if collective.instruction.opcode == "all-gather":
        return hlo.num_bytes(x.shape) * (islands - 1)
    return hlo.num_bytes(x.shape) * (islands - 1) / len(group)


def _own_leaf(collective: Collective) -> Leaf | None:
    """The leaf that a collective gathers, whole."""
    c, instruction = collective.computation, collective.instruction
    if instruction.opcode != "all-gather":
        return None
    return _leaf(c, c.operands(instruction)[0], hlo.FORMS)


def _causes(collective: Collective) -> list[Leaf]:
    """The leaves of the products that use, or have computed, the data of a collective."""
    c, instruction = collective.computation, collective.instruction
    if instruction.opcode == "all-gather":
        products = _products(c, instruction)
    elif instruction.opcode in _SUMS:
        products = _products_before(c, c.operands(instruction)[0])
    else:
        return []
    found = (
        _leaf(c, operand, _FROM_LEAF)
        for dot in products
        for operand in c.operands(dot)
        if operand.id != instruction.id
    )
    return list({leaf.name: leaf for leaf in found if leaf is not None}.values())


def _has_only(c: hlo.Computation, x: hlo.Instruction, opcodes: Sequence[str]) -> bool:
    """Whether an instruction, or all that XLA has fused in it (CPU), has these opcodes."""
    if x.opcode != "fusion":
        return x.opcode in opcodes
    own = (*opcodes, "constant", "parameter")
    return all(i.opcode in own for called in c.called(x) for i in called.instructions)


def _is_product(c: hlo.Computation, x: hlo.Instruction) -> bool:
    return x.opcode in ("dot", "fusion") and overlap.holds_product(c.module, x)


def _products(c: hlo.Computation, x: hlo.Instruction) -> Iterator[hlo.Instruction]:
    """The products that use an array."""
    for user in c.users(x):
        if _is_product(c, user):
            yield user
        elif _has_only(c, user, hlo.FORMS):
            yield from _products(c, user)


def _products_before(c: hlo.Computation, x: hlo.Instruction) -> Iterator[hlo.Instruction]:
    """The products whose sum an array is."""
    if _is_product(c, x):
        yield x
    elif _has_only(c, x, _FROM_PRODUCT):
        for operand in c.operands(x):
            yield from _products_before(c, operand)


def _leaf(c: hlo.Computation, x: hlo.Instruction, through: Sequence[str]) -> Leaf | None:
    """The sharded argument whose elements an array holds, perhaps in another shape; else None."""
    while True:
        x = loops.behind_barrier(c, x)
        index = loops.carried(c, x)
        if x.opcode == "parameter":
            return _of_parameter(x) if c.id == c.module.entry.id else None
        if _has_only(c, x, through):
            x = c.operands(x)[0]
            continue
        calls = c.module.callers.get(c.id, ())
        if index is None or len(calls) != 1 or calls[0].instruction.opcode != "while":
            return None
        kept = c[c.root.operand_ids[index]] if c.root.opcode == "tuple" else c.root
        (initial,) = calls[0].computation.operands(calls[0].instruction)
        if loops.carried(c, kept) != index or initial.opcode != "tuple":
            return None
        c = calls[0].computation
        x = c.operands(initial)[index]


def _of_parameter(x: hlo.Instruction) -> Leaf | None:
    sharding, name = x.sharding, order.for_people(x.metadata.op_name).replace("\\'", "'")
    sharded = [d for d, size in enumerate(sharding.tile_assignment_dimensions) if size > 1]
    sharded += [d for d, dim in enumerate(sharding.named_sharding.dim_shardings) if dim.axes]
    if not sharded or not name or sharded[0] >= len(x.shape.dimensions):
        return None
    return Leaf(name, hlo.shape_text(x.shape), sharded[0], hlo.num_bytes(x.shape))
