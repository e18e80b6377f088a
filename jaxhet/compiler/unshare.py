"""Gives each caller of a computation with collectives a copy of its own.

XLA's GPU compilers lower two loops or branches with equal bodies to one computation with two
callers, and copy it later. An exchange in it would be copied as well, and one index in the plan
would stand for two.
"""

from collections.abc import Sequence

from jaxhet.compiler import hlo


def unshare(module: hlo.Module) -> None:
    """Gives each computation with collectives one caller."""
    holding = _holding(module)
    for computation in reversed(list(module.computations.values())):  # callers before callees
        calls = module.callers.get(computation.id, ())
        if computation.id not in holding or len(calls) < 2:
            continue
        paths = [call.instruction.metadata.op_name for call in calls]
        for call, path in zip(calls[1:], paths[1:], strict=True):
            copy = module.copy_computation(computation)
            ids = call.instruction.called_computation_ids
            ids[list(ids).index(computation.id)] = copy.id
            _rename(copy, paths, path)
        _rename(computation, paths, paths[0])
        del module.callers


def _holding(module: hlo.Module) -> set[int]:
    """Ids of the computations that hold a collective, or call one that does."""
    holding: set[int] = set()
    waiting = [
        c.id
        for c in module.computations.values()
        if any(i.opcode in hlo.COLLECTIVES for i in c.instructions)
    ]
    while waiting:
        if (i := waiting.pop()) not in holding:
            holding.add(i)
            waiting += [call.computation.id for call in module.callers.get(i, ())]
    return holding


def _rename(computation: hlo.Computation, paths: Sequence[str], own: str) -> None:
    """Replaces the path at the beginning of the names by the caller's."""
    names = [i.metadata.op_name for i in computation.instructions]
    base = next((p for p in paths if p and any(n.startswith(f"{p}/") for n in names)), own)
    if base == own or not own:
        return
    for i in computation.instructions:
        if i.metadata.op_name.startswith(f"{base}/"):
            i.metadata.op_name = own + i.metadata.op_name.removeprefix(base)
