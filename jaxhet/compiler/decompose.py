"""PRE: collectives that cross islands become local collectives, exchanges and arithmetic."""

import dataclasses

from jaxhet.compiler import (
    all_reduce,
    async_form,
    axes,
    bucket,
    collectives,
    custom_calls,
    early,
    entry_layout,
    groups,
    halves,
    hlo,
    identity,
    leading,
    movement,
    pipeline,
    plan,
    scatter,
    unshare,
)
from jaxhet.compiler.carrier import Exchange
from jaxhet.compiler.codecs import fitting
from jaxhet.compiler.collectives import Collective
from jaxhet.compiler.cpu_form import CpuLowering
from jaxhet.compiler.exchange import ALGORITHMS, DIRECT, Half
from jaxhet.compiler.gpu_form import GpuLowering
from jaxhet.compiler.options import Job, Options

_POINT_TO_POINT = ("collective-broadcast", "collective-permute")


def decompose(module: bytes, job: Job, options: Options) -> bytes | None:
    """Replaces the collectives of a module that cross islands.

    Args:
      module: Serialized HloModuleProto at XLA's pre-scheduler stage.
      job: The job.
      options: How to decompose.

    Returns:
      The new module, with its plan inside; None if nothing has to change.

    Raises:
      UsageError: A collective crosses islands and can't be decomposed, or a custom call may
        communicate between islands.
    """
    if not hlo.has_collective(module) and not custom_calls.may_be_in(module):
        return None
    parsed = hlo.Module(module)
    custom_calls.check(parsed, job)
    unshare.unshare(parsed)
    crossing = async_form.to_sync(parsed, collectives.crossing(parsed, job))
    is_changed = halves.keep_local(parsed, crossing)
    if not crossing:
        return _finished(parsed, job) if is_changed else None
    keeps_kernels = job.is_gpu and options.one_world_kernels
    if job.is_gpu and options.pipeline_iterations and not keeps_kernels:
        moved = pipeline.pipeline(parsed, crossing, options.pipeline_iterations)
        crossing = [
            dataclasses.replace(c, is_pipelined=c.instruction.id in moved)
            for c in (collectives.crossing(parsed, job) if moved else crossing)
        ]
    collectives.check(parsed, crossing, job)
    plan.check_program(parsed)
    crossing = [early.mark(c, is_gpu=job.is_gpu) for c in identity.assign(crossing, job)]
    crossing = scatter.to_reduce_scatters(crossing, job, _is_flat(job, options))
    if not job.is_gpu:
        crossing = bucket.bucketed(crossing, "collective-permute")
    elif options.bucket_bytes:
        crossing = bucket.bucketed(crossing, "all-reduce", options.bucket_bytes)
    exchanges: list[Exchange] = []
    codecs = axes.Codecs.of(parsed, job, options)
    for collective in crossing:
        if (half := halves.of(collective.instruction)) is not None:
            _lower_half(collective, half, job, options, exchanges)
            continue
        codec = _fitting(collective, codecs)
        if keeps_kernels:
            _isolate(collective)
        _lower(collective, job, options, exchanges, codec)
    plan.make(parsed, exchanges)
    return _finished(parsed, job)


def _finished(module: hlo.Module, job: Job) -> bytes:
    entry_layout.keep(module, is_gpu=job.is_gpu)
    return module.serialize()


def _isolate(collective: Collective) -> None:
    """Puts barriers around a collective, so that XLA does not fuse its replacement with other code.

    XLA does not fuse the collective itself either, so the kernels before and after it can be the
    same as in one world.
    """
    c, instruction = collective.computation, collective.instruction
    for place, operand in enumerate(c.operands(instruction)):
        c.set_operand(instruction, place, c.add("opt-barrier", operand.shape, [operand]))
    users = c.users(instruction)
    are_parts = bool(users) and all(user.opcode == "get-tuple-element" for user in users)
    for result in users if are_parts else [instruction]:
        c.hide(result)


def _fitting(collective: Collective, codecs: axes.Codecs) -> str:
    """The codec of a collective, if it fits an operand."""
    operands = collective.computation.operands(collective.instruction)
    codec = codecs.of_collective(collective)
    return codec if any(fitting(codec, x.shape) for x in operands) else ""


def _lower(
    collective: Collective, job: Job, options: Options, exchanges: list[Exchange], codec: str
) -> None:
    """Replaces a collective; appends its exchanges."""
    split, note = _divide(collective, job, options, codec)
    opcode = collective.instruction.opcode
    reducer = collectives.reducer(collective.computation.module, collective.instruction)
    name = [opcode]
    if reducer is not None:
        name.append(collectives.REDUCERS[reducer])
    name += [f"dim {dim}" for dim in collective.instruction.dimensions]
    if job.is_gpu:
        collective = leading.along_first(collective)
    algorithm = DIRECT if opcode in _POINT_TO_POINT else ALGORITHMS[split is not None]
    form = GpuLowering if job.is_gpu else CpuLowering
    lowering = form(collective, " ".join(name), algorithm, note, job, options, exchanges, codec)
    match opcode:
        case "all-reduce":
            assert reducer is not None
            all_reduce.lower(lowering, reducer, split)
        case "reduce-scatter":
            assert reducer is not None
            movement.reduce_scatter(lowering, reducer, split)
        case "all-gather":
            movement.all_gather(lowering, split)
        case "all-to-all":
            movement.all_to_all(lowering, split)
        case "collective-permute":
            movement.permute(lowering)
        case "collective-broadcast":
            assert isinstance(lowering, GpuLowering)
            movement.broadcast(lowering)
        case _:
            raise AssertionError(f"{opcode} has no lowering")


def _lower_half(
    collective: Collective, half: Half, job: Job, options: Options, exchanges: list[Exchange]
) -> None:
    form, name = GpuLowering if job.is_gpu else CpuLowering, f"{half.verb} {half.name}"
    halves.lower(form(collective, name, DIRECT, "", job, options, exchanges, half=half), half)


def _is_flat(job: Job, options: Options) -> bool:
    return options.algorithm == "flat" or (options.algorithm == "auto" and not job.is_gpu)


def _divide(
    collective: Collective, job: Job, options: Options, codec: str
) -> tuple[groups.Split | None, str]:
    """Division of the groups for the hierarchical algorithm; or None, and the reason.

    A collective with a codec is hierarchical on CPUs too, so that fewer bytes cross the link. An
    all-to-all on CPUs has no codec.
    """
    opcode = collective.instruction.opcode
    if opcode in _POINT_TO_POINT or (opcode == "all-to-all" and not job.is_gpu):
        return None, ""
    if _is_flat(job, options) and (options.algorithm == "flat" or not codec):
        return None, ""
    split = groups.split(collective.groups, collective.rank_of, job.islands)
    if isinstance(split, str):
        return None, split
    if opcode != "all-reduce" and split.places is None:
        return None, "groups meet the islands in different orders"
    return split, ""
