"""A scheduled module as it runs: what is between starts and dones, and how often it runs."""

import functools
import json
from typing import NamedTuple

from jaxhet.compiler import carrier, collectives, hlo
from jaxhet.compiler.carrier import DONE_TARGET, START_TARGET

MATMUL = "matmul"

_LIBRARIES = ("__cublas", "__cudnn")  # XLA's names of library calls, on ROCm too
_PRODUCTS = ("convolution", "dot")
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


def products(module: hlo.Module) -> dict[int, int]:
    """Exchange to the number of matrix products between its start and its done.

    An exchange that is one call (CPU), or of a module without a schedule, is not in it.
    """
    result: dict[int, int] = {}
    for events in schedule(module):
        so_far, before = 0, {}
        for what, index, _ in events:
            if what == MATMUL:
                so_far += 1
            elif what == START_TARGET:
                before[index] = so_far
            elif what == DONE_TARGET:
                result[index] = so_far - before[index]
    return result


def times(module: hlo.Module) -> dict[int, int | None]:
    """Exchange to how often it runs each time that the program does.

    None where XLA does not know: in a loop that ends by a condition, and in a branch.
    """

    @functools.cache
    def of_computation(computation_id: int) -> int | None:
        if computation_id == module.entry.id:
            return 1
        total = 0
        for call in module.callers.get(computation_id, ()):
            outer = of_computation(call.computation.id)
            inner = _times_called(call.instruction, computation_id)
            if outer is None or inner is None:
                return None
            total += outer * inner
        return total

    return {
        carrier.read(i).index: of_computation(c.id)
        for c in module.computations.values()
        for i in c.instructions
        if carrier.is_start(i)
    }


def _times_called(caller: hlo.Instruction, computation_id: int) -> int | None:
    if caller.opcode == "conditional":
        return None
    if caller.opcode != "while":
        return 1
    config = json.loads(caller.backend_config or "{}")
    count = config.get("known_trip_count", {}).get("n")
    if count is None:
        return None
    return int(count) + (collectives.role(caller, computation_id) == "condition")


def _what(module: hlo.Module, instruction: hlo.Instruction) -> str | None:
    if holds_product(module, instruction):
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


def holds_product(module: hlo.Module, instruction: hlo.Instruction) -> bool:
    """Whether an instruction is a matrix product or convolution, or calls one."""
    if instruction.opcode == "custom-call":
        return instruction.custom_call_target.startswith(_LIBRARIES)
    return instruction.opcode in _PRODUCTS or any(
        holds_product(module, i)
        for called in instruction.called_computation_ids
        for i in module.computations[called].instructions
    )
