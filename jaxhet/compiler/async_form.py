"""Pairs of a start and a done collective become one instruction, at the done's place."""

import dataclasses
from collections.abc import Sequence

from jaxhet.compiler import hlo
from jaxhet.compiler.collectives import Collective

_SUFFIX = "-start"


def to_sync(module: hlo.Module, found: Sequence[Collective]) -> list[Collective]:
    """The same collectives, with synchronous ones in place of asynchronous ones."""
    return [_to_sync(module, collective) for collective in found]


def _to_sync(module: hlo.Module, collective: Collective) -> Collective:
    computation, instruction = collective.computation, collective.instruction
    if instruction.opcode.endswith(_SUFFIX):
        opcode = instruction.opcode.removesuffix(_SUFFIX)
        return _replace(collective, opcode, computation, instruction)
    callers = module.callers.get(computation.id, ())
    if len(callers) != 1 or callers[0].instruction.opcode != "async" + _SUFFIX:
        return collective
    sync = _replace(collective, instruction.opcode, callers[0].computation, callers[0].instruction)
    module.remove_computation(computation)
    return sync


def _replace(
    collective: Collective, opcode: str, computation: hlo.Computation, start: hlo.Instruction
) -> Collective:
    (done,) = computation.users(start)
    assert done.opcode.endswith("-done"), done.name
    new = hlo.Instruction()
    new.CopyFrom(collective.instruction)
    new.name, new.id, new.opcode = done.name, done.id, opcode
    new.shape.CopyFrom(done.shape)
    new.operand_ids[:] = start.operand_ids
    # XLA gives an instruction that it wraps into a computation the name of the caller.
    new.metadata.CopyFrom(start.metadata)
    before = {*start.control_predecessor_ids, *done.control_predecessor_ids} - {start.id}
    new.control_predecessor_ids[:] = sorted(before)
    computation.replace(done, new)
    computation.remove(start, successor=done)
    return dataclasses.replace(collective, computation=computation, instruction=done)
