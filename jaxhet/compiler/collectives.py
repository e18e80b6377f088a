"""The collectives of a module that cross islands, and errors for those that can't."""

import dataclasses
from collections.abc import Sequence

from jaxhet._errors import UsageError
from jaxhet.compiler import groups as groups_lib
from jaxhet.compiler import hlo, order
from jaxhet.compiler import proto as pb
from jaxhet.compiler.groups import Groups
from jaxhet.compiler.options import Job

_WITH_GLOBAL_IDS = {  # opcodes that have the attribute use_global_device_ids
    "all-gather",
    "all-gather-start",
    "all-reduce",
    "all-reduce-start",
    "reduce-scatter",
}
_INSIDE_ONLY = {  # opcode -> what to write instead
    "ragged-all-to-all": "jax.lax.all_to_all of equal parts",
    "recv": "jax.lax.ppermute",
    "send": "jax.lax.ppermute",
}
_UNEQUAL_GROUPS = {"all-reduce", "collective-broadcast", "collective-permute"}
# XLA on GPUs makes one communicator of all devices of the program for them, whatever their pairs.
_PERMUTES = {"collective-permute", "collective-permute-start"}
REDUCERS = {  # opcode -> JAX's word
    "add": "sum",
    "multiply": "product",
    "minimum": "min",
    "maximum": "max",
    "and": "and",
    "or": "or",
    "xor": "xor",
}
_MOST_GROUPS_SHOWN = 4
# Name of a piece of a program that may differ between platforms (`jaxhet.per_platform`).
PER_PLATFORM = "jaxhet_per_platform"


@dataclasses.dataclass(frozen=True)
class Identity:
    """Identity of one operand of one collective, from the program.

    Attributes:
      path: The `op_name`: numbers of equations, function names and the primitive; an argument's
        name for the gather of an argument.
      opcode: The collective that XLA's partitioner made of the equation.
      shape: Shape of the operand.
      mark: Distinction from others of the same equation; mostly "".
    """

    path: str
    opcode: str
    shape: str
    mark: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.path, self.opcode, self.shape, self.mark)))

    @property
    def key(self) -> order.Key:
        """Place of the collective in the order of the program."""
        return order.key(self.path)

    @property
    def use(self) -> float:
        """The depth at which its result is used; see `order.Key`."""
        return order.first_use(self.path)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that crosses islands, or that XLA turns into one.

    Attributes:
      computation: Where it is.
      instruction: The collective itself.
      groups: Groups of logical ids (`groups.py`).
      rank_of: Logical id to rank.
      shard_replicas: Number of members that keep the same block of a reduce-scatter. They are on
        one island, and side by side in the groups, which are in the order of the blocks.
      identities: One for each operand; none before `identity.assign`.
      is_pipelined: Whether it was moved to a neighbouring iteration of its loop (`pipeline.py`).
      is_early: Whether a gather's operand is ready when the computation begins (`early.py`).
    """

    computation: hlo.Computation
    instruction: hlo.Instruction
    groups: Groups
    rank_of: tuple[int, ...]
    shard_replicas: int = 1
    identities: tuple[Identity, ...] = ()
    is_pipelined: bool = False
    is_early: bool = False

    def index_in_group(self, groups: Groups) -> list[int]:
        """Logical id to index in its group; 0 for ids in no group."""
        index_of = {member: i for group in groups for i, member in enumerate(group)}
        return [index_of.get(logical_id, 0) for logical_id in range(len(self.rank_of))]

    @property
    def ranks(self) -> Groups:
        """The groups, in ranks."""
        return groups_lib.map_groups(self.groups, self.rank_of)


def crossing(module: hlo.Module, job: Job) -> list[Collective]:
    """The collectives of a module that cross islands, or that XLA would run across islands."""
    instructions = [
        (computation, instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode in hlo.COLLECTIVES and not instruction.is_host_transfer
    ]
    if not instructions:
        return []
    ranks = rank_of(module, job)
    collectives = (
        Collective(computation, instruction, groups_of(module, instruction), ranks)
        for computation, instruction in instructions
    )
    return [c for c in collectives if _is_crossing(c, job)]


def _is_crossing(collective: Collective, job: Job) -> bool:
    if job.is_gpu and collective.instruction.opcode in _PERMUTES:
        moves = any(source != target for source, target in collective.ranks)
        return moves and groups_lib.crosses(collective.rank_of, job.islands)
    return any(groups_lib.crosses(group, job.islands) for group in collective.ranks)


def check(module: hlo.Module, crossing: Sequence[Collective], job: Job) -> None:
    """Checks that all collectives can be decomposed.

    Raises:
      UsageError: A collective can't be decomposed; the text has its name, groups and source
            line, and the next step.
    """
    for collective in crossing:
        if problem := _problem(module, collective):
            raise UsageError(_message(module, collective, job, problem))


def role(caller: hlo.Instruction, computation_id: int) -> str:
    """Role of a computation in an instruction of control flow: body, condition, branch1, …"""
    place = list(caller.called_computation_ids).index(computation_id)
    if caller.opcode == "while":
        return ("body", "condition")[place]
    return f"branch{place}" if caller.opcode == "conditional" else "callee"


def rank_of(module: hlo.Module, job: Job) -> tuple[int, ...]:
    """Logical id to rank, for the devices of a module."""
    assignment = module.proto.device_assignment
    ranks = {device: rank for rank, device in enumerate(job.device_ids)}
    device_ids = [device.replica_device_ids[0] for device in assignment.computation_devices]
    if assignment.replica_count > 1:
        raise UsageError(
            f"{module.proto.name} has {assignment.replica_count} replicas; JAX's programs have one"
        )
    if not device_ids:
        raise UsageError(
            f"{module.proto.name} has collectives but no device assignment; compile it for the"
            " devices of the job"
        )
    if unknown := [d for d in device_ids if d not in ranks]:
        raise UsageError(
            f"{module.proto.name} runs on devices {unknown}, which are not in the job; build its"
            " mesh from jax.devices()"
        )
    return tuple(ranks[d] for d in device_ids)


def groups_of(module: hlo.Module, instruction: hlo.Instruction) -> Groups:
    """The groups of a collective, in logical ids."""
    everything = tuple(range(module.proto.device_assignment.computation_count))
    if instruction.opcode in _PERMUTES and not (instruction.channel_id and _ids(instruction)):
        return ()
    if not instruction.channel_id:  # groups of replicas, and a program has one replica
        return tuple((logical_id,) for logical_id in everything)
    if instruction.opcode in _WITH_GLOBAL_IDS and not instruction.use_global_device_ids:
        return (everything,)
    return _ids(instruction) or (everything,)


def _ids(instruction: hlo.Instruction) -> Groups:
    if instruction.HasField("mesh_axes_replica_group_list"):
        return _mesh_ids(instruction.mesh_axes_replica_group_list)
    devices = instruction.collective_device_list
    for iota in (instruction.iota_collective_device_list, devices.iota_replica_group_list):
        if iota.num_replica_groups:
            return groups_lib.iota_groups(
                iota.num_replica_groups, iota.iota_reshape_dims, iota.iota_transpose_perm
            )
    if instruction.source_target_pairs:
        return tuple((pair.source, pair.target) for pair in instruction.source_target_pairs)
    lists = devices.replica_groups or instruction.replica_groups
    return tuple(tuple(group.replica_ids) for group in lists)


def _mesh_ids(groups: pb.MeshAxesReplicaGroupListProto) -> Groups:
    refs = [
        groups_lib.AxisRef(ref.mesh_axis_index, ref.sub_axis_info.pre_size, ref.sub_axis_info.size)
        if ref.HasField("sub_axis_info")
        else groups_lib.AxisRef(ref.mesh_axis_index)
        for ref in groups.axes
    ]
    return groups_lib.mesh_groups(
        [axis.size for axis in groups.mesh.axes], groups.mesh.device_ids, refs
    )


def _problem(module: hlo.Module, collective: Collective) -> str | None:
    """Reason why a collective can't be decomposed, and the next step."""
    instruction = collective.instruction
    if PER_PLATFORM in instruction.metadata.op_name:
        return (
            "it is inside a piece that jaxhet.per_platform declares, where islands may run other"
            " code: nothing tells which of their collectives belong together. Put it outside of the"
            " piece"
        )
    if instruction.opcode in _INSIDE_ONLY:
        return (
            f"{instruction.opcode} can't cross islands. Keep this op inside an island"
            " (jaxhet.make_mesh orders devices so that the last axes do not cross), or write it"
            f" with {_INSIDE_ONLY[instruction.opcode]}"
        )
    if instruction.called_computation_ids and reducer(module, instruction) is None:
        return (
            "its reducer is not one of sum, product, min, max, and, or, xor. Use one of these, for"
            " example jax.lax.psum"
        )
    if instruction.opcode not in _UNEQUAL_GROUPS and not groups_lib.are_equal(collective.groups):
        return (
            "its groups have different sizes, and only an all-reduce (jax.lax.psum, pmax, pmin) can"
            " have such groups. Use groups of equal size"
        )
    if instruction.opcode == "collective-broadcast" and _has_dynamic_root(instruction):
        return (
            "its source is a traced value. Use a Python integer as the source of"
            " jax.lax.pbroadcast, or jax.lax.all_gather and an index"
        )
    return None


def _has_dynamic_root(instruction: hlo.Instruction) -> bool:
    """Whether the last operand of a broadcast is the place of its source in the group."""
    shape = instruction.shape
    num_results = len(shape.tuple_shapes) if shape.element_type == pb.TUPLE else 1
    return len(instruction.operand_ids) > num_results


def reducer(module: hlo.Module, instruction: hlo.Instruction) -> str | None:
    """The opcode that combines two elements, or None if there is none or more than one operation.

    Ignores conversions around it, which XLA adds when it promotes types.
    """
    if not instruction.called_computation_ids:
        return None
    computation = module.computations[instruction.called_computation_ids[0]]

    def source(instruction: hlo.Instruction) -> hlo.Instruction:
        while instruction.opcode == "convert":
            (instruction,) = computation.operands(instruction)
        return instruction

    root = source(computation.root)
    operands = [source(o) for o in computation.operands(root)]
    parameters = sorted(o.parameter_number for o in operands if o.opcode == "parameter")
    return root.opcode if root.opcode in REDUCERS and parameters == [0, 1] else None


def _message(module: hlo.Module, collective: Collective, job: Job, problem: str) -> str:
    crossing_groups = [g for g in collective.ranks if groups_lib.crosses(g, job.islands)]
    shown = groups_lib.to_text(tuple(crossing_groups[:_MOST_GROUPS_SHOWN]))
    more = len(crossing_groups) - _MOST_GROUPS_SHOWN
    islands = sorted({job.islands[rank] for group in crossing_groups for rank in group})
    instruction = collective.instruction
    return (
        f"{instruction.opcode} {instruction.name} ({module.location(instruction)}) has groups of"
        f" ranks {shown}{f' and {more} more' if more > 0 else ''} over islands"
        f" {', '.join(map(str, islands))}: {problem}."
    )
