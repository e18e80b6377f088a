"""PRE: collectives that cross islands become local collectives, exchanges and arithmetic."""

from jaxhet.compiler import all_reduce, collectives, hlo, plan
from jaxhet.compiler.exchange import Exchange
from jaxhet.compiler.options import Job, Options


def decompose(module: bytes, job: Job, options: Options) -> bytes | None:
    """Replaces the collectives of a module that cross islands.

    Args:
      module: Serialized HloModuleProto at XLA's pre-scheduler stage.
      job: The job.
      options: How to decompose.

    Returns:
      The new module, with its plan inside; None if no collective crosses islands.

    Raises:
      UsageError: A collective crosses islands and can't be decomposed.
    """
    if not hlo.has_collective(module):
        return None
    parsed = hlo.Module(module)
    crossing = collectives.crossing(parsed, job)
    if not crossing:
        return None
    exchanges: list[Exchange] = []
    for collective in crossing:
        all_reduce.lower(collective, job, options, exchanges)
    plan.make(parsed, exchanges, options)
    return parsed.serialize()
