"""The form for CPUs: after XLA's own layout and fusion.

An exchange is one call of the engine. Arithmetic is loop fusions, and bitcasts change shapes.
"""

import dataclasses
from collections.abc import Sequence
from typing import override

from jaxhet.compiler import arithmetic, carrier, hlo, reorder
from jaxhet.compiler import groups as groups_lib
from jaxhet.compiler.arithmetic import Body
from jaxhet.compiler.exchange import ExchangeKind
from jaxhet.compiler.groups import Groups
from jaxhet.compiler.hlo import Instruction, Shape
from jaxhet.compiler.lowering import Lowering, Rows, Value, present_rows

_MOST_ENCODED_BYTES = 32 << 20  # with less, the round trip takes as long as the bytes


@dataclasses.dataclass(frozen=True)
class CpuLowering(Lowering):
    """See `Lowering`."""

    reshape_opcode = "bitcast"

    @override
    def flat(self, x: Instruction) -> Instruction:
        order = _slowest_first(x.shape)
        y = self.shaped(x, [hlo.num_elements(x.shape)])  # in the order of memory
        dims = [x.shape.dimensions[d] for d in order]
        return self._moved(y, dims, [order.index(d) for d in range(len(order))])

    @override
    def unflat(self, x: Instruction, shape: Shape) -> Instruction:
        x = self._moved(x, shape.dimensions, _slowest_first(shape))
        return self.c.add("bitcast", shape, [x])

    def _moved(
        self, x: Instruction, dims: Sequence[int], permutation: Sequence[int]
    ) -> Instruction:
        return reorder.transposed(self, Value(x, x.shape.element_type, ()), dims, permutation).x

    @override
    def loop(self, xs: Sequence[Instruction], body: Body) -> Instruction:
        return arithmetic.loop_fusion(self.c, xs, body)

    @override
    def bundles(self, values: Sequence[Value]) -> list[Sequence[Value]]:
        """Many bytes of compressed sums in several: one is encoded while another one moves."""
        if not self.codec or self.instruction.opcode != "all-reduce":
            return [values]
        bundles: list[list[Value]] = [[]]
        for value in values:
            num_bytes = sum(hlo.num_bytes(v.x.shape) for v in [*bundles[-1], value])
            if bundles[-1] and num_bytes > _MOST_ENCODED_BYTES:
                bundles.append([])
            bundles[-1].append(value)
        return list(bundles)

    @override
    def all_reduce(self, values: Sequence[Value], groups: Groups, opcode: str) -> list[Value]:
        """Small payloads: one all-gather and local sums. Two ranks: one permute and a sum.

        Otherwise a reduce-scatter, then an all-gather. Groups of unequal size always use the
        all-gather, since their shards would have unequal sizes.
        """
        num_bytes = sum(hlo.num_bytes(v.x.shape) for v in values)
        is_small = num_bytes <= self.options.two_shot_bytes
        if is_small or not groups_lib.are_equal(groups):
            return [rows.combined(opcode) for rows in self.all_gather(values, groups)]
        if self._are_pairs(values, groups):
            return [rows.combined(opcode) for rows in self.gathered(values, groups)]
        sums = self.reduce_scatter(values, groups, opcode)
        sizes = [v.size for v in values]
        return self._call(ExchangeKind.ALL_GATHER, sums, sizes, groups)

    @override
    def reduce_scatter(self, values: Sequence[Value], groups: Groups, opcode: str) -> list[Value]:
        return [rows.combined(opcode) for rows in self.all_to_all(values, groups)]

    @override
    def all_gather(self, values: Sequence[Value], groups: Groups) -> list[Rows]:
        size = groups_lib.largest(groups)
        sizes = [v.size * size for v in values]
        rows = self._call(ExchangeKind.ALL_GATHER, values, sizes, groups)
        present = present_rows(self, groups)
        return [Rows(self, row, size, present) for row in rows]

    @override
    def gathered(self, values: Sequence[Value], groups: Groups) -> list[Rows]:
        """Two ranks: one permute. The sum reads the operand, so that nothing else overwrites it."""
        if not self._are_pairs(values, groups):
            return self.all_gather(values, groups)
        others = self.permute(values, groups_lib.both_ways(groups))
        is_second = self._is_second(groups)
        return [
            _Pair(self, other, 2, own=own.x, is_second=is_second)
            for own, other in zip(values, others, strict=True)
        ]

    @override
    def all_to_all(self, values: Sequence[Value], groups: Groups) -> list[Rows]:
        size = len(groups[0])
        sizes = [-(-v.size // size) * size for v in values]
        rows = self._call(ExchangeKind.ALL_TO_ALL, values, sizes, groups)
        return [Rows(self, row, size) for row in rows]

    @override
    def exchanged(self, kind: ExchangeKind, value: Value, groups: Groups) -> Value:
        (result,) = self._call(kind, [value], [value.size], groups)
        return result

    @override
    def permute(self, values: Sequence[Value], pairs: Groups) -> list[Value]:
        return self._call(ExchangeKind.PERMUTE, values, [v.size for v in values], pairs)

    def _call(
        self, kind: ExchangeKind, values: Sequence[Value], sizes: Sequence[int], groups: Groups
    ) -> list[Value]:
        """Adds one call of the engine; result i belongs to value i, and has `sizes[i]` elements.

        An all-gather's results have a row for each member of the largest group; rows without a
        member are undefined.
        """
        operands = [v.x for v in values]
        shapes = [
            hlo.array_shape(v.x.shape.element_type, [size])
            for v, size in zip(values, sizes, strict=True)
        ]
        single = len(shapes) == 1
        start = self.c.add(
            "custom-call",
            shapes[0] if single else hlo.tuple_shape(shapes),
            operands,
            like=self.instruction,
            stem=f"exchange.{kind.name.lower()}",
            **carrier.call_fields(carrier.EXCHANGE_TARGET, operands),
        )
        self.added.append(self.exchange(start, kind, values, groups, groups_lib.largest(groups)))
        results = [start] if single else self._elements(start, shapes)
        return [v.with_array(x) for v, x in zip(values, results, strict=True)]

    def _elements(self, x: Instruction, shapes: Sequence[Shape]) -> list[Instruction]:
        return [
            self.c.add("get-tuple-element", shape, [x], like=self.instruction, tuple_index=i)
            for i, shape in enumerate(shapes)
        ]

    def _are_pairs(self, values: Sequence[Value], groups: Groups) -> bool:
        is_complex = any(hlo.is_complex(v.x.shape.element_type) for v in values)
        are_two = groups_lib.are_equal(groups) and len(groups[0]) == 2
        return are_two and not is_complex  # complex numbers have several forms of NaN

    def _is_second(self, groups: Groups) -> Instruction:
        """Whether this device is the second one of its group of two; a scalar."""
        indices = self.collective.index_in_group(groups)
        own = arithmetic.own_logical_id(self.c)
        return self.loop([own], lambda c, own: arithmetic.entry_is(c, indices, own, 1))


def _slowest_first(shape: Shape) -> list[int]:
    """The dimensions of an array in the order of memory, the largest stride first."""
    return list(reversed(shape.layout.minor_to_major))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pair(Rows):
    """Rows of two devices: this device's is `own`, and the other device's is `joined`."""

    own: Instruction
    is_second: Instruction

    @property
    @override
    def arrays(self) -> list[Instruction]:
        return [self.own, self.joined.x, self.is_second]

    @override
    def parts(self, c: hlo.Computation, arrays: Sequence[Instruction]) -> list[Instruction]:
        own, other, is_second = arrays
        swap = arithmetic.broadcast(c, is_second, own.shape)
        return [
            arithmetic.select(c, [swap], [own, other]),
            arithmetic.select(c, [swap], [other, own]),
        ]
