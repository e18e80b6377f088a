"""Identities of collectives in the program, by names that every compiler keeps."""

import dataclasses
from collections.abc import Sequence

from jaxhet.compiler import groups as groups_lib
from jaxhet.compiler import hlo, order
from jaxhet.compiler.collectives import Collective, Identity
from jaxhet.compiler.hlo import Instruction
from jaxhet.compiler.options import Job

# Opcodes of collectives that compilers combine, with operands in any order.
_COMBINED = ("all-gather", "all-reduce", "reduce-scatter")


def assign(crossing: Sequence[Collective], job: Job) -> list[Collective]:
    """The same collectives with their identities; operands of combined ones in program order.

    Raises:
      UsageError: Two can't be told apart.
    """
    by_computation: dict[int, list[Collective]] = {}
    for collective in crossing:
        by_computation.setdefault(collective.computation.id, []).append(collective)
    identities: dict[int, list[Identity]] = {}
    for collectives in by_computation.values():
        identities |= _of_computation(collectives, job)
    return [_in_order(c, identities[c.instruction.id]) for c in crossing]


def _of_computation(collectives: Sequence[Collective], job: Job) -> dict[int, list[Identity]]:
    """Instruction id to the identities of its operands, for the collectives of a computation."""
    computation = collectives[0].computation
    computation.sort()
    alike: dict[tuple[Identity, str], list[tuple[int, int, order.Node]]] = {}
    found: dict[int, list[Identity]] = {}
    for collective in collectives:
        instruction, groups = collective.instruction, groups_lib.to_text(collective.groups)
        found[instruction.id] = []
        for place, node in enumerate(_nodes(computation, instruction)):
            identity = Identity(
                _path(node, place), instruction.opcode, hlo.dimensions_text(node.operand.shape)
            )
            found[instruction.id].append(identity)
            alike.setdefault((identity, groups), []).append((instruction.id, place, node))
    ids = [collective.instruction.id for collective in collectives]
    flow = order.Dataflow(computation, ids, job.has_one_platform)
    for (identity, _), entries in alike.items():
        marks = order.tell_apart(computation, [node for _, _, node in entries], flow)
        for (instruction_id, place, _), mark in zip(entries, marks, strict=True):
            found[instruction_id][place] = dataclasses.replace(identity, mark=mark)
    return found


def _nodes(computation: hlo.Computation, instruction: Instruction) -> list[order.Node]:
    """The operands of a collective, each with its result."""
    operands = computation.operands(instruction)
    results: dict[int, Instruction] = {}
    if len(operands) > 1:
        for user in computation.users(instruction):
            if user.opcode == "get-tuple-element":
                results.setdefault(user.tuple_index, user)
    return [
        order.Node(instruction, operand, results.get(place, instruction))
        for place, operand in enumerate(operands)
    ]


def _path(node: order.Node, place: int) -> str:
    """The equation of one operand.

    XLA's combiner joins the names of the collectives that it combines, and leaves each one's own
    name on the element of the tuple that takes its place.
    """
    instruction = node.instruction
    if node.result is not instruction and instruction.opcode in _COMBINED:
        return node.result.metadata.op_name or instruction.metadata.op_name
    if len(instruction.operand_ids) > 1 and instruction.opcode not in _COMBINED:
        return f"{instruction.metadata.op_name}[{place}]"  # the program gives the order
    return instruction.metadata.op_name


def _in_order(collective: Collective, identities: Sequence[Identity]) -> Collective:
    """Puts the operands of a combined collective in program order."""
    c, instruction = collective.computation, collective.instruction
    places = sorted(range(len(identities)), key=lambda i: (identities[i].key, str(identities[i])))
    if instruction.opcode in _COMBINED and places != sorted(places):
        users = c.users(instruction)
        if c.root.id == instruction.id or any(u.opcode != "get-tuple-element" for u in users):
            return dataclasses.replace(collective, identities=tuple(identities))
        new = hlo.Instruction()
        new.CopyFrom(instruction)
        new.operand_ids[:] = [instruction.operand_ids[i] for i in places]
        new.shape.CopyFrom(hlo.tuple_shape([instruction.shape.tuple_shapes[i] for i in places]))
        new_place = {old: new for new, old in enumerate(places)}
        for user in users:
            user.tuple_index = new_place[user.tuple_index]
        c.replace(instruction, new)
        identities = [identities[i] for i in places]
    return dataclasses.replace(collective, identities=tuple(identities))
