"""The schedule of a compiled module, as far as it matters to overlap."""

from typing import NamedTuple

from jaxhet.compiler import carrier, hlo, overlap

MATMUL = "matmul"

_LOCAL = ("reduce-scatter", "all-gather", "all-reduce", "collective-permute")


class Event(NamedTuple):
    """An instruction that matters to overlap.

    Attributes:
      what: `MATMUL` for matrix products and convolutions, and for a loop or branch that holds one;
        the opcode of a collective; the target of a custom call.
      exchange: Index of the one that is started or done, else -1.
      num_bytes: Largest number of bytes that a rank sends to other islands by the exchange; else 0.
    """

    what: str
    exchange: int
    num_bytes: int


def schedule(module: hlo.Module) -> list[list[Event]]:
    """For each computation, its events in the order of its schedule."""
    result: list[list[Event]] = []
    num_bytes = {
        spec.index: spec.num_bytes
        for c in module.computations.values()
        for spec in map(carrier.read, filter(carrier.is_start, c.instructions))
    }
    for computation_id, sequence in sorted(module.proto.schedule.sequences.items()):
        computation, events = module.computations[computation_id], []
        for instruction_id in sequence.instruction_ids:
            instruction = computation[instruction_id]
            if what := _what(module, instruction):
                index = carrier.index_of_call(instruction)
                events.append(Event(what, index, num_bytes.get(index, 0)))
        result.append(events)
    return result


def _what(module: hlo.Module, instruction: hlo.Instruction) -> str | None:
    if overlap.holds_product(module, instruction):
        return MATMUL
    if instruction.opcode == "custom-call":
        return instruction.custom_call_target
    if instruction.opcode == "fusion":
        return None
    called = [module.computations[i] for i in instruction.called_computation_ids]
    opcodes = {i.opcode for c in called for i in c.instructions}
    for opcode in _LOCAL:
        if instruction.opcode.startswith(opcode) or opcode in opcodes:
            return opcode
    return None
