"""POST: turns exchanges into calls of the engine, and checks that the plan is PRE's."""

from jaxhet._errors import JaxhetError
from jaxhet.compiler import carrier, collectives, entry_layout, hlo
from jaxhet.compiler import plan as plan_lib
from jaxhet.compiler.arrange import arrange, overlap_sums
from jaxhet.compiler.options import Job
from jaxhet.compiler.plan import Plan


def bridge(module: bytes, job: Job) -> tuple[bytes, Plan] | None:
    """Makes the exchanges of a scheduled module calls of the engine; the schedule stays.

    Args:
      module: Serialized HloModuleProto at XLA's post-scheduler stage.
      job: The job.

    Returns:
      The new module and its plan; None if it has no exchange.

    Raises:
      UsageError: A collective that crosses islands was added after `decompose`.
      JaxhetError: XLA has changed the exchanges since PRE.
    """
    if not carrier.may_be_in(module) and not hlo.has_collective(module):
        return None
    parsed = hlo.Module(module)
    plan = plan_lib.collect(parsed)
    arrange(parsed)
    pairs = [p for computation in parsed.computations.values() for p in _pairs(computation)]
    for computation, start, done in pairs:
        carrier.to_calls(computation, start, done)
    if left := collectives.crossing(parsed, job):
        raise JaxhetError(
            f"{parsed.proto.name}: XLA added {left[0].instruction.name}, which crosses islands,"
            " after jaxhet's pass; report this with a dump (JAXHET_DUMP)"
        )
    if plan is None:
        return None
    if not job.is_gpu:
        return parsed.serialize() if overlap_sums(parsed) else module, plan
    if not pairs:
        return module, plan
    entry_layout.keep_of_results(parsed)
    return parsed.serialize(), plan


def _pairs(
    computation: hlo.Computation,
) -> list[tuple[hlo.Computation, hlo.Instruction, hlo.Instruction]]:
    """The starts and dones of a computation's carriers."""
    starts = {
        i.id: i
        for i in computation.instructions
        if i.opcode in carrier.CARRIERS and carrier.is_start(i)
    }
    users: dict[int, list[hlo.Instruction]] = {i: [] for i in starts}
    for instruction in computation.instructions if starts else ():
        for operand in instruction.operand_ids:
            if operand in starts:
                users[operand].append(instruction)
    for start_id, start in starts.items():
        if [u.opcode for u in users[start_id]] != [carrier.CARRIERS[start.opcode]]:
            names = ", ".join(u.name for u in users[start_id]) or "nothing"
            raise JaxhetError(f"exchange {start.name} is used by {names}, not by its done alone")
    return [(computation, start, users[i][0]) for i, start in starts.items()]
