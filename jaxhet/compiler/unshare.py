"""Gives each caller of a computation with collectives a copy of its own.

XLA's GPU compilers lower two loops or branches with equal bodies to one computation with two
callers, and copy it later. An exchange in it would be copied as well, and one index in the plan
would stand for two.
"""

from jaxhet.compiler import hlo
from jaxhet.compiler import proto as pb

_LOCAL_ID = (1 << 32) - 1  # an instruction's id is computation id << 32 | local id


def unshare(module: hlo.Module) -> hlo.Module:
    """The same module, in which each computation with collectives has one caller."""
    holding = _holding(module)
    if all(len(module.callers.get(i, ())) <= 1 for i in holding):
        return module
    copies = _Copies(module, holding)
    copies.visit(module.proto.entry_computation_id)
    result = pb.HloModuleProto()
    result.CopyFrom(module.proto)
    result.ClearField("computations")
    result.computations.extend(copies.in_order())
    return hlo.Module(result.SerializeToString())


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


class _Copies:
    """The computations of a module, and copies of those that have several callers."""

    def __init__(self, module: hlo.Module, holding: set[int]):
        self._module = module
        self._holding = holding
        self._protos = {c.id: c for c in module.proto.computations}
        self._copies: dict[int, list[pb.HloComputationProto]] = {i: [] for i in self._protos}
        self._next_id = max(self._protos) + 1
        self._originals: dict[int, pb.HloComputationProto] = {}  # unchanged copies of those taken

    def in_order(self) -> list[pb.HloComputationProto]:
        """All computations, callees before callers."""
        return [c for i, proto in self._protos.items() for c in (*self._copies[i], proto)]

    def visit(self, computation_id: int) -> None:
        """Gives each call in a computation its own callee."""
        self._visit(self._protos[computation_id])

    def _visit(self, proto: pb.HloComputationProto) -> None:
        for instruction in proto.instructions:
            for place, callee in enumerate(instruction.called_computation_ids):
                if callee in self._holding:
                    own = self._own(callee, instruction)
                    instruction.called_computation_ids[place] = own.id
                    self._visit(own)

    def _own(self, computation_id: int, caller: hlo.Instruction) -> pb.HloComputationProto:
        """The computation for one caller, with the caller's place in the program in its names."""
        proto = self._protos[computation_id]
        paths = [c.instruction.metadata.op_name for c in self._module.callers[computation_id]]
        if computation_id in self._originals:
            proto = _copy(self._originals[computation_id])
            self._renumber(proto)
            self._copies[computation_id].append(proto)
        else:
            self._originals[computation_id] = _copy(proto)
        _rename(proto, paths, caller.metadata.op_name)
        return proto

    def _renumber(self, proto: pb.HloComputationProto) -> None:
        new_id, self._next_id = self._next_id, self._next_id + 1
        id_of = {i.id: new_id << 32 | (i.id & _LOCAL_ID) for i in proto.instructions}
        proto.name = self._module.unique_name(f"own.{proto.id}")
        proto.id = new_id
        proto.root_id = id_of[proto.root_id]
        for i in proto.instructions:
            # The passes name what they add by its opcode.
            i.id, i.name = id_of[i.id], self._module.unique_name(f"own.{i.opcode}")
            i.operand_ids[:] = [id_of[o] for o in i.operand_ids]
            i.control_predecessor_ids[:] = [id_of[o] for o in i.control_predecessor_ids]
            if i.channel_id:
                i.channel_id = self._module.new_channel_id()


def _copy(proto: pb.HloComputationProto) -> pb.HloComputationProto:
    copy = pb.HloComputationProto()
    copy.CopyFrom(proto)
    return copy


def _rename(proto: pb.HloComputationProto, paths: list[str], own: str) -> None:
    """Replaces the path at the beginning of the names by the caller's."""
    names = [i.metadata.op_name for i in proto.instructions]
    base = next((p for p in paths if p and any(n.startswith(f"{p}/") for n in names)), own)
    if base == own or not own:
        return
    for i in proto.instructions:
        if i.metadata.op_name.startswith(f"{base}/"):
            i.metadata.op_name = own + i.metadata.op_name.removeprefix(base)
