"""A thin view of a serialized HloModuleProto, to find and add instructions. Other fields stay."""

import dataclasses
import functools
import itertools
import math
import pathlib
import re
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from typing import Any

from jaxhet._errors import JaxhetError
from jaxhet.compiler import proto as pb

Instruction = pb.HloInstructionProto
Shape = pb.ShapeProto

COLLECTIVES = (
    "all-gather",
    "all-gather-start",
    "all-reduce",
    "all-reduce-start",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "collective-permute-start",
    "ragged-all-to-all",
    "recv",
    "reduce-scatter",
    "send",
)

# Operations with one operand that change only the form of an array.
FORMS = ("bitcast", "convert", "copy", "reshape", "transpose")

# The field `opcode` of a serialized instruction: key, length, text. The key's byte is rare.
_COLLECTIVE_FIELD = re.compile(
    b"\x12(?:" + b"|".join(re.escape(bytes([len(o)]) + o.encode()) for o in COLLECTIVES) + b")"
)

_OWN_NAME = re.compile(r"jaxhet\..*\.\d+$")  # a name that `Module.unique_name` gave

_ID_BITS = 32  # an instruction's id is computation id << 32 | local id
_WIDTHS: dict[int, int] = {  # bits
    pb.PRED: 8,
    **dict.fromkeys((pb.S1, pb.U1), 1),
    **dict.fromkeys((pb.S2, pb.U2), 2),
    **dict.fromkeys((pb.S4, pb.U4, pb.F4E2M1FN), 4),
    **dict.fromkeys((pb.S8, pb.U8), 8),
    **dict.fromkeys((pb.F8E5M2, pb.F8E4M3, pb.F8E4M3FN, pb.F8E4M3B11FNUZ, pb.F8E3M4), 8),
    **dict.fromkeys((pb.F8E5M2FNUZ, pb.F8E4M3FNUZ, pb.F8E8M0FNU), 8),
    **dict.fromkeys((pb.S16, pb.U16, pb.F16, pb.BF16), 16),
    **dict.fromkeys((pb.S32, pb.U32, pb.F32), 32),
    **dict.fromkeys((pb.S64, pb.U64, pb.F64, pb.C64), 64),
    pb.C128: 128,
}


def bit_width(element_type: int) -> int:
    """Bits of one element."""
    return _WIDTHS[element_type]


def is_float(element_type: int) -> bool:
    """Whether the type is a real floating-point type."""
    return pb.PrimitiveType.Name(element_type).startswith(("F", "BF"))


def is_complex(element_type: int) -> bool:
    """Whether the type is a complex floating-point type."""
    return element_type in (pb.C64, pb.C128)


def has_collective(data: bytes) -> bool:
    """Whether a serialized module may hold a collective. Cheap; sometimes True without one."""
    return _COLLECTIVE_FIELD.search(data) is not None


# --- shapes ---


def array_shape(
    element_type: int, dims: Sequence[int], layout: Sequence[int] | None = None
) -> Shape:
    """A dense array; `layout` is minor to major, by default row-major."""
    minor_to_major = range(len(dims) - 1, -1, -1) if layout is None else layout
    return pb.ShapeProto(
        element_type=pb.PrimitiveType.Name(element_type),
        dimensions=dims,
        is_dynamic_dimension=[False] * len(dims),
        layout=pb.LayoutProto(minor_to_major=minor_to_major),
    )


def tuple_shape(shapes: Sequence[Shape]) -> Shape:
    """A tuple of shapes."""
    return pb.ShapeProto(element_type="TUPLE", tuple_shapes=shapes)


def device_list(groups: Iterable[Iterable[int]]) -> pb.CollectiveDeviceListProto:
    """The groups of a collective."""
    return pb.CollectiveDeviceListProto(
        replica_groups=[pb.ReplicaGroup(replica_ids=group) for group in groups]
    )


def with_type(shape: Shape, element_type: int) -> Shape:
    """The shape with another element type, of one byte or more."""
    return array_shape(element_type, shape.dimensions, shape.layout.minor_to_major)


def num_elements(shape: Shape) -> int:
    """Elements of an array."""
    return math.prod(shape.dimensions)


def num_bytes(shape: Shape) -> int:
    """Bytes of a dense array of a type of 8 bits or more."""
    return num_elements(shape) * bit_width(shape.element_type) // 8


def is_row_major(shape: Shape) -> bool:
    """Whether the last dimension of an array is contiguous, then the one before it, …"""
    layout = shape.layout.minor_to_major
    return all(dim == len(layout) - 1 - i for i, dim in enumerate(layout))


def shape_text(shape: Shape) -> str:
    """An array as HLO prints it, with the layout if that is not row-major: `f32[2,3]{0,1}`."""
    layout = ",".join(map(str, shape.layout.minor_to_major))
    return dimensions_text(shape) + ("" if is_row_major(shape) else f"{{{layout}}}")


def dimensions_text(shape: Shape) -> str:
    """Type and dimensions of an array: `f32[2,3]`."""
    dims = ",".join(map(str, shape.dimensions))
    return f"{pb.PrimitiveType.Name(shape.element_type).lower()}[{dims}]"


# --- the module ---


@dataclasses.dataclass(frozen=True)
class Call:
    """A use of a computation: an instruction of another one."""

    computation: "Computation"
    instruction: Instruction


_Links = dict[int, list[Instruction]] | None


def _link(links: _Links, instruction: Instruction, ids: Iterable[int]) -> None:
    if links is not None:
        for i in set(ids):
            links.setdefault(i, []).append(instruction)


def _unlink(links: _Links, instruction: Instruction, ids: Iterable[int]) -> None:
    if links is not None:
        for i in set(ids):
            links[i] = [other for other in links[i] if other.id != instruction.id]


class Computation:
    """One computation. New instructions become part of the module by `commit`."""

    def __init__(self, module: "Module", proto: pb.HloComputationProto):
        self.module = module
        self.proto = proto
        self._by_id = {i.id: i for i in proto.instructions}  # in their order
        self._next_id = max(self._by_id, default=(proto.id << _ID_BITS) - 1) + 1
        self._shared: dict[Hashable, Instruction] = {}
        self._users: _Links = None  # by operand; None until it is asked for
        self._successors: dict[int, int] = {}  # for removed instructions, until `sort`
        self._changed = False

    @property
    def id(self) -> int:
        """Id of the computation."""
        return self.proto.id

    @property
    def instructions(self) -> list[Instruction]:
        """All instructions; new ones are last until `sort`."""
        return list(self._by_id.values())

    @property
    def root(self) -> Instruction:
        """Root of the computation: its value is the result."""
        return self._by_id[self.proto.root_id]

    def __getitem__(self, instruction_id: int) -> Instruction:
        return self._by_id[instruction_id]

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The operands of an instruction."""
        return [self._by_id[i] for i in instruction.operand_ids]

    def called(self, instruction: Instruction) -> list["Computation"]:
        """The computations that an instruction calls."""
        return [self.module.computations[i] for i in instruction.called_computation_ids]

    def predecessors(self, instruction: Instruction) -> Iterator[Instruction]:
        """Instructions that must precede an instruction: operands and control predecessors."""
        ids = itertools.chain(instruction.operand_ids, instruction.control_predecessor_ids)
        return (self._by_id[i] for i in ids)

    def add(
        self,
        opcode: str,
        shape: Shape,
        operands: Sequence[Instruction] = (),
        like: Instruction | None = None,
        stem: str = "",
        **fields: Any,
    ) -> Instruction:
        """Adds an instruction; it gets the metadata of `like`, its place in the user's program."""
        new = pb.HloInstructionProto(
            name=self.module.unique_name(stem or opcode),
            opcode=opcode,
            shape=shape,
            id=self._next_id,
            operand_ids=[o.id for o in operands],
            metadata=like.metadata if like else None,
            **fields,
        )
        self._next_id += 1
        self._by_id[new.id] = new
        self._changed = True
        _link(self._users, new, new.operand_ids)
        return new

    def add_copy(self, original: Instruction, operands: Sequence[Instruction]) -> Instruction:
        """Adds an instruction like one of any computation, with other operands.

        A collective gets a channel of its own. The computations that it calls are shared.
        """
        new = self.add(original.opcode, original.shape, operands)
        own = {"name": new.name, "id": new.id, "operand_ids": list(new.operand_ids)}
        new.CopyFrom(original)
        new.name, new.id = own["name"], own["id"]
        new.operand_ids[:] = own["operand_ids"]
        new.ClearField("control_predecessor_ids")
        if original.channel_id:
            new.channel_id = self.module.new_channel_id()
        return new

    def rewrite(
        self, old: Instruction, opcode: str, operands: Sequence[Instruction], **fields: Any
    ) -> Instruction:
        """Sets opcode, shape and operands; users, name and control predecessors stay."""
        new = pb.HloInstructionProto(
            name=old.name,
            opcode=opcode,
            shape=fields.pop("shape", old.shape),
            id=old.id,
            operand_ids=[o.id for o in operands],
            control_predecessor_ids=old.control_predecessor_ids,
            metadata=old.metadata,
            **fields,
        )
        _unlink(self._users, old, old.operand_ids)
        old.CopyFrom(new)
        self._changed = True
        _link(self._users, old, old.operand_ids)
        return old

    def set_operand(self, instruction: Instruction, place: int, operand: Instruction) -> None:
        """Gives an instruction another operand."""
        _unlink(self._users, instruction, instruction.operand_ids)
        instruction.operand_ids[place] = operand.id
        _link(self._users, instruction, instruction.operand_ids)
        self._changed = True

    def shared(self, key: Hashable, build: Callable[[], Instruction]) -> Instruction:
        """The instruction that `build` adds; one for each key."""
        if key not in self._shared:
            self._shared[key] = build()
        return self._shared[key]

    def users(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that have this one as an operand."""
        if self._users is None:
            self._users = {}
            for user in self.instructions:
                _link(self._users, user, user.operand_ids)
        return list(self._users.get(instruction.id, ()))

    def hide(self, instruction: Instruction, shape: Shape | None = None) -> None:
        """Puts a barrier behind an instruction, so that no rewrite of its users sees it.

        The barrier has the given shape, by default the instruction's.
        """
        users = self.users(instruction)
        barrier = self.add("opt-barrier", shape or instruction.shape, [instruction])
        for user in users:
            user.operand_ids[:] = [
                barrier.id if i == instruction.id else i for i in user.operand_ids
            ]
        self._users = None

    def remove(self, instruction: Instruction, successor: Instruction) -> None:
        """Removes an unused instruction; `successor` replaces it as a control predecessor."""
        del self._by_id[instruction.id]
        self._successors[instruction.id] = successor.id
        _unlink(self._users, instruction, instruction.operand_ids)
        self._changed = True

    def add_control_predecessor(self, instruction: Instruction, predecessor: Instruction) -> None:
        """Makes an instruction wait for another one."""
        self.set_control_predecessors(
            instruction, [*instruction.control_predecessor_ids, predecessor.id]
        )

    def set_control_predecessors(self, instruction: Instruction, ids: Iterable[int]) -> None:
        """Makes an instruction wait for these, beside its operands."""
        instruction.control_predecessor_ids[:] = ids
        self._changed = True

    def replace(self, old: Instruction, new: Instruction) -> None:
        """Overwrites `old` with `new`, which has the same id; users of `old` now use `new`."""
        old.CopyFrom(new)
        self._users, self._changed = None, True

    def reshape(self, instruction: Instruction, shape: Shape) -> None:
        """Gives an instruction another shape."""
        instruction.shape.CopyFrom(shape)
        self._changed = True

    def commit(self) -> None:
        """Writes the instructions into the module, predecessors first, otherwise in their order."""
        if not self._changed:
            return
        self.sort()
        del self.proto.instructions[:]
        self.proto.instructions.extend(self.instructions)
        self._by_id = {i.id: i for i in self.proto.instructions}
        self._users, self._changed = None, False

    def sort(self) -> None:
        """Puts predecessors first; otherwise keeps the order."""
        for instruction in self._by_id.values() if self._successors else ():
            if not self._successors.keys().isdisjoint(instruction.control_predecessor_ids):
                ids = dict.fromkeys(map(self._present, instruction.control_predecessor_ids))
                instruction.control_predecessor_ids[:] = [i for i in ids if i != instruction.id]
        self._successors.clear()
        done: dict[int, Instruction] = {}
        for start in self._by_id:
            # Stack of instructions, each with the operands that were not visited yet.
            path = {} if start in done else {start: self._waited_for(start, done)}
            while path:
                top, waited_for = next(reversed(path.items()))
                waiting = next(waited_for, None)
                if waiting is None:
                    del path[top]
                    done[top] = self._by_id[top]
                elif waiting in path:
                    name = self._by_id[waiting].name
                    raise JaxhetError(f"{name} of {self.proto.name} waits for itself")
                else:
                    path[waiting] = self._waited_for(waiting, done)
        self._by_id = done

    def _present(self, instruction_id: int) -> int:
        """The instruction that took the place of a removed one, or the instruction itself."""
        while instruction_id in self._successors:
            instruction_id = self._successors[instruction_id]
        return instruction_id

    def _waited_for(self, instruction_id: int, done: Container[int]) -> Iterator[int]:
        """Yields predecessors of an instruction, but not those that are `done` by then."""
        instruction = self._by_id[instruction_id]
        ids = itertools.chain(instruction.operand_ids, instruction.control_predecessor_ids)
        return itertools.filterfalse(done.__contains__, ids)


class Module:
    """A module, parsed."""

    def __init__(self, data: bytes):
        self.proto = pb.HloModuleProto.FromString(data)
        self.computations = {c.id: Computation(self, c) for c in self.proto.computations}
        self._next_name = itertools.count(self._last_number() + 1)
        self._next_computation = max(self.computations, default=0) + 1
        channels = (i.channel_id for c in self.computations.values() for i in c.instructions)
        self._next_channel = max(channels, default=0) + 1
        self._new: list[Computation] = []

    @property
    def entry(self) -> Computation:
        """The entry computation."""
        return self.computations[self.proto.entry_computation_id]

    @functools.cached_property
    def callers(self) -> dict[int, list[Call]]:
        """Computation id to its uses."""
        callers: dict[int, list[Call]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for called in instruction.called_computation_ids:
                    callers.setdefault(called, []).append(Call(computation, instruction))
        return callers

    def _last_number(self) -> int:
        """The largest number in a name that an earlier pass gave."""
        names = (i.name for c in self.computations.values() for i in c.instructions)
        return max((int(n.rpartition(".")[2]) for n in names if _OWN_NAME.match(n)), default=-1)

    def unique_name(self, stem: str) -> str:
        """A name that no instruction or computation of XLA has."""
        return f"jaxhet.{stem}.{next(self._next_name)}"

    def new_channel_id(self) -> int:
        """A channel id that no instruction has."""
        self._next_channel += 1
        return self._next_channel - 1

    def add_computation(
        self, stem: str, build: Callable[[Computation], Instruction], is_fusion: bool = False
    ) -> Computation:
        """Adds a computation; `build` adds its instructions and returns the root."""
        proto = pb.HloComputationProto(
            name=self.unique_name(stem), id=self._next_computation, is_fusion_computation=is_fusion
        )
        self._next_computation += 1
        computation = Computation(self, proto)
        root = build(computation)
        proto.root_id = root.id
        parameters = [i for i in computation.instructions if i.opcode == "parameter"]
        proto.program_shape.parameters.extend(p.shape for p in parameters)
        proto.program_shape.parameter_names.extend(p.name for p in parameters)
        proto.program_shape.result.CopyFrom(root.shape)
        computation.commit()
        self._new.append(computation)
        self.computations[computation.id] = computation
        return computation

    def copy_computation(self, original: Computation) -> Computation:
        """Adds a computation like another one; its collectives have channels of their own."""
        place = [c.id for c in self.proto.computations].index(original.id)
        self.proto.computations.insert(place, original.proto)
        proto = self.proto.computations[place]
        proto.name, proto.id = self.unique_name(original.proto.name), self._next_computation
        self._next_computation += 1
        del proto.instructions[:]
        copy = self.computations[proto.id] = Computation(self, proto)
        copies: dict[int, Instruction] = {}
        for i in original.instructions:
            copies[i.id] = copy.add_copy(i, [copies[o] for o in i.operand_ids])
            before = [copies[p].id for p in i.control_predecessor_ids]
            copy.set_control_predecessors(copies[i.id], before)
        proto.root_id = copies[original.proto.root_id].id
        copy.commit()
        return copy

    def remove_computation(self, computation: Computation) -> None:
        """Removes a computation that has no caller any more."""
        del self.computations[computation.id]
        place = [c.id for c in self.proto.computations].index(computation.id)
        del self.proto.computations[place]

    def serialize(self) -> bytes:
        """The module with all changes; callees stay before their callers."""
        for computation in self.computations.values():
            computation.commit()
        for computation in reversed(self._new):
            self.proto.computations.insert(0, computation.proto)
        self._new.clear()
        return self.proto.SerializeToString()

    def location(self, instruction: Instruction, path: str = "") -> str:
        """The user's op name and source line, as far as the module knows them.

        Args:
          instruction: An instruction of the module.
          path: The op name to show, if it is not the instruction's.
        """
        file, line = self._source(instruction)
        source = f"{'/'.join(pathlib.PurePath(file).parts[-2:])}:{line}" if file else ""
        name = path or instruction.metadata.op_name
        return " ".join(filter(None, (name, source))) or instruction.name

    def _source(self, instruction: Instruction) -> tuple[str, int]:
        """File and line; "" and 0 if unknown."""
        metadata, index = instruction.metadata, self.proto.stack_frame_index
        if metadata.source_file or not metadata.stack_frame_id:
            return metadata.source_file, metadata.source_line
        frame = index.stack_frames[metadata.stack_frame_id - 1]
        place = index.file_locations[frame.file_location_id - 1]
        return index.file_names[place.file_name_id - 1], place.line
