"""Readiness order: the order in which a program's exchanges can start, the same for every compiler.

It depends on the dataflow alone, never on names, ids or the order of instructions.
"""

import collections
import functools
import hashlib
from collections.abc import Collection, Mapping

from jaxhet.compiler import hlo

# What takes time. Compilers differ in the cheap operations between these, so only these count.
_HEAVY = frozenset(hlo.COLLECTIVES) | {
    "cholesky",
    "conditional",
    "convolution",
    "custom-call",
    "dot",
    "fft",
    "ragged-dot",
    "scatter",
    "sort",
    "triangular-solve",
    "while",
}

# A gather starts at most so many heavy operations, about a layer, before its result is used:
# what is gathered takes memory, and the exchanges of what is used earlier go first.
_AHEAD = 8


class Dataflow:
    """What the order rests on, of one computation whose instructions are sorted."""

    def __init__(self, computation: hlo.Computation):
        self._computation = computation

    @functools.cached_property
    def depth(self) -> Mapping[int, int]:
        """Instruction id to the number of heavy operations on the longest path to its operands."""
        depth: dict[int, int] = {}
        for i in self._computation.instructions:
            before = (depth[p.id] + (p.opcode in _HEAVY) for p in self._computation.predecessors(i))
            depth[i.id] = max(before, default=0)
        return depth

    @functools.cached_property
    def inputs(self) -> Mapping[int, int]:
        """Instruction id to the set, as bits, of the computation's inputs that it depends on."""
        inputs: dict[int, int] = {}
        for i in self._computation.instructions:
            operands = self._computation.operands(i)
            if i.opcode == "parameter":
                inputs[i.id] = 0 if i.shape.tuple_shapes else 1 << i.parameter_number
            elif i.opcode == "get-tuple-element" and operands[0].opcode == "parameter":
                inputs[i.id] = 1 << i.tuple_index
            else:
                inputs[i.id] = functools.reduce(int.__or__, (inputs[o.id] for o in operands), 0)
        return inputs

    @functools.cached_property
    def outputs(self) -> Mapping[int, int]:
        """Instruction id to the set, as bits, of the computation's outputs that depend on it."""
        root = self._computation.root
        outputs = dict.fromkeys((i.id for i in self._computation.instructions), 0)
        for place, operand in enumerate(root.operand_ids if root.opcode == "tuple" else [root.id]):
            outputs[operand] |= 1 << place
        for i in reversed(self._computation.instructions):
            for operand in i.operand_ids:
                outputs[operand] |= outputs[i.id]
        return outputs

    @functools.cached_property
    def digests(self) -> Mapping[int, bytes]:
        """Instruction id to a digest of the expression that it computes."""
        digests: dict[int, bytes] = {}
        for i in self._computation.instructions:
            digest = hashlib.blake2b(_own_text(i), digest_size=8)
            for operand in i.operand_ids:
                digest.update(digests[operand])
            digests[i.id] = digest.digest()
        return digests


def _own_text(instruction: hlo.Instruction) -> bytes:
    """What an instruction computes from its operands, as far as compilers agree on it."""
    shape, own = instruction.shape, hlo.Instruction()
    own.CopyFrom(instruction)
    for field in (
        "name",
        "id",
        "shape",
        "metadata",
        "operand_ids",
        "control_predecessor_ids",
        "called_computation_ids",
        "channel_id",
        "backend_config",
        "frontend_attributes",
    ):
        own.ClearField(field)
    own.DiscardUnknownFields()
    own.shape.dimensions.extend(shape.dimensions)
    own.shape.element_type = shape.element_type
    return own.SerializeToString(deterministic=True)


def uses(
    flow: Dataflow, computation: hlo.Computation, legs: Collection[int] = ()
) -> dict[int, int]:
    """Instruction id to the depth of the first heavy operation, but for the legs, that uses it."""
    found: dict[int, int] = {}
    for i in reversed(computation.instructions):
        is_use = i.opcode in _HEAVY and i.id not in legs
        use = flow.depth[i.id] if is_use else found.get(i.id)
        if use is None:
            continue
        for operand in i.operand_ids:
            found[operand] = min(use, found.get(operand, use))
    return found


def readiness(
    computation: hlo.Computation,
    lines: Mapping[int, str],
    gathers: Collection[int] = (),
    legs: Collection[int] = (),
) -> list[tuple[hlo.Instruction, str]]:
    """Instructions in the order in which they can start, gathers in that in which they are used.

    By depth; then by line; then by the outputs and inputs that they are connected with; where all
    that is equal, by what they compute.

    Args:
      computation: Sorted; holds the instructions.
      lines: Instruction id to what is equal on all ranks.
      gathers: Those of the instructions whose operands are often there long before.
      legs: Heavy operations that belong to gathers.

    Returns:
      Each instruction, with what tells it from others of the same line, or "" if there is none. It
      belongs into the plan: compilers that put two such in another order must not exchange the one
      for the other.
    """
    flow = Dataflow(computation)

    used = uses(flow, computation, legs) if gathers else {}

    def turn(i: int) -> int:
        depth = flow.depth[i]
        return max(depth, used.get(i, 0) - _AHEAD) if i in gathers else depth

    def place(i: int) -> tuple[int, str, int, int]:
        return turn(i), lines[i], flow.outputs[i], flow.inputs[i]

    same_line = collections.Counter(lines.values())
    same_place = collections.Counter(map(place, lines))

    def tie(i: int) -> str:
        if same_line[lines[i]] == 1:
            return ""
        computed = flow.digests[i] if same_place[place(i)] > 1 else b""
        connected = f"{flow.outputs[i]:x} {flow.inputs[i]:x} ".encode()
        return hashlib.blake2b(connected + computed, digest_size=4).hexdigest()

    ties = {i: tie(i) for i in lines}
    order = sorted(lines, key=lambda i: (*place(i), ties[i]))
    return [(computation[i], ties[i]) for i in order]
