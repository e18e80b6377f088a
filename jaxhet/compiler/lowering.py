"""The steps of decompositions. Each platform has its own form of them.

Between the first and the last step all values are one-dimensional and row-major, whatever layouts
two compilers have chosen around them. An array of g blocks is the blocks one after the other.
"""

import abc
import collections
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import ClassVar

from jaxhet.compiler import arithmetic, codecs, hlo, order
from jaxhet.compiler import groups as groups_lib
from jaxhet.compiler import proto as pb
from jaxhet.compiler.arithmetic import Body
from jaxhet.compiler.carrier import Exchange
from jaxhet.compiler.collectives import Collective, Identity
from jaxhet.compiler.exchange import Call, ExchangeKind, ExchangeSpec, Half, Movement
from jaxhet.compiler.groups import Groups
from jaxhet.compiler.hlo import Instruction, Shape
from jaxhet.compiler.options import Job, Options

# Integer type -> wider type for sums and products, whose lower bits are the result.
_NOT_REDUCED_BY_NCCL: dict[int, int] = {pb.S16: pb.S32, pb.U16: pb.U32}


@dataclasses.dataclass(frozen=True)
class Value:
    """A one-dimensional array in a decomposition.

    Attributes:
      x: The array.
      element_type: The user's, to which sums round.
      operands: Numbers of the collective's operands that it holds.
      codec: Codec in which islands exchange it (`wire.py`); "": none.
    """

    x: Instruction
    element_type: int
    operands: tuple[int, ...]
    codec: str = ""

    @property
    def size(self) -> int:
        """Elements."""
        return hlo.num_elements(self.x.shape)

    def with_array(self, x: Instruction) -> "Value":
        """Another array with the same attributes."""
        return dataclasses.replace(self, x=x)


Unpack = Callable[[Sequence[Value]], list[Value]]


@dataclasses.dataclass(frozen=True)
class Lowering(abc.ABC):
    """The steps of one collective's decomposition.

    Attributes:
      collective: The collective.
      name: Opcode, reducer and dimension of the collective.
      algorithm: "flat", "hierarchical" or "direct".
      note: Reason for the algorithm, for the user.
      job: The job.
      options: The user's options.
      added: All exchanges of the module; new ones are appended.
      codec: Codec of the collective; `codecs.fitting` says which operands it compresses.
      wire: Codec and block of the exchanged data; "": operands without a codec.
      plain_bytes: With `wire`, size of the operand before it is encoded.
      half: The half of an exchange that the collective stands for; None: a whole exchange.
    """

    collective: Collective
    name: str
    algorithm: str
    note: str
    job: Job
    options: Options
    added: list[Exchange]
    codec: str = ""
    wire: str = ""
    plain_bytes: int = 0
    half: Half | None = None

    # Parts that differ between platforms.

    reshape_opcode: ClassVar[str]  # gives elements another shape without moving them

    @abc.abstractmethod
    def flat(self, x: Instruction) -> Instruction:
        """The elements of an array, row-major, in one dimension."""

    @abc.abstractmethod
    def unflat(self, x: Instruction, shape: Shape) -> Instruction:
        """The array of `shape` from the elements of an array, row-major."""

    @abc.abstractmethod
    def loop(self, xs: Sequence[Instruction], body: Body) -> Instruction:
        """Elementwise arithmetic, slices, pads and transposes of the xs."""

    @abc.abstractmethod
    def all_reduce(self, values: Sequence[Value], groups: Groups, opcode: str) -> list[Value]:
        """Each of the values combined over the groups, by exchanges."""

    @abc.abstractmethod
    def reduce_scatter(self, values: Sequence[Value], groups: Groups, opcode: str) -> list[Value]:
        """Combines each of the values over the groups, by exchanges; member i keeps block i."""

    @abc.abstractmethod
    def all_gather(self, values: Sequence[Value], groups: Groups) -> list["Rows"]:
        """Each member's value to every member."""

    def gathered(self, values: Sequence[Value], groups: Groups) -> list["Rows"]:
        """`all_gather` of values that are combined next."""
        return self.all_gather(values, groups)

    @abc.abstractmethod
    def all_to_all(self, values: Sequence[Value], groups: Groups) -> list["Rows"]:
        """Block i of each member's value to member i."""

    @abc.abstractmethod
    def exchanged(self, kind: ExchangeKind, value: Value, groups: Groups) -> Value:
        """The result, of the value's size, of one exchange of the value."""

    @abc.abstractmethod
    def permute(self, values: Sequence[Value], pairs: Groups) -> list[Value]:
        """The value of each source to its target; zeros on ranks that are no target."""

    def bundles(self, values: Sequence[Value]) -> list[Sequence[Value]]:
        """Groups of values that should share their exchanges."""
        return [values]

    def pack(self, values: Sequence[Value]) -> tuple[Sequence[Value], Unpack]:
        """The values packed into fewer ones, and a function that unpacks their results."""
        return values, list

    # Methods that all platforms share.

    @property
    def c(self) -> hlo.Computation:
        """The computation that the collective is in."""
        return self.collective.computation

    @property
    def instruction(self) -> Instruction:
        """The collective itself."""
        return self.collective.instruction

    @property
    def operands(self) -> list[Instruction]:
        """Operands of the collective."""
        return self.c.operands(self.instruction)

    @property
    def result_shapes(self) -> list[Shape]:
        """Shapes of the collective's results; several results form a tuple."""
        shape = self.instruction.shape
        return list(shape.tuple_shapes) if shape.element_type == pb.TUPLE else [shape]

    def flattened(self) -> list[Value]:
        """The operands of the collective, flat."""
        return [self.flatten(x, number) for number, x in enumerate(self.operands)]

    def flatten(self, x: Instruction, number: int) -> Value:
        """The array in one dimension, in a type that can be exchanged.

        `number` is the index of the operand.
        """
        element_type, codec = x.shape.element_type, codecs.fitting(self.codec, x.shape)
        x = self._converted(x, arithmetic.carried_type(element_type))
        return Value(self.flat(x), element_type, (number,), codec)

    def restore(self, value: Value, shape: Shape) -> Instruction:
        """A flat value as an array, in the layout and the type of `shape`."""
        x = self.unflat(value.x, hlo.with_type(shape, value.x.shape.element_type))
        return self._converted(x, shape.element_type)

    def replace(self, results: Sequence[Instruction]) -> None:
        """Puts the results in the collective's place."""
        is_tuple = self.instruction.shape.element_type == pb.TUPLE
        self.c.rewrite(self.instruction, "tuple" if is_tuple else self.reshape_opcode, results)

    def replace_flat(self, results: Sequence[Value]) -> None:
        """Puts flat results in the collective's place."""
        pairs = zip(results, self.result_shapes, strict=True)
        self.replace([self.restore(value, shape) for value, shape in pairs])

    def shaped(self, x: Instruction, dims: Sequence[int]) -> Instruction:
        """The same elements, row-major in `dims`; x itself if it has that shape."""
        shape = hlo.array_shape(x.shape.element_type, dims)
        same = list(x.shape.dimensions) == list(dims) and hlo.is_row_major(x.shape)
        return x if same else self.c.add(self.reshape_opcode, shape, [x])

    def local(
        self, opcode: str, value: Value, size: int, groups: Groups, reducer: str = ""
    ) -> Value:
        """A collective of XLA, on each island; `size` is the size of its result.

        Groups are in logical ids.
        """
        element_type = value.x.shape.element_type
        if reducer and element_type in _NOT_REDUCED_BY_NCCL:
            wide = value.with_array(self._converted(value.x, _NOT_REDUCED_BY_NCCL[element_type]))
            result = self.local(opcode, wide, size, groups, reducer)
            return value.with_array(self._converted(result.x, element_type))
        called = [arithmetic.reducer(self.c.module, reducer, element_type).id] if reducer else []
        shape = hlo.array_shape(element_type, [size])
        has_global_ids = opcode in ("all-gather", "reduce-scatter")
        return value.with_array(
            self.c.add(
                opcode,
                shape,
                [value.x],
                like=self.instruction,
                dimensions=[] if opcode == "collective-broadcast" else [0],
                channel_id=self.c.module.new_channel_id(),
                use_global_device_ids=True if has_global_ids else None,
                collective_device_list=hlo.device_list(groups),
                called_computation_ids=called,
            )
        )

    def _converted(self, x: Instruction, element_type: int) -> Instruction:
        if x.shape.element_type == element_type:
            return x
        return self.loop([x], lambda c, x: arithmetic.convert(c, x, element_type))

    def exchange(
        self,
        start: Instruction,
        kind: ExchangeKind,
        values: Sequence[Value],
        groups: Groups,
        group_size: int,
    ) -> Exchange:
        """An exchange of values, and its record.

        Args:
          start: The instruction that starts it.
          kind: Pattern of its movement.
          values: Operands.
          groups: Indices of `Collective.rank_of`; for a permute, pairs of source and target.
          group_size: Number of rows of a result, at least the size of the largest group.
        """
        collective, half = self.collective, self.half
        identities = tuple(collective.identities[i] for v in values for i in v.operands)
        shapes = [v.x.shape for v in values]
        ranks = groups_lib.map_groups(groups, collective.rank_of)
        path = order.for_people(identities[0].path)
        source = self.c.module.location(self.instruction, path)
        if len(identities) > 1:
            source += f" and {len(identities) - 1} more"
        receivers = self._most_receivers(kind, ranks)
        parts = len(ranks[0]) if kind == ExchangeKind.ALL_TO_ALL else 1
        sent = sum(map(hlo.num_bytes, shapes))
        moved = 0 if half is not None and half.is_finish else sent
        spec = ExchangeSpec(
            Call(self.job.session),
            Movement(
                kind=kind,
                ranks=groups_lib.padded(ranks, group_size),
                group_size=group_size,
                deadline_ms=self.options.deadline_ms,
                handle=half.key if half else 0,
                is_finish=half is not None and half.is_finish,
                handle_bytes=sent if half else 0,
            ),
            collective=self.name,
            algorithm=self.algorithm,
            num_operands=len(self.instruction.operand_ids),
            shapes=",".join(map(hlo.shape_text, shapes)),
            groups=ranks,
            digest=_digest(identities),
            source=" ".join(source.replace('"', "'").split()),
            note=self.note,
            num_bytes=-(-moved * receivers // parts),
            num_collectives=len(identities),
            is_pipelined=collective.is_pipelined,
            wire=self.wire,
            plain_bytes=-(-self.plain_bytes * receivers // parts),
        )
        is_gather = self.instruction.opcode == "all-gather"
        return Exchange(self.c, start, spec, identities, is_gather, collective.is_early)

    def _most_receivers(self, kind: ExchangeKind, ranks: Groups) -> int:
        """Largest number of ranks on other islands to which one rank sends."""
        islands = self.job.islands
        if kind == ExchangeKind.PERMUTE:
            crossing = [s for s, t in ranks if islands[s] != islands[t]]
            return max(collections.Counter(crossing).values(), default=0)
        return max(
            sum(islands[other] != islands[rank] for other in group)
            for group in ranks
            for rank in group
        )


def _digest(identities: Sequence[Identity]) -> str:
    text = "\n".join(map(str, identities))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def present_rows(lowering: Lowering, groups: Groups) -> tuple[Instruction, ...]:
    """For each row that some groups lack, a scalar predicate: the device's group has it.

    Groups of equal size lack no rows.
    """
    least, most = min(map(len, groups)), groups_lib.largest(groups)
    if least == most:
        return ()
    size_of = {member: len(group) for group in groups for member in group}
    own = arithmetic.own_logical_id(lowering.c)

    def has_row(row: int) -> Instruction:
        logical_ids = range(len(lowering.collective.rank_of))
        table = [int(size_of.get(i, 0) > row) for i in logical_ids]
        return lowering.loop([own], lambda c, own: arithmetic.entry_is(c, table, own, 1))

    return tuple(has_row(row) for row in range(least, most))


@dataclasses.dataclass(frozen=True)
class Rows:
    """The data of an exchange: a row from each of `count` members, in group order.

    Attributes:
      lowering: Lowering of the collective.
      joined: The rows one after the other.
      count: Number of rows.
      present: For the last rows, whether the device's group has them; see `present_rows`.
    """

    lowering: Lowering
    joined: Value
    count: int
    present: tuple[Instruction, ...] = ()

    @property
    def arrays(self) -> list[Instruction]:
        """Arrays that hold the rows; see `parts`."""
        return [self.joined.x]

    def parts(self, c: hlo.Computation, arrays: Sequence[Instruction]) -> list[Instruction]:
        """The rows, inside of a loop over `arrays`."""
        size = self.joined.size // self.count
        return [arithmetic.slice_1d(c, arrays[0], i * size, size) for i in range(self.count)]

    def combined(self, opcode: str) -> Value:
        """The rows combined element by element, in group order, the same bits on every rank."""
        return self.joined.with_array(
            self.folded(opcode, self.joined.element_type, lambda c, part: part)
        )

    def folded(
        self,
        opcode: str,
        element_type: int,
        decoded: Callable[[hlo.Computation, Instruction], Instruction],
    ) -> Instruction:
        """The decoded rows combined; see `combined`."""
        arrays = self.arrays

        def body(c: hlo.Computation, *xs: Instruction) -> Instruction:
            rows = [decoded(c, part) for part in self.parts(c, xs[: len(arrays)])]
            return arithmetic.combine(c, rows, opcode, element_type, xs[len(arrays) :])

        return self.lowering.loop([*arrays, *self.present], body)
