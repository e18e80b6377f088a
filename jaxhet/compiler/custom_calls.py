"""Custom calls that communicate between devices, which the passes can't see."""

import re

from jaxhet._errors import UsageError
from jaxhet.compiler import collectives, hlo
from jaxhet.compiler.options import Job

# Custom-call target to the pattern in its configuration that says that it communicates.
# Modules of jax.experimental.thunky have an internal format of XLA: all may communicate. Kernels of
# Mosaic GPU reach other devices by metadata of XLA, by XLA's barrier, or by NVSHMEM.
_MOSAIC = re.compile(rb"(uses_xla_collective_metadata|use_custom_barrier) = true|nvshmem")
_COMMUNICATES: dict[str, re.Pattern[bytes]] = {
    "thunky.inline_module": re.compile(b""),
    "mosaic_gpu": _MOSAIC,
    "mosaic_gpu_v2": _MOSAIC,
}


def may_be_in(module: bytes) -> bool:
    """A cheap check whether a serialized module can hold such a call; may be true without one."""
    return any(target.encode() in module for target in _COMMUNICATES)


def check(module: hlo.Module, job: Job) -> None:
    """Checks that no custom call of a program over several islands communicates.

    Raises:
      UsageError: A custom call communicates, or its content is unknown.
    """
    calls = [
        i
        for c in module.computations.values()
        for i in c.instructions
        if i.opcode == "custom-call" and _communicates(i)
    ]
    if not calls or not module.proto.device_assignment.computation_count:
        return
    islands = sorted({job.islands[rank] for rank in collectives.rank_of(module, job)})
    if len(islands) > 1:
        call = calls[0]
        raise UsageError(
            f"{call.custom_call_target} {call.name} ({module.location(call)}) is in a program over"
            f" islands {', '.join(map(str, islands))}: this custom call can communicate between"
            " devices by itself, which can't cross islands. Call it in a program for devices of one"
            " island, or use collectives of jax.lax"
        )


def _communicates(call: hlo.Instruction) -> bool:
    pattern = _COMMUNICATES.get(call.custom_call_target)
    return pattern is not None and pattern.search(call.backend_config) is not None
