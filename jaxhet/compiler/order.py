"""The order in which a program's exchanges start, the same for every compiler.

It follows the program as JAX traced it: `jaxhet/_jax/programs.py` numbers the equations of every
jaxpr when JAX lowers it, XLA carries the numbers in `op_name` through partitioning and
simplification, and two vendors' compilers keep them alike. Ids, names, the order of instructions
and what a vendor makes of an operation decide nothing.
"""

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence

from jaxhet._errors import UsageError
from jaxhet.compiler import hlo, loops, values

# Number of operations that take time before an equation; then the numbers of the equations around
# it, from the outermost one, and its own number.
Key = tuple[int, tuple[int, ...]]

# A label of `jaxprs.labels` or `argument_labels`: number, depth, and depth of the first use.
_LABEL = re.compile(r"(?<!\w)(?:e(\d+))?d(\d+)(?:u(\d+))?(?!\w)")

# Largest number of operations that take time, about a layer, between the start of a gather and the
# first use of its result. The gathered array takes memory, and other exchanges are used earlier.
_AHEAD = 8
_LOOP = 1 << 20  # more than any depth


def key(path: str) -> Key:
    """Place in the program of the equation in a path; arguments have the first place."""
    found = _LABEL.findall(path)
    return sum(int(d) for _, d, _ in found), tuple(int(number) for number, _, _ in found if number)


def first_use(path: str) -> float:
    """The depth at which the first operation that uses a result may start; infinite without one.

    A result of an inner jaxpr has the first use of the equation that holds the jaxpr.
    """
    found = _LABEL.findall(path)
    for level in range(len(found) - 1, -1, -1):
        if use := found[level][2]:
            return sum(int(depth) for _, depth, _ in found[:level]) + int(use)
    return math.inf


def for_people(path: str) -> str:
    """A path without the depths."""
    return with_depths(path, "").rstrip("/")


def with_depths(path: str, depth: str) -> str:
    """A path with another text in place of all depths and first uses."""
    return _LABEL.sub(lambda match: (f"e{match[1]}" if match[1] else "") + depth, path)


class Dataflow:
    """How the instructions of one computation, which is sorted, depend on each other.

    Attributes:
      bit_of: The bit of each of `ids`, the instructions that `needs` and `counts` are about.
      has_one_compiler: Whether one compiler writes the modules of all islands.
    """

    def __init__(
        self, computation: hlo.Computation, ids: Sequence[int], has_one_compiler: bool = False
    ):
        self._computation = computation
        self.has_one_compiler = has_one_compiler
        self.bit_of = {i: 1 << place for place, i in enumerate(ids)}

    @functools.cached_property
    def inputs(self) -> Mapping[int, int]:
        """Instruction id to the set, as bits, of the computation's inputs that it depends on.

        Inputs that only share a barrier of `jax.checkpoint` are not in it.
        """
        inputs: dict[int, int] = {}
        for i in self._computation.instructions:
            operands = self._computation.operands(i)
            if (source := loops.behind_barrier(self._computation, i)) is not i:
                inputs[i.id] = inputs[source.id]
            elif i.opcode == "parameter":
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
    def code(self) -> Mapping[int, bytes]:
        """Instruction id to a digest of the instructions that give its value."""
        return values.code(self._computation)

    @functools.cached_property
    def certain(self) -> Mapping[int, bytes]:
        """Instruction id to a digest; two arrays of one digest are certain to be equal."""
        return values.certain(self._computation)

    @functools.cached_property
    def needs(self) -> Mapping[int, int]:
        """Instruction id to the set, as bits, of the instructions in `ids` that it depends on."""
        needs: dict[int, int] = {}
        for instruction in self._computation.instructions:
            bits = 0
            for p in self._computation.predecessors(instruction):
                bits |= needs[p.id] | self.bit_of.get(p.id, 0)
            needs[instruction.id] = bits
        return needs

    def counts(self, some: Collection[int]) -> dict[int, int]:
        """Instruction id to the number of instructions in `some` that it depends on."""
        bits = sum(self.bit_of[i] for i in some)
        return {i: (self.needs[i] & bits).bit_count() for i in some}


@dataclasses.dataclass(frozen=True)
class Step:
    """An instruction that has a place in the order.

    Attributes:
      line: Text that must be equal on all ranks.
      key: The place of its equation in the program.
      use: The depth at which its result is used.
      is_gather: Whether the operand is often ready long before the result is used.
      is_early: Whether a gather's operand is ready when its computation begins.
      inside: For a loop or branch, the common beginning of its exchanges' keys; None for exchanges.
    """

    line: str
    key: Key
    use: float = math.inf
    is_gather: bool = False
    is_early: bool = False
    inside: tuple[int, ...] | None = None

    def follows(self, call: "Step") -> bool:
        """Whether it follows a loop or branch in the program; False if it was moved out of one."""
        assert call.inside is not None
        numbers = self.key[1]
        return call.inside < numbers and numbers[: len(call.inside)] != call.inside


def ordered(
    computation: hlo.Computation, steps: Mapping[int, Step], flow: Dataflow | None = None
) -> list[tuple[hlo.Instruction, str]]:
    """Sorts instructions by their possible starts, and gathers by their first uses.

    A step follows all steps that it depends on.

    Args:
      computation: Sorted; holds the instructions.
      steps: By instruction id.
      flow: The computation's dataflow, if the caller has it.

    Returns:
      Each instruction, and a text that distinguishes it from others with the same line, or "". The
      text is part of the plan.

    Raises:
      UsageError: Two of them can't be told apart.
    """
    ids = list(steps)
    flow = flow or Dataflow(computation, ids)
    needs = flow.needs
    calls = [step for step in steps.values() if step.inside is not None]
    turns = {i: _turn(step, calls) for i, step in steps.items()}
    for i in sorted(ids, key=lambda i: needs[i].bit_count(), reverse=True):
        for place in places(needs[i]):
            turns[ids[place]] = min(turns[ids[place]], turns[i])
    marks = _marks(computation, steps, flow)

    def turn(i: int) -> tuple[_Turn, int, Key, str, str]:
        # A step needs fewer steps than any step that waits for it.
        return turns[i], needs[i].bit_count(), steps[i].key, steps[i].line, marks[i]

    return [(computation[i], marks[i]) for i in sorted(ids, key=turn)]


_Turn = tuple[int, float]


def _turn(step: Step, calls: Sequence[Step]) -> _Turn:
    """Sort key of a step: its possible start, then the first use of its result."""
    depth, use = step.key[0], step.use
    if step.is_early and use == math.inf:
        use = depth  # the path names a call, and an operand of the call is gathered
    if step.is_gather and use < math.inf:
        before = [call.key[0] for call in calls if step.follows(call)]
        least = min(depth, max(before, default=-1) + 1) if step.is_early else depth
        depth = max(least, int(use) - _AHEAD)
        # Depths count a loop as one operation; values that are used behind it are needed last.
        use += _LOOP * sum(call >= depth for call in before)
    return depth, use


def places(bits: int) -> list[int]:
    """The numbers of the bits that are set."""
    return [place for place in range(bits.bit_length()) if bits >> place & 1]


def _marks(
    computation: hlo.Computation, steps: Mapping[int, Step], flow: Dataflow
) -> dict[int, str]:
    alike: dict[str, list[Node]] = {}
    for i, step in steps.items():
        alike.setdefault(step.line, []).append(Node(computation[i], computation[i], computation[i]))
    return {
        node.instruction.id: mark
        for nodes in alike.values()
        for node, mark in zip(nodes, tell_apart(computation, nodes, flow), strict=True)
    }


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One of several exchanges that look alike.

    Attributes:
      instruction: The collective, or the call that it is in.
      operand: The array that it exchanges.
      result: The array that it returns.
    """

    instruction: hlo.Instruction
    operand: hlo.Instruction
    result: hlo.Instruction


def tell_apart(
    computation: hlo.Computation, nodes: Sequence[Node], flow: Dataflow
) -> tuple[str, ...]:
    """For each node, a text that differs between nodes that look alike; "" for a single node.

    The text tells which node waits for which. If that is not enough, it has the equation of the
    loop or branch, or the element of a result that the node takes. Otherwise it has the inputs and
    outputs of the computation that the node is connected with, and the equations next to it. A
    compiler that simplifies removes connections and adds none. So it can't exchange the connections
    of two nodes. If two compilers see different connections, the marks differ, and so do the plans.
    If one compiler writes all modules, the last resort is the instructions that compute the
    operand. Nodes that take the same array give the same result and need no mark: XLA's partitioner
    gathers some arrays twice.

    Raises:
      UsageError: Two of them can't be told apart: their data could be swapped.
    """
    if len(nodes) == 1:
        return ("",)
    count_of = flow.counts({node.instruction.id for node in nodes})
    counts = [count_of[node.instruction.id] for node in nodes]
    if sorted(counts) == list(range(len(nodes))):
        return tuple(f"#{count}" for count in counts)
    paths = [node.instruction.metadata.op_name for node in nodes]
    if all(paths) and len(set(paths)) == len(nodes):  # loops that call equal bodies
        return tuple(f"#{_digest(path)}" for path in paths)
    elements = [_element(computation, node.operand) for node in nodes]
    if None not in elements and len(set(elements)) == len(nodes):
        return tuple(f"#{element}" for element in elements)
    texts = [
        f"{count} {_surroundings(computation, node, flow)}"
        for count, node in zip(counts, nodes, strict=True)
    ]
    if flow.has_one_compiler and _alike(nodes, texts, computation, flow):
        texts = [
            f"{text} {flow.code[node.operand.id].hex()}"
            for text, node in zip(texts, nodes, strict=True)
        ]
    if alike := _alike(nodes, texts, computation, flow):
        raise UsageError(_message(computation.module, *alike))
    return tuple(f"#{_digest(text)}" for text in texts)


def _alike(
    nodes: Sequence[Node], texts: Sequence[str], computation: hlo.Computation, flow: Dataflow
) -> tuple[Node, Node] | None:
    """Two nodes of the same text that can give different results, if there are any."""
    by_text: dict[str, Node] = {}
    for node, text in zip(nodes, texts, strict=True):
        other = by_text.setdefault(text, node)
        if other is not node and not _takes_the_same(computation, other, node, flow):
            return other, node
    return None


def _takes_the_same(computation: hlo.Computation, one: Node, other: Node, flow: Dataflow) -> bool:
    """Whether two nodes that look alike certainly have the same result."""
    operands = [
        computation.operands(n.instruction) if n.operand is n.instruction else [n.operand]
        for n in (one, other)
    ]
    calls = one.instruction.called_computation_ids or other.instruction.called_computation_ids
    # Operands of one combined all-reduce are reduced by the same function.
    is_one = one.instruction.id == other.instruction.id
    return (
        (is_one or not calls)
        and len(operands[0]) == len(operands[1])
        and all(
            a.id == b.id or flow.certain.get(a.id, a.id) == flow.certain.get(b.id, b.id)
            for a, b in zip(*operands, strict=True)
        )
    )


def _element(computation: hlo.Computation, x: hlo.Instruction) -> int | None:
    """Index of the tuple element that x is, perhaps reshaped; None if x is no such element."""
    while x.opcode in hlo.FORMS:
        (x,) = computation.operands(x)
    return x.tuple_index if x.opcode == "get-tuple-element" else None


def _surroundings(computation: hlo.Computation, node: Node, flow: Dataflow) -> str:
    users = {user.metadata.op_name for user in computation.users(node.result)}
    connected = f"{flow.outputs[node.result.id]:x} {flow.inputs[node.operand.id]:x}"
    return "\n".join([connected, node.operand.metadata.op_name, *sorted(users)])


def _message(module: hlo.Module, one: Node, other: Node) -> str:
    places = [f"{i.name} ({module.location(i)})" for i in (one.result, other.result)]
    return (
        f"{module.proto.name}: {' and '.join(places)} cross islands, belong to one equation of the"
        " program, and nothing in the program tells one from the other. Two compilers could number"
        " them differently, and their data would be swapped. Write them as separate operations"
        " (for example one jax.lax.psum for each array), or compile without the XLA flag that"
        " copies code, such as loop unrolling"
    )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
