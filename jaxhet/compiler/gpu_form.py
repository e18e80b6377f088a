"""The form for GPUs: before XLA's layout and fusion.

An exchange is a pair of permute start and done for each distance between two members of a group.
Arithmetic is plain; XLA fuses it with what is around it.
"""

import dataclasses
from collections.abc import Sequence
from typing import override

from jaxhet.compiler import arithmetic, hlo
from jaxhet.compiler import hlo_pb2 as pb
from jaxhet.compiler.arithmetic import Body
from jaxhet.compiler.groups import Groups
from jaxhet.compiler.hlo import Instruction, Shape
from jaxhet.compiler.lowering import Lowering, Rows, Unpack, Value


class GpuLowering(Lowering):
    """See `Lowering`."""

    @property
    @override
    def reshape_opcode(self) -> str:
        return "reshape"

    @override
    def order(self, shape: Shape) -> list[int]:
        return list(range(len(shape.dimensions)))

    @override
    def loop(self, xs: Sequence[Instruction], body: Body) -> Instruction:
        return body(self.c, *xs)

    @override
    def operand(self, x: Instruction, is_exchanged: bool) -> Value:
        return self.flatten(x)

    @override
    def bundles(self, values: Sequence[Value]) -> list[Sequence[Value]]:
        return [[value] for value in values]

    @override
    def pack(self, values: Sequence[Value]) -> tuple[Sequence[Value], Unpack]:
        """Small values of one type in one."""
        num_bytes = sum(hlo.num_bytes(v.x.shape) for v in values)
        if len(values) == 1 or num_bytes > self.adder.options.bucket_bytes:
            return values, list
        packs: dict[tuple[int, int], list[int]] = {}
        for i, value in enumerate(values):
            packs.setdefault((value.x.shape.element_type, value.element_type), []).append(i)

        def unpack(results: Sequence[Value]) -> list[Value]:
            unpacked = list(values)
            for result, members in zip(results, packs.values(), strict=True):
                start = 0
                for i in members:
                    size = values[i].size
                    unpacked[i] = values[i].by(arithmetic.slice_1d(self.c, result.x, start, size))
                    start += size
            return unpacked

        return [
            Value(
                arithmetic.concatenate(self.c, [values[i].x for i in members]),
                element_type,
                len(members),
            )
            for (_, element_type), members in packs.items()
        ], unpack

    @override
    def all_reduce(self, values: Sequence[Value], groups: Groups, opcode: str) -> list[Value]:
        rows = self.all_gather([self._fixed(v) for v in values], groups)
        return [row.combined(opcode) for row in rows]

    @override
    def reduce_scatter(self, values: Sequence[Value], groups: Groups, opcode: str) -> list[Value]:
        rows = self.all_to_all([self._fixed(v) for v in values], groups)
        return [row.combined(opcode) for row in rows]

    def _fixed(self, value: Value) -> Value:
        # XLA may contract x's product with the sum, and skip the rounding of a value that it fuses
        # with its user. Then ranks differ: who sent x, and whoever's compiler did neither.
        return value.by(barrier(self.c, value.x))

    @override
    def all_gather(self, values: Sequence[Value], groups: Groups) -> list[Rows]:
        return [self._gather(value, groups) for value in values]

    def _gather(self, value: Value, groups: Groups) -> Rows:
        others = [self._shift(value, groups, shift) for shift in range(1, len(groups[0]))]
        return _ShiftedRows(self, [value, *others], groups)

    @override
    def all_to_all(self, values: Sequence[Value], groups: Groups) -> list[Rows]:
        return [self._exchange(value, groups) for value in values]

    def _exchange(self, value: Value, groups: Groups) -> Rows:
        count = len(groups[0])
        size = value.size // count

        def block(shift: int) -> Value:
            starts = [(place + shift) % count * size for place in self.collective.places(groups)]
            return value.by(self.own_slice(value.x, starts, size))

        others = [self._shift(block(shift), groups, shift) for shift in range(1, count)]
        return _ShiftedRows(self, [block(0), *others], groups)

    def _shift(self, value: Value, groups: Groups, shift: int) -> Value:
        """Each member sends to the one `shift` places on."""
        pairs = tuple(
            (source, group[(i + shift) % len(group)])
            for group in groups
            for i, source in enumerate(group)
        )
        return self.permute([value], pairs)[0]

    @override
    def permute(self, values: Sequence[Value], pairs: Groups) -> list[Value]:
        return [v.by(self.adder.permute(v.x, pairs, v.num_operands)) for v in values]

    @override
    def local_all_to_all(self, value: Value, groups: Groups) -> Value:
        return self.local("all-to-all", value, value.size, groups)

    def local_permute(self, value: Value, pairs: Groups) -> Value:
        """A permute of XLA."""
        return value.by(
            self.c.add(
                "collective-permute",
                value.x.shape,
                [value.x],
                like=self.instruction,
                channel_id=self.c.module.new_channel_id() if self.instruction.channel_id else None,
                source_target_pairs=[pb.SourceTarget(source=s, target=t) for s, t in pairs],
            )
        )

    def own_entry(self, table: Sequence[int]) -> Instruction:
        """The entry of a table at the device's position."""
        position = arithmetic.own_position(self.c, self.collective.num_partitions)
        return arithmetic.entry(self.c, table, position)

    def own_slice(self, x: Instruction, starts: Sequence[int], size: int) -> Instruction:
        """`size` elements of x, from the entry of `starts` at the device's position."""
        return arithmetic.dynamic_slice_1d(self.c, x, self.own_entry(starts), size)

    def is_at(self, places: Sequence[int], place: int, shape: Shape) -> Instruction:
        """Whether the entry of `places` at the device's position is `place`, in each element."""
        return arithmetic.equals(self.c, self.own_entry(places), place, shape)


@dataclasses.dataclass(frozen=True)
class _ShiftedRows:
    """`by_shift[s]` is the row of the member s places before this one."""

    lowering: GpuLowering
    by_shift: list[Value]
    groups: Groups

    def joined(self) -> Value:
        own, *others = self.by_shift
        if not others:
            return own
        # From the member after this one to this one, and on: all turns of the order are in there.
        turn = [v.x for v in (*reversed(others), own)]
        both = arithmetic.concatenate(self.lowering.c, turn + turn[:-1])
        places = self.lowering.collective.places(self.groups)
        starts = [(len(others) - place) * own.size for place in places]
        return own.by(self.lowering.own_slice(both, starts, own.size * len(turn)))

    def combined(self, opcode: str) -> Value:
        own = self.by_shift[0]
        c = self.lowering.c
        x = arithmetic.combine(c, self._in_order(), opcode, own.element_type)
        is_rounded = arithmetic.summed_type(own.element_type) != own.x.shape.element_type
        return own.by(barrier(c, x) if is_rounded or opcode == "multiply" else x)

    def _in_order(self) -> list[Instruction]:
        by_shift = [v.x for v in self.by_shift]
        size = len(by_shift)
        if size == 2:  # x + y = y + x, to the bit
            return by_shift
        lowering, shape = self.lowering, by_shift[0].shape
        places = lowering.collective.places(self.groups)
        masks = [lowering.is_at(places, i, shape) for i in range(1, size)]
        return [
            arithmetic.select(
                lowering.c, masks, [by_shift[(i - place) % size] for i in range(size)]
            )
            for place in range(size)
        ]


def barrier(c: hlo.Computation, x: Instruction) -> Instruction:
    """x, fixed: XLA does not compute it in another way for one of its users."""
    return c.add("opt-barrier", x.shape, [x])
