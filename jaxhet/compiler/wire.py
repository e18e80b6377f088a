"""Compressed exchanges: data is encoded before an exchange and decoded before it is summed.

A rank encodes and decodes its own part too, so that all ranks have the same bits. Each row of an
exchange (the data that one rank sends to another) is encoded on its own: its elements, then its
scales.

The passes compress all-reduces and reduce-scatters that add, all-gathers and permutes: operands of
float32, bfloat16 or float16 of at least `codecs.LEAST_BYTES`, if the codec has fewer bits. These
are hierarchical if the groups allow it: data that stays on an island is not encoded.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jaxhet.compiler import arithmetic, codecs, hlo
from jaxhet.compiler import proto as pb
from jaxhet.compiler.codecs import BLOCK, CODECS, Codec
from jaxhet.compiler.groups import Groups
from jaxhet.compiler.hlo import Computation, Instruction
from jaxhet.compiler.lowering import Lowering, Rows, Value


def all_reduce(
    lowering: Lowering, values: Sequence[Value], groups: Groups, opcode: str
) -> list[Value]:
    """Combines each of the values over the groups.

    Compressed values are gathered and summed, which rounds them once.
    """
    return _each(
        lowering,
        values,
        lambda vs: lowering.all_reduce(vs, groups, opcode),
        lambda vs: _summed(lowering, vs, 1, lambda way, xs: way.gathered(xs, groups)),
    )


def reduce_scatter(
    lowering: Lowering, values: Sequence[Value], groups: Groups, opcode: str
) -> list[Value]:
    """Combines each of the values over the groups; member i keeps block i."""
    num_rows = len(groups[0])
    return _each(
        lowering,
        values,
        lambda vs: lowering.reduce_scatter(vs, groups, opcode),
        lambda vs: _summed(lowering, vs, num_rows, lambda way, xs: way.all_to_all(xs, groups)),
    )


def _summed(
    lowering: Lowering,
    values: Sequence[Value],
    num_rows: int,
    exchange: Callable[[Lowering, Sequence[Value]], list[Rows]],
) -> list[Value]:
    """The sums of the rows that an exchange gives; see `_encoded` for `num_rows`."""
    received = _exchanged(lowering, values, num_rows, exchange)
    return [
        _combined(lowering, rows, value, value.size // num_rows)
        for value, rows in zip(values, received, strict=True)
    ]


def all_gather(lowering: Lowering, values: Sequence[Value], groups: Groups) -> list[Value]:
    """Each member's values, one after the other, to every member."""

    def gather(lowering: Lowering, values: Sequence[Value]) -> list[Value]:
        return [row.joined for row in lowering.all_gather(values, groups)]

    return _moved(lowering, values, gather, len(groups[0]))


def permute(
    lowering: Lowering,
    values: Sequence[Value],
    move: Callable[[Lowering, Sequence[Value]], list[Value]],
) -> list[Value]:
    """The results of `move`, which moves whole values."""
    return _moved(lowering, values, move, 1)


def _moved(
    lowering: Lowering,
    values: Sequence[Value],
    move: Callable[[Lowering, Sequence[Value]], list[Value]],
    count: int,
) -> list[Value]:
    """The results of `move`, with `count` rows of each value."""

    def compressed(values: Sequence[Value]) -> list[Value]:
        received = _exchanged(lowering, values, 1, move)
        return [
            _restored(lowering, rows, value, count)
            for value, rows in zip(values, received, strict=True)
        ]

    return _each(lowering, values, lambda vs: move(lowering, vs), compressed)


_Lower = Callable[[Sequence[Value]], list[Value]]


def _each(
    lowering: Lowering, values: Sequence[Value], plain: _Lower, compressed: _Lower
) -> list[Value]:
    """Results of the values, in their order. A bundle's values without a codec have an exchange."""
    results: list[Value] = []
    for bundle in lowering.bundles(values):
        coded = [value for value in bundle if value.codec]
        exact = [value for value in bundle if not value.codec]
        found = iter(compressed(coded) if coded else []), iter(plain(exact) if exact else [])
        results += [next(found[not value.codec]) for value in bundle]
    return results


def _exchanged[T](
    lowering: Lowering,
    values: Sequence[Value],
    num_rows: int,
    exchange: Callable[[Lowering, Sequence[Value]], list[T]],
) -> list[T]:
    """Encodes values and exchanges them. The plan has the codec and the original size."""
    (codec,) = {value.codec for value in values}
    num_bytes = sum(hlo.num_bytes(value.x.shape) for value in values)
    on_way = dataclasses.replace(lowering, wire=CODECS[codec].text, plain_bytes=num_bytes)
    return exchange(on_way, [_encoded(lowering, v, num_rows) for v in values])


def _encoded(lowering: Lowering, value: Value, num_rows: int) -> Value:
    """A value of equal rows, each encoded for itself."""
    codec, size = CODECS[value.codec], value.size // num_rows
    if not codec.has_blocks:
        x = lowering.loop([value.x], codecs.upper_half)
        return Value(x, pb.U16, value.operands)
    num_blocks = -(-size // BLOCK)
    x = value.x
    if num_blocks * BLOCK != size:
        rows = lowering.shaped(x, [num_rows, size])
        x = lowering.loop([rows], lambda c, x: _padded(c, x, num_blocks * BLOCK))
    x = lowering.shaped(x, [num_rows, num_blocks, BLOCK])
    scales = lowering.loop([x], lambda c, x: codecs.scales(c, x, codec))
    elements = lowering.loop([x, scales], lambda c, x, s: codecs.elements(c, x, s, codec))
    num_bytes = num_blocks * BLOCK * codec.bits // 8
    parts = [lowering.shaped(elements, [num_rows, num_bytes]), scales]
    joined = lowering.c.add(
        "concatenate",
        hlo.array_shape(pb.U8, [num_rows, num_bytes + num_blocks]),
        parts,
        dimensions=[1],
    )
    flat = lowering.shaped(joined, [hlo.num_elements(joined.shape)])
    return Value(flat, pb.U8, value.operands)


def _combined(lowering: Lowering, rows: Rows, value: Value, size: int) -> Value:
    """The sum of encoded rows of `size` elements, in group order."""
    codec = CODECS[value.codec]
    x = rows.folded("add", value.element_type, lambda c, part: _decoded(c, part, 1, codec))
    return _cut(lowering, x, value, 1, size)


def _restored(lowering: Lowering, received: Value, value: Value, count: int) -> Value:
    """`count` encoded rows as elements of the value's type."""
    codec, element_type = CODECS[value.codec], value.x.shape.element_type

    def body(c: Computation, x: Instruction) -> Instruction:
        return arithmetic.convert(c, _decoded(c, x, count, codec), element_type)

    return _cut(lowering, lowering.loop([received.x], body), value, count, value.size)


def _decoded(c: Computation, rows: Instruction, count: int, codec: Codec) -> Instruction:
    """The float32s of encoded rows, [rows, blocks, BLOCK] if the codec has blocks."""
    if not codec.has_blocks:
        return codecs.of_upper_half(c, rows)
    length = hlo.num_elements(rows.shape) // count
    in_block = BLOCK * codec.bits // 8
    num_blocks = length // (in_block + 1)
    rows = c.add("reshape", hlo.array_shape(pb.U8, [count, length]), [rows])
    codes = codecs.slice_last(c, rows, 0, num_blocks * in_block)
    codes = c.add("reshape", hlo.array_shape(pb.U8, [count, num_blocks, in_block]), [codes])
    scales = codecs.slice_last(c, rows, num_blocks * in_block, num_blocks)
    return codecs.values(c, codes, scales, codec)


def _cut(lowering: Lowering, x: Instruction, value: Value, count: int, size: int) -> Value:
    """Rows without the padding of their last blocks, flat."""
    if (padded := hlo.num_elements(x.shape) // count) != size:
        x = lowering.shaped(x, [count, padded])
        x = lowering.loop([x], lambda c, x: codecs.slice_last(c, x, 0, size))
    x = lowering.shaped(x, [count * size])
    if lowering.job.is_gpu and x.shape.element_type != pb.F32:
        x = lowering.c.add("opt-barrier", x.shape, [x])  # or XLA may skip the rounding
    return value.with_array(x)


def _padded(c: Computation, x: Instruction, size: int) -> Instruction:
    """Rows with zeros behind them."""
    num_rows, before = x.shape.dimensions
    element_type = x.shape.element_type
    zero = arithmetic.convert(c, arithmetic.integers(c, [], [0]), element_type)
    padding = pb.PaddingConfig()
    padding.dimensions.add()
    padding.dimensions.add(edge_padding_high=size - before)
    shape = hlo.array_shape(element_type, [num_rows, size])
    return c.add("pad", shape, [x, zero], padding_config=padding)
