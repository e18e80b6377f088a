"""The form for GPUs: before XLA's layout and fusion.

An exchange is a carrier's start and done. Arithmetic is plain; XLA fuses it with its surroundings.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, override

from jaxhet.compiler import arithmetic, carrier, hlo
from jaxhet.compiler import groups as groups_lib
from jaxhet.compiler import proto as pb
from jaxhet.compiler.arithmetic import Body
from jaxhet.compiler.exchange import ExchangeKind
from jaxhet.compiler.groups import Groups
from jaxhet.compiler.hlo import Instruction, Shape
from jaxhet.compiler.lowering import Lowering, Rows, Unpack, Value, present_rows

_MOST_PARTS = 8  # each costs some microseconds
_PART_MULTIPLE = 128  # elements, for kernels that read several at once


class GpuLowering(Lowering):
    """See `Lowering`."""

    reshape_opcode = "reshape"

    @override
    def flat(self, x: Instruction) -> Instruction:
        return self.shaped(x, [hlo.num_elements(x.shape)])

    @override
    def unflat(self, x: Instruction, shape: Shape) -> Instruction:
        return self.c.add(self.reshape_opcode, shape, [x])

    @override
    def loop(self, xs: Sequence[Instruction], body: Body) -> Instruction:
        return body(self.c, *xs)

    @override
    def bundles(self, values: Sequence[Value]) -> list[Sequence[Value]]:
        return [[value] for value in values]

    @override
    def pack(self, values: Sequence[Value]) -> tuple[Sequence[Value], Unpack]:
        """Small values of one type in one."""
        num_bytes = sum(hlo.num_bytes(v.x.shape) for v in values)
        if len(values) == 1 or num_bytes > self.options.bucket_bytes:
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
                    unpacked[i] = values[i].with_array(
                        arithmetic.slice_1d(self.c, result.x, start, size)
                    )
                    start += size
            return unpacked

        return [
            Value(
                arithmetic.concatenate(self.c, [values[i].x for i in members]),
                element_type,
                tuple(operand for i in members for operand in values[i].operands),
            )
            for (_, element_type), members in packs.items()
        ], unpack

    @override
    def all_reduce(self, values: Sequence[Value], groups: Groups, opcode: str) -> list[Value]:
        def lower(own: Value) -> Value:
            if len(groups[0]) == 2 and groups_lib.are_equal(groups):  # x + y = y + x, to the bit
                pairs = groups_lib.both_ways(groups)
                if (size := self._part_size(own)) < own.size:
                    return self._combined_in_parts(own, pairs, opcode, size)
                (other,) = self.permute([own], pairs)
                return self._combined([own.x, other.x], own, opcode)
            received = self._carried(ExchangeKind.ALL_GATHER, own, groups, skips_own=True)
            rows = self._with_own(own.x, received.x, groups)
            return self._combined(rows, own, opcode, present_rows(self, groups))

        return [lower(self._fixed(value)) for value in values]

    def _part_size(self, value: Value) -> int:
        """Number of elements in each part of a value except the last part."""
        part_bytes = self.options.part_bytes
        most = hlo.num_bytes(value.x.shape) // part_bytes if part_bytes else 1
        size = -(-value.size // min(max(most, 1), _MOST_PARTS))
        return -(-size // _PART_MULTIPLE) * _PART_MULTIPLE

    def _combined_in_parts(self, own: Value, pairs: Groups, opcode: str, size: int) -> Value:
        """Stores each part in its place in the result as soon as it has arrived."""
        c, received = self.c, self._carried(ExchangeKind.PERMUTE, own, pairs, part_elements=size).x
        result = arithmetic.uninitialized(c, own.x.shape)
        for start in range(0, own.size, size):
            if start > 0:
                received, result = self._next_part(received, result)
            length = min(size, own.size - start)
            rows = [arithmetic.slice_1d(c, x, start, length) for x in (own.x, received)]
            part = arithmetic.combine(c, rows, opcode, own.element_type)
            result = arithmetic.with_part_1d(c, result, part, start)
        return self._fixed(own.with_array(result))

    @override
    def reduce_scatter(self, values: Sequence[Value], groups: Groups, opcode: str) -> list[Value]:
        indices = self.collective.index_in_group(groups)

        def lower(value: Value) -> Value:
            size = value.size // len(groups[0])
            received = self._carried(ExchangeKind.ALL_TO_ALL, value, groups, skips_own=True)
            own = self._slice(value.x, [index * size for index in indices], size)
            if len(groups[0]) == 2:
                other = self._slice(received.x, [(1 - index) * size for index in indices], size)
                return self._combined([own, other], value, opcode)
            return self._combined(self._with_own(own, received.x, groups), value, opcode)

        return [lower(self._fixed(value)) for value in values]

    def _slice(self, x: Instruction, starts: Sequence[int], size: int) -> Instruction:
        """`size` elements of x, from the entry of `starts` at the device's logical id."""
        start = arithmetic.entry(self.c, starts, self._logical_id())
        return arithmetic.dynamic_slice_1d(self.c, x, start, size)

    def _with_own(
        self, own: Instruction, received: Instruction, groups: Groups
    ) -> list[Instruction]:
        """The rows in group order: the received ones, and the device's own one."""
        size, indices = hlo.num_elements(own.shape), self.collective.index_in_group(groups)
        return [
            arithmetic.select(
                self.c,
                [self._entry_is(indices, i, own.shape)],
                [arithmetic.slice_1d(self.c, received, i * size, size), own],
            )
            for i in range(groups_lib.largest(groups))
        ]

    def _combined(
        self,
        rows: Sequence[Instruction],
        like: Value,
        opcode: str,
        present: Sequence[Instruction] = (),
    ) -> Value:
        combined = like.with_array(
            arithmetic.combine(self.c, rows, opcode, like.element_type, present)
        )
        is_rounded = arithmetic.summed_type(like.element_type) != combined.x.shape.element_type
        return self._fixed(combined) if is_rounded or opcode == "multiply" else combined

    def _fixed(self, value: Value) -> Value:
        # XLA may contract x's product with the sum, and skip the rounding of a value that it fuses
        # with its user. The rank that sent x, or a rank whose compiler did neither, has other bits.
        return value.with_array(barrier(self.c, value.x))

    @override
    def all_gather(self, values: Sequence[Value], groups: Groups) -> list[Rows]:
        return [self._rows(ExchangeKind.ALL_GATHER, value, groups) for value in values]

    @override
    def all_to_all(self, values: Sequence[Value], groups: Groups) -> list[Rows]:
        return [self._rows(ExchangeKind.ALL_TO_ALL, value, groups) for value in values]

    def _rows(self, kind: ExchangeKind, value: Value, groups: Groups) -> Rows:
        received = self._carried(kind, value, groups)
        return Rows(self, received, groups_lib.largest(groups), present_rows(self, groups))

    def _carried(
        self,
        kind: ExchangeKind,
        value: Value,
        groups: Groups,
        skips_own: bool = False,
        part_elements: int = 0,
    ) -> Value:
        """Adds a carrier, and returns the result of an exchange of a value.

        Args:
          kind: Pattern of its movement.
          value: The value.
          groups: Indices of `Collective.rank_of`; for a permute, pairs of source and target. The
            result has a row for each member of the largest group, or more; rows without a member
            are undefined.
          skips_own: Leaves the device's own row of the result undefined.
          part_elements: Size of the parts that a permute is split into. The result waits for the
            first part; call `_next_part` for each of the others.
        """
        x = value.x
        result, size = x.shape, groups_lib.largest(groups)
        fields: dict[str, Any]
        if kind == ExchangeKind.ALL_GATHER and self.half is None:
            # XLA wants groups of equal size; the engine moves what the groups themselves say.
            carriers = groups_lib.covering(groups, len(self.collective.rank_of))
            size = len(carriers[0])
            result = hlo.array_shape(x.shape.element_type, [value.size * size])
            opcode = "all-gather-start"
            fields = {
                "dimensions": [0],
                "use_global_device_ids": True,
                "collective_device_list": hlo.device_list(carriers),
            }
        else:  # XLA sees the part of an all-to-all that is sent to the next member
            pairs = groups if kind == ExchangeKind.PERMUTE else _each_to_next(groups)
            if self.half is not None:
                pairs = self.collective.groups  # the program's pairs
            opcode = "collective-permute-start"
            fields = {
                "source_target_pairs": [pb.SourceTarget(source=s, target=t) for s, t in pairs]
            }
        add, like, name = self.c.add, self.instruction, kind.name.lower()
        fields["channel_id"] = self.c.module.new_channel_id()
        both = hlo.tuple_shape([x.shape, result])
        start = add(opcode, both, [x], like=like, stem=f"start.{name}", **fields)
        done = add(carrier.CARRIERS[opcode], result, [start], like=like, stem=f"done.{name}")
        exchange = self.exchange(start, kind, [value], groups, size)
        movement = dataclasses.replace(
            exchange.spec.movement,
            skips_own=skips_own,
            part_bytes=part_elements * hlo.bit_width(x.shape.element_type) // 8,
        )
        spec = dataclasses.replace(exchange.spec, movement=movement)
        self.added.append(dataclasses.replace(exchange, spec=spec, done=done))
        return value.with_array(done)

    def _next_part(self, received: Instruction, other: Instruction) -> list[Instruction]:
        """Waits for the next part of the latest exchange; `received` holds the parts before it.

        Returns both arrays again. Instructions that use these results run after the wait.
        """
        operands = [received, other]
        shapes = [x.shape for x in operands]
        part = self.c.add(
            "custom-call",
            hlo.tuple_shape(shapes),
            operands,
            like=self.instruction,
            stem="part",
            **carrier.call_fields(carrier.PART_TARGET, operands),
        )
        for i in range(len(operands)):
            part.output_operand_aliasing.add(output_shape_index=[i], operand_index=i)
        self.added[-1].parts.append(part)
        return [
            self.c.add("get-tuple-element", shape, [part], tuple_index=i)
            for i, shape in enumerate(shapes)
        ]

    @override
    def exchanged(self, kind: ExchangeKind, value: Value, groups: Groups) -> Value:
        return self._carried(kind, value, groups)

    @override
    def permute(self, values: Sequence[Value], pairs: Groups) -> list[Value]:
        """Exchanges all pairs, also those on one island: see `collectives.crossing`."""
        moving = tuple(pair for pair in pairs if pair[0] != pair[1])
        staying = {source for source, target in pairs if source == target}

        def move(value: Value) -> Value:
            result = self._carried(ExchangeKind.PERMUTE, value, moving)
            return self.at(staying, value, result) if staying else result

        return [move(value) for value in values]

    def at(self, logical_ids: set[int], there: Value, elsewhere: Value) -> Value:
        """One value on the devices with these logical ids, another one on the others."""
        is_there = [int(i in logical_ids) for i in range(len(self.collective.rank_of))]
        mask = self._entry_is(is_there, 1, there.x.shape)
        return there.with_array(arithmetic.select(self.c, [mask], [elsewhere.x, there.x]))

    def _entry_is(self, table: Sequence[int], number: int, shape: Shape) -> Instruction:
        """Whether the entry of `table` at the device's logical id is `number`, in each element."""
        own = arithmetic.entry(self.c, table, self._logical_id())
        return arithmetic.equals(self.c, own, number, shape)

    def _logical_id(self) -> Instruction:
        return arithmetic.own_logical_id(self.c)


def _each_to_next(groups: Groups) -> Groups:
    """Each member, and the one after it."""
    return tuple(
        pair for group in groups for pair in zip(group, (*group[1:], group[0]), strict=True)
    )


def barrier(c: hlo.Computation, x: Instruction) -> Instruction:
    """x, fixed: XLA does not compute it in another way for one of its users."""
    return c.add("opt-barrier", x.shape, [x])
