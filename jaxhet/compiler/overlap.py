"""Schedule of a module: the instructions between starts and dones, and how often they run."""

import functools
import json

from jaxhet.compiler import carrier, collectives, hlo, loops

_LIBRARIES = ("__cublas", "__cudnn")  # XLA's names of library calls, on ROCm too
_PRODUCTS = ("convolution", "dot")


def products(module: hlo.Module) -> dict[int, int]:
    """Number of matrix products between the start and the done of each exchange.

    A loop or branch that holds one counts as one. An exchange that is one call (CPU), or of a
    module without a schedule, is not in it.
    """
    result: dict[int, int] = {}
    for computation_id, sequence in module.proto.schedule.sequences.items():
        computation = module.computations[computation_id]
        so_far, before = 0, {}
        for instruction in map(computation.__getitem__, sequence.instruction_ids):
            if holds_product(module, instruction):
                so_far += 1
            elif instruction.custom_call_target == carrier.START_TARGET:
                before[carrier.index_of_call(instruction)] = so_far
            elif instruction.custom_call_target == carrier.DONE_TARGET:
                index = carrier.index_of_call(instruction)
                result[index] = so_far - before[index]
    return result


def times(module: hlo.Module) -> dict[int, int | None]:
    """Number of runs of each exchange in one run of the program.

    It is None in a loop that ends by a condition, and in a branch.
    """

    @functools.cache
    def of_computation(computation_id: int) -> int | None:
        if computation_id == module.entry.id:
            return 1
        total = 0
        for call in module.callers.get(computation_id, ()):
            outer = of_computation(call.computation.id)
            inner = _times_called(module, call, computation_id)
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


def _times_called(module: hlo.Module, call: hlo.Call, computation_id: int) -> int | None:
    caller = call.instruction
    if caller.opcode == "conditional":
        return None
    if caller.opcode != "while":
        return 1
    config = json.loads(caller.backend_config or "{}")
    count = config.get("known_trip_count", {}).get("n")
    if count is None:  # XLA has not counted yet, or can't
        loop = loops.find(module, call.computation, caller)
        if loop is None:
            return None
        count = len(loop.values)
    return int(count) + (collectives.role(caller, computation_id) == "condition")


def holds_product(module: hlo.Module, instruction: hlo.Instruction) -> bool:
    """Whether an instruction is a matrix product or convolution, or calls one."""
    if instruction.opcode == "custom-call":
        return instruction.custom_call_target.startswith(_LIBRARIES)
    return instruction.opcode in _PRODUCTS or any(
        holds_product(module, i)
        for called in instruction.called_computation_ids
        for i in module.computations[called].instructions
    )
