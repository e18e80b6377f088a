"""Small pieces of HLO arithmetic on one-dimensional arrays."""

from collections.abc import Callable, Sequence

from jaxhet.compiler import hlo
from jaxhet.compiler import proto as pb

Body = Callable[..., hlo.Instruction]  # arguments: a computation, then instructions

_BYTE_TYPES: dict[int, int] = {
    pb.S1: pb.S8,
    pb.S2: pb.S8,
    pb.S4: pb.S8,
    pb.U1: pb.U8,
    pb.U2: pb.U8,
    pb.U4: pb.U8,
    pb.F4E2M1FN: pb.F8E4M3FN,
}
# Float type of sums -> integer type of its size, bits of NaN.
_BITS: dict[int, tuple[int, int]] = {
    pb.F32: (pb.S32, 0x7FC0_0000),
    pb.F64: (pb.S64, 0x7FF8_0000_0000_0000),
}


def carried_type(element_type: int) -> int:
    """Type in which elements are exchanged: of whole bytes, with every value of `element_type`."""
    return _BYTE_TYPES.get(element_type, element_type)


def summed_type(element_type: int) -> int:
    """The type in which elements are combined: f32 for the smaller floats."""
    small_float = hlo.is_float(element_type) and hlo.bit_width(element_type) < 32
    return pb.F32 if small_float else carried_type(element_type)


def convert(c: hlo.Computation, x: hlo.Instruction, element_type: int) -> hlo.Instruction:
    """The same values in another type; x itself if it has that type."""
    if x.shape.element_type == element_type:
        return x
    return c.add("convert", hlo.with_type(x.shape, element_type), [x])


def slice_1d(c: hlo.Computation, x: hlo.Instruction, start: int, size: int) -> hlo.Instruction:
    """`size` elements of x from `start`."""
    bounds = pb.SliceDimensions(start=start, limit=start + size, stride=1)
    shape = hlo.array_shape(x.shape.element_type, [size])
    return c.add("slice", shape, [x], slice_dimensions=[bounds])


def pad_1d(c: hlo.Computation, x: hlo.Instruction, size: int) -> hlo.Instruction:
    """The elements of x, then zeros, `size` in all."""
    element_type = x.shape.element_type
    zero = convert(c, integers(c, [], [0]), element_type)
    padding = pb.PaddingConfig()
    padding.dimensions.add(edge_padding_high=size - hlo.num_elements(x.shape))
    return c.add("pad", hlo.array_shape(element_type, [size]), [x, zero], padding_config=padding)


def combine(
    c: hlo.Computation,
    rows: Sequence[hlo.Instruction],
    opcode: str,
    element_type: int,
    present: Sequence[hlo.Instruction] = (),
) -> hlo.Instruction:
    """The rows combined from first to last, rounded once to `element_type`, in its carried type.

    `present` has a scalar predicate for each of the last rows: a row counts where its own is true.
    Every NaN gets the same bits: the sum of two NaNs depends on the compiler's order of operands.
    """
    total, *rest = (convert(c, row, summed_type(element_type)) for row in rows)
    always = len(rest) - len(present)
    for row in rest[:always]:
        total = c.add(opcode, total.shape, [total, row])
    for row, is_present in zip(rest[always:], present, strict=True):
        combined = c.add(opcode, total.shape, [total, row])
        total = select(c, [broadcast(c, is_present, total.shape)], [total, combined])
    if total.shape.element_type in _BITS:
        total = _with_one_nan(c, total)
    if hlo.is_float(element_type):
        total = convert(c, total, element_type)
    return convert(c, total, carried_type(element_type))


def _with_one_nan(c: hlo.Computation, x: hlo.Instruction) -> hlo.Instruction:
    bits_type, nan = _BITS[x.shape.element_type]
    bits = c.add("bitcast-convert", with_type := hlo.with_type(x.shape, bits_type), [x])
    is_nan = c.add(
        "compare",
        hlo.with_type(x.shape, pb.PRED),
        [x, x],
        comparison_direction="NE",
        comparison_type="FLOAT",
    )
    one = broadcast(c, integers(c, [], [nan], bits_type), with_type)
    return c.add("bitcast-convert", x.shape, [select(c, [is_nan], [bits, one])])


def reducer(module: hlo.Module, opcode: str, element_type: int) -> hlo.Computation:
    """A computation that combines two elements."""
    shape = hlo.array_shape(element_type, [])

    def build(c: hlo.Computation) -> hlo.Instruction:
        return c.add(opcode, shape, [c.add("parameter", shape, parameter_number=i) for i in (0, 1)])

    return module.add_computation(opcode, build)


def concatenate(c: hlo.Computation, xs: Sequence[hlo.Instruction]) -> hlo.Instruction:
    """One-dimensional arrays one after the other."""
    if len(xs) == 1:
        return xs[0]
    size = sum(hlo.num_elements(x.shape) for x in xs)
    shape = hlo.array_shape(xs[0].shape.element_type, [size])
    return c.add("concatenate", shape, xs, dimensions=[0])


def transpose(
    c: hlo.Computation, x: hlo.Instruction, permutation: Sequence[int]
) -> hlo.Instruction:
    """Dimension i of the result is dimension permutation[i] of x; row-major."""
    dims = [x.shape.dimensions[d] for d in permutation]
    shape = hlo.array_shape(x.shape.element_type, dims)
    return c.add("transpose", shape, [x], dimensions=permutation)


def loop_fusion(c: hlo.Computation, xs: Sequence[hlo.Instruction], body: Body) -> hlo.Instruction:
    """The result of `body` on the xs, computed in one loop."""

    def build(fused: hlo.Computation) -> hlo.Instruction:
        parameters = [fused.add("parameter", x.shape, parameter_number=i) for i, x in enumerate(xs)]
        return body(fused, *parameters)

    called = c.module.add_computation("fused", build, is_fusion=True)
    shape, ids = called.root.shape, [called.id]
    return c.add("fusion", shape, xs, fusion_kind="kLoop", called_computation_ids=ids)


def broadcast(c: hlo.Computation, scalar: hlo.Instruction, shape: hlo.Shape) -> hlo.Instruction:
    """A scalar in each element of `shape`."""
    return c.add("broadcast", hlo.with_type(shape, scalar.shape.element_type), [scalar])


def equals(
    c: hlo.Computation, scalar: hlo.Instruction, number: int, shape: hlo.Shape
) -> hlo.Instruction:
    """Whether a scalar integer is `number`, for each element of `shape`."""
    is_it = c.add(
        "compare",
        hlo.array_shape(pb.PRED, []),
        [scalar, integers(c, [], [number], scalar.shape.element_type)],
        comparison_direction="EQ",
        comparison_type="SIGNED",
    )
    return broadcast(c, is_it, shape) if shape.dimensions else is_it


def select(
    c: hlo.Computation, masks: Sequence[hlo.Instruction], values: Sequence[hlo.Instruction]
) -> hlo.Instruction:
    """The value whose mask is true, else the first value, which has no mask."""
    chosen = values[0]
    for mask, value in zip(masks, values[1:], strict=True):
        chosen = c.add("select", value.shape, [mask, value, chosen])
    return chosen


def dynamic_slice_1d(
    c: hlo.Computation, x: hlo.Instruction, start: hlo.Instruction, size: int
) -> hlo.Instruction:
    """`size` elements of x from `start`, a scalar integer."""
    shape = hlo.array_shape(x.shape.element_type, [size])
    return c.add("dynamic-slice", shape, [x, start], dynamic_slice_sizes=[size])


def uninitialized(c: hlo.Computation, shape: hlo.Shape) -> hlo.Instruction:
    """An array with undefined values (GPU)."""
    return c.add(
        "custom-call",
        shape,
        stem="allocate",
        custom_call_target="AllocateBuffer",
        custom_call_has_side_effect=True,
        custom_call_api_version=pb.API_VERSION_TYPED_FFI,
    )


def with_part_1d(
    c: hlo.Computation, x: hlo.Instruction, part: hlo.Instruction, start: int
) -> hlo.Instruction:
    """x, with other elements from `start` on."""
    index = integers(c, [], [start], pb.S64)
    return c.add("dynamic-update-slice", x.shape, [x, part, index])


def own_logical_id(c: hlo.Computation) -> hlo.Instruction:
    """The device's logical id (`groups.py`), an s32 scalar; one for each computation."""
    u32 = hlo.array_shape(pb.U32, [])
    return c.shared("logical id", lambda: convert(c, c.add("partition-id", u32), pb.S32))


def entry(c: hlo.Computation, table: Sequence[int], index: hlo.Instruction) -> hlo.Instruction:
    """The entry of a table at an index, a scalar integer; one for each computation."""

    def build() -> hlo.Instruction:
        element_type = pb.S64 if max(table) >= 2**31 else pb.S32
        values = integers(c, [len(table)], table, element_type)
        found = dynamic_slice_1d(c, values, index, 1)
        return c.add("reshape", hlo.array_shape(element_type, []), [found])

    return c.shared(("entry", tuple(table), index.id), build)


def entry_is(
    c: hlo.Computation, table: Sequence[int], index: hlo.Instruction, number: int
) -> hlo.Instruction:
    """Whether the entry of a table at an index is `number`; a scalar."""
    return equals(c, entry(c, table, index), number, hlo.array_shape(pb.PRED, []))


def integers(
    c: hlo.Computation, dims: Sequence[int], values: Sequence[int], element_type: int = pb.S32
) -> hlo.Instruction:
    """A constant."""
    shape = hlo.array_shape(element_type, dims)
    field = "s64s" if element_type == pb.S64 else "s32s"
    return c.add("constant", shape, literal=pb.LiteralProto(shape=shape, **{field: values}))
