"""An all-reduce over islands as exchanges and arithmetic.

flat          every rank of a group exchanges with every other one
hierarchical  reduce-scatter among the ranks of a group on one island, exchange over the rail,
              all-gather on the island

Either way the exchange leg combines the same rows in the same order on every rank (in order of the
group, or of the islands), so that results are equal to the bit. Between its first and last step all
values are one-dimensional: there, the layouts that two compilers choose can't differ.
"""

import dataclasses
from collections.abc import Sequence

from jaxhet.compiler import arithmetic, collectives, hlo
from jaxhet.compiler import groups as groups_lib
from jaxhet.compiler import hlo_pb2 as pb
from jaxhet.compiler.arithmetic import Body
from jaxhet.compiler.collectives import Collective
from jaxhet.compiler.exchange import Adder, Exchange, ExchangeKind
from jaxhet.compiler.groups import Groups
from jaxhet.compiler.hlo import Instruction
from jaxhet.compiler.options import Job, Options


def lower(collective: Collective, job: Job, options: Options, added: list[Exchange]) -> None:
    """Makes an all-reduce the last step of its decomposition; appends its exchanges to `added`."""
    computation, instruction = collective.computation, collective.instruction
    split, note = _choose(collective, job, options)
    opcode = collectives.reducer(computation.module, instruction)
    assert opcode is not None
    label = [collectives.reducer_name(opcode), "hierarchical" if split else "flat"]
    operands = computation.operands(instruction)
    if not job.is_gpu:  # there, layouts are final
        label += [hlo.shape_text(x.shape) for x in operands if not hlo.is_row_major(x.shape)]
    adder = Adder(collective, " ".join(label), note, job, options, added)
    lowering = (_GpuLowering if job.is_gpu else _CpuLowering)(collective, opcode, adder)
    values = [_Value(lowering.flatten(x), x.shape.element_type) for x in operands]
    lowering.finish(lowering.over_islands(values, split) if split else lowering.flat(values))


def _choose(
    collective: Collective, job: Job, options: Options
) -> tuple[groups_lib.Split | None, str]:
    """How to divide the groups for the hierarchical algorithm, or None and why it is flat."""
    if options.algorithm == "flat" or (options.algorithm == "auto" and not job.is_gpu):
        return None, ""
    split = groups_lib.split(collective.positions, collective.rank_of, job.islands)
    return (None, split) if isinstance(split, str) else (split, "")


@dataclasses.dataclass(frozen=True)
class _Value:
    """A one-dimensional array on its way, and the user's element type, to which sums round."""

    x: Instruction
    element_type: int

    @property
    def size(self) -> int:
        return hlo.num_elements(self.x.shape)

    def by(self, x: Instruction) -> "_Value":
        return _Value(x, self.element_type)


@dataclasses.dataclass(frozen=True)
class _Lowering:
    """The steps of a decomposition; what differs between platforms is in the subclasses."""

    collective: Collective
    opcode: str
    adder: Adder

    @property
    def c(self) -> hlo.Computation:
        return self.collective.computation

    @property
    def all_reduce(self) -> Instruction:
        return self.collective.instruction

    @property
    def reshape_opcode(self) -> str:
        """What gives elements another shape without moving them."""
        raise NotImplementedError

    def loop(self, x: Instruction, body: Body) -> Instruction:
        """Elementwise arithmetic, slices and pads of x."""
        raise NotImplementedError

    def exchange(self, values: Sequence[_Value], groups: Groups) -> list[_Value]:
        """Each of the values combined over the groups."""
        raise NotImplementedError

    def over_islands(self, values: Sequence[_Value], split: groups_lib.Split) -> list[_Value]:
        """Combines on each island, over the islands, and distributes the result on each."""
        raise NotImplementedError

    def flat(self, values: Sequence[_Value]) -> list[_Value]:
        """Combines over the whole groups at once."""
        return self.exchange(values, self.collective.positions)

    def flatten(self, x: Instruction) -> Instruction:
        """One dimension of a type that can travel."""
        carried = arithmetic.carried_type(x.shape.element_type)
        if carried != x.shape.element_type:
            x = self.loop(x, lambda c, x: arithmetic.convert(c, x, carried))
        shape = hlo.array_shape(carried, [hlo.num_elements(x.shape)])
        return self.c.add(self.reshape_opcode, shape, [x])

    def finish(self, values: Sequence[_Value]) -> None:
        """Gives the values the all-reduce's shapes and types, and puts them in its place."""
        is_tuple = self.all_reduce.shape.element_type == pb.TUPLE
        shapes = self.all_reduce.shape.tuple_shapes if is_tuple else [self.all_reduce.shape]
        results = [self._restore(v.x, s) for v, s in zip(values, shapes, strict=True)]
        self.c.rewrite(self.all_reduce, "tuple" if is_tuple else self.reshape_opcode, results)

    def _restore(self, x: Instruction, shape: hlo.Shape) -> Instruction:
        x = self.c.add(self.reshape_opcode, hlo.with_type(shape, x.shape.element_type), [x])
        if x.shape.element_type == shape.element_type:
            return x
        return self.loop(x, lambda c, x: arithmetic.convert(c, x, shape.element_type))

    def hierarchical(self, values: Sequence[_Value], split: groups_lib.Split) -> list[_Value]:
        """Combines values together, by the hierarchical algorithm."""
        local_size = len(split.local[0])
        if local_size == 1:
            return self.exchange(values, split.rails)
        first = len(self.adder.added)
        parts = [v.by(self._reduce_scatter(v, split.local)) for v in values]
        sums = self.exchange(parts, split.rails)
        wholes = [self._local("all-gather", v.x, v.size * local_size, split.local) for v in sums]
        exchange = self.adder.added[first]
        exchange.scatters.extend(part.x for part in parts)
        exchange.gathers.extend(wholes)
        return [v.by(self._cut(x, v.size)) for v, x in zip(values, wholes, strict=True)]

    def _reduce_scatter(self, value: _Value, groups: Groups) -> Instruction:
        """An equal part of the combined value; the last part is padded."""
        part_size = -(-value.size // len(groups[0]))
        padded_size = part_size * len(groups[0])
        x = value.x
        if padded_size != value.size:
            x = self.loop(x, lambda c, x: arithmetic.pad_1d(c, x, padded_size))
        reducer = arithmetic.reducer(self.c.module, self.opcode, x.shape.element_type)
        return self._local("reduce-scatter", x, part_size, groups, reducer.id)

    def _cut(self, x: Instruction, size: int) -> Instruction:
        if hlo.num_elements(x.shape) == size:
            return x
        return self.loop(x, lambda c, x: arithmetic.slice_1d(c, x, 0, size))

    def _local(
        self, opcode: str, x: Instruction, size: int, groups: Groups, *called: int
    ) -> Instruction:
        """A collective of XLA, on each island."""
        return self.c.add(
            opcode,
            hlo.array_shape(x.shape.element_type, [size]),
            [x],
            like=self.all_reduce,
            called_computation_ids=called,
            dimensions=[0],
            channel_id=self.c.module.new_channel_id(),
            use_global_device_ids=True,
            collective_device_list=pb.CollectiveDeviceListProto(
                replica_groups=[pb.ReplicaGroup(replica_ids=group) for group in groups]
            ),
        )


class _CpuLowering(_Lowering):
    """After XLA's own layout and fusion: arithmetic comes as loops, shapes change by bitcast."""

    @property
    def reshape_opcode(self) -> str:
        return "bitcast"

    def loop(self, x: Instruction, body: Body) -> Instruction:
        return arithmetic.loop_fusion(self.c, x, body)

    def over_islands(self, values: Sequence[_Value], split: groups_lib.Split) -> list[_Value]:
        return self.hierarchical(values, split)

    def exchange(self, values: Sequence[_Value], groups: Groups) -> list[_Value]:
        """Everything to everyone if that is little, else shares, then their sums to everyone."""
        size = len(groups[0])
        if sum(hlo.num_bytes(v.x.shape) for v in values) <= self.adder.options.two_phase_bytes:
            everything = [v.size * size for v in values]
            rows = self._call(ExchangeKind.ALL_GATHER, values, everything, groups)
            return [self._combine(row, size) for row in rows]
        shares = [-(-v.size // size) * size for v in values]
        rows = self._call(ExchangeKind.ALL_TO_ALL, values, shares, groups)
        sums = [self._combine(row, size) for row in rows]
        return self._call(ExchangeKind.ALL_GATHER, sums, [v.size for v in values], groups)

    def _call(
        self, kind: ExchangeKind, values: Sequence[_Value], sizes: list[int], groups: Groups
    ) -> list[_Value]:
        shapes = [
            hlo.array_shape(v.x.shape.element_type, [size])
            for v, size in zip(values, sizes, strict=True)
        ]
        results = self.adder.call(kind, [v.x for v in values], shapes, groups)
        return [v.by(x) for v, x in zip(values, results, strict=True)]

    def _combine(self, rows: _Value, num_rows: int) -> _Value:
        size = rows.size // num_rows

        def body(c: hlo.Computation, x: Instruction) -> Instruction:
            parts = [arithmetic.slice_1d(c, x, i * size, size) for i in range(num_rows)]
            return arithmetic.combine(c, parts, self.opcode, rows.element_type)

        return rows.by(self.loop(rows.x, body))


class _GpuLowering(_Lowering):
    """Before XLA's layout and fusion: plain arithmetic, which XLA fuses with what is around it."""

    @property
    def reshape_opcode(self) -> str:
        return "reshape"

    def loop(self, x: Instruction, body: Body) -> Instruction:
        return body(self.c, x)

    def over_islands(self, values: Sequence[_Value], split: groups_lib.Split) -> list[_Value]:
        return [y for value in values for y in self.hierarchical([value], split)]

    def exchange(self, values: Sequence[_Value], groups: Groups) -> list[_Value]:
        """One permute for each distance between two members of a group."""
        return [value.by(self._exchange(value, groups)) for value in values]

    def _exchange(self, value: _Value, groups: Groups) -> Instruction:
        # XLA may contract x's product with the sum, and skip the rounding of a value that it fuses
        # with its user. Then ranks differ: who sent x, and whoever's compiler did neither.
        x = self._barrier(value.x)
        others = [self.adder.permute(x, groups, shift) for shift in range(1, len(groups[0]))]
        rows = self._in_order([x, *others], groups)
        result = arithmetic.combine(self.c, rows, self.opcode, value.element_type)
        is_rounded = arithmetic.summed_type(value.element_type) != x.shape.element_type
        return self._barrier(result) if is_rounded or self.opcode == "multiply" else result

    def _in_order(self, by_shift: list[Instruction], groups: Groups) -> list[Instruction]:
        """The members' rows in group order; `by_shift[s]` is that of the member s places before."""
        size = len(by_shift)
        if size == 2:  # x + y = y + x, to the bit
            return by_shift
        place_of = {position: i for group in groups for i, position in enumerate(group)}
        places = [place_of[position] for position in range(len(self.collective.rank_of))]
        own = arithmetic.own_entry(self.c, places, self.collective.num_partitions)
        masks = [arithmetic.equals(self.c, own, i, by_shift[0].shape) for i in range(1, size)]
        return [
            arithmetic.select(self.c, masks, [by_shift[(i - place) % size] for i in range(size)])
            for place in range(size)
        ]

    def _barrier(self, x: Instruction) -> Instruction:
        return self.c.add("opt-barrier", x.shape, [x])
