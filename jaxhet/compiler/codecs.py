"""Codecs: floats in fewer bits for the way between islands.

bf16    the upper half of a float32
mx…     blocks of 32 elements that share a power of two (OCP Microscaling Formats 1.0): mxint8 and
        mxfp8 (E4M3) as the standard has them; mxint4 is mxint8 with 4 bits

All ranks get the same bits from the same bytes, whatever their arithmetic. Encoding is arithmetic
of integers. Decoding ends with a product of an integer and a power of two, which is exact, so that
a contraction with the sum behind it changes nothing. Every decoded value is 0 or a multiple of
2^-126: neither it nor a sum of such values is subnormal, and flushing changes nothing either.

A block with NaN or infinity decodes to NaNs; bf16 keeps both. A subnormal element counts as 0, and
-0 becomes 0. Rounding is to the nearest, ties to even. An element above the largest one of its
block becomes the largest one, which happens just below the next power of two.
"""

import dataclasses
from collections.abc import Sequence

from jaxhet.compiler import arithmetic, hlo
from jaxhet.compiler import proto as pb
from jaxhet.compiler.hlo import Computation, Instruction, Shape

BLOCK = 32  # elements
LEAST_BYTES = 1 << 20  # smaller operands are not compressed
_COMPRESSED = (pb.F32, pb.BF16, pb.F16)
_NAN = 0x7FC0_0000  # bits of a float32
_NAN_SCALE = 255
_MANTISSA = 23  # bits of a float32 below the leading one
_HIDDEN = 25  # shift that leaves nothing of the 24 bits


@dataclasses.dataclass(frozen=True)
class Codec:
    """A way to write elements in fewer bits.

    Attributes:
      name: Name in options and plans.
      bits: Bits of an element.
      largest: Exponent of the largest elements: a block's scale is 2^(exponent of its largest
        element - this).
      unit: Exponent of the integers that elements decode to, below the scale's exponent.
      most: Largest element, as a code.
      is_float: Whether an element has an exponent (E4M3).
    """

    name: str
    bits: int
    largest: int = 0
    unit: int = 0
    most: int = 0
    is_float: bool = False

    @property
    def has_blocks(self) -> bool:
        """Whether elements share scales."""
        return self.most > 0

    @property
    def text(self) -> str:
        """Name and size of the blocks, as plans have them."""
        return f"{self.name}/{BLOCK}" if self.has_blocks else self.name

    @property
    def least_scale(self) -> int:
        """The smallest scale, as a biased exponent: the unit of its integers is 2^-126."""
        return self.unit + 1


CODECS = {
    codec.name: codec
    for codec in (
        Codec("bf16", 16),
        Codec("mxfp8", 8, largest=8, unit=9, most=126, is_float=True),
        Codec("mxint8", 8, unit=6, most=127),
        Codec("mxint4", 4, unit=2, most=7),
    )
}


def fitting(codec: str, shape: Shape) -> str:
    """The codec, if operands of this shape are compressed by it; else ""."""
    is_wide = shape.element_type in _COMPRESSED and shape.dimensions
    if not codec or not is_wide or hlo.bit_width(shape.element_type) <= CODECS[codec].bits:
        return ""
    return codec if hlo.num_bytes(shape) >= LEAST_BYTES else ""


@dataclasses.dataclass(frozen=True)
class _Integers:
    """Adds instructions on s32 arrays of one shape. A Python int becomes a constant array."""

    c: Computation
    shape: Shape

    @classmethod
    def like(cls, c: Computation, x: Instruction, dims: Sequence[int] | None = None) -> "_Integers":
        return cls(c, hlo.array_shape(pb.S32, x.shape.dimensions if dims is None else dims))

    def do(self, opcode: str, *xs: Instruction | int) -> Instruction:
        return self.c.add(opcode, self.shape, [self._array(x) for x in xs])

    def where(
        self,
        x: Instruction,
        direction: str,
        y: int,
        then: Instruction | int,
        otherwise: Instruction | int,
    ) -> Instruction:
        """`then` where x compares with y in that direction (LT, EQ, GT)."""
        mask = self.c.add(
            "compare",
            hlo.with_type(self.shape, pb.PRED),
            [self._array(x), self._array(y)],
            comparison_direction=direction,
            comparison_type="SIGNED",
        )
        return self.c.add("select", self.shape, [mask, self._array(then), self._array(otherwise)])

    def _array(self, x: Instruction | int) -> Instruction:
        if isinstance(x, int):
            return arithmetic.broadcast(self.c, arithmetic.integers(self.c, [], [x]), self.shape)
        return arithmetic.convert(self.c, x, pb.S32)


def upper_half(c: Computation, x: Instruction) -> Instruction:
    """The codec bf16: elements as u16."""
    n, bits = _Integers.like(c, x), _bits(c, x)
    odd = n.do("and", n.do("shift-right-logical", bits, 16), 1)
    rounded = n.do("add", n.do("add", bits, 0x7FFF), odd)
    code = n.do("shift-right-logical", rounded, 16)
    magnitude = n.do("and", bits, 0x7FFF_FFFF)
    code = n.where(magnitude, "GT", 0x7F80_0000, _NAN >> 16, code)
    # Smaller elements are no multiples of 2^-126, with the 8 bits of a bfloat16.
    return arithmetic.convert(c, n.where(magnitude, "LT", 8 << _MANTISSA, 0, code), pb.U16)


def of_upper_half(c: Computation, x: Instruction) -> Instruction:
    """The float32s of `upper_half`."""
    bits = _Integers.like(c, x).do("shift-left", x, 16)
    return c.add("bitcast-convert", hlo.with_type(x.shape, pb.F32), [bits])


def scales(c: Computation, x: Instruction, codec: Codec) -> Instruction:
    """The scale of each block, as in the standard: a biased exponent, or 255; u8 [rows, blocks].

    Args:
      c: The computation.
      x: Floats [rows, blocks, BLOCK].
      codec: A codec with blocks.
    """
    *dims, _ = x.shape.dimensions
    magnitude = _Integers.like(c, x).do("and", _bits(c, x), 0x7FFF_FFFF)
    n = _Integers.like(c, x, dims)
    largest = c.add(
        "reduce",
        n.shape,
        [magnitude, arithmetic.integers(c, [], [0])],
        dimensions=[len(dims)],
        called_computation_ids=[arithmetic.reducer(c.module, "maximum", pb.S32).id],
    )
    exponent = n.do("shift-right-logical", largest, _MANTISSA)
    scale = n.do("subtract", exponent, codec.largest)
    scale = n.do("maximum", scale, codec.least_scale)
    return arithmetic.convert(c, n.where(exponent, "EQ", 255, _NAN_SCALE, scale), pb.U8)


def elements(c: Computation, x: Instruction, scale: Instruction, codec: Codec) -> Instruction:
    """The elements of each block as u8 [rows, blocks, bytes]; see `scales`."""
    n, bits = _Integers.like(c, x), _bits(c, x)
    exponent = n.do("and", n.do("shift-right-logical", bits, _MANTISSA), 255)
    leading = 1 << _MANTISSA
    significand = n.do("or", n.do("and", bits, leading - 1), leading)
    significand = n.where(exponent, "GT", 0, significand, 0)
    top = n.do("add", _along_block(c, scale, n.shape), codec.largest)
    below = n.do("maximum", n.do("subtract", top, exponent), 0)
    if codec.is_float:
        normal = n.do("maximum", n.do("subtract", 14, below), 0)  # biased exponent - 1
        shift = n.do("add", n.do("maximum", n.do("subtract", below, 14), 0), _MANTISSA - 3)
        code = n.do("add", _rounded(n, significand, shift), n.do("shift-left", normal, 3))
        code = n.do("minimum", code, codec.most)
        sign = n.do("and", n.do("shift-right-logical", bits, 24), 0x80)
        return arithmetic.convert(c, n.do("or", code, sign), pb.U8)
    shift = n.do("add", below, _MANTISSA - codec.unit)
    code = n.do("minimum", _rounded(n, significand, shift), codec.most)
    code = n.where(bits, "LT", 0, n.do("subtract", 0, code), code)
    code = n.do("and", code, (1 << codec.bits) - 1)
    return arithmetic.convert(c, code if codec.bits == 8 else _paired(c, code), pb.U8)


def values(c: Computation, codes: Instruction, scale: Instruction, codec: Codec) -> Instruction:
    """The float32s [rows, blocks, BLOCK] of `elements` and `scales`; zeros of zero bytes."""
    dims = [*scale.shape.dimensions, BLOCK]
    n = _Integers.like(c, codes, dims)
    code = arithmetic.convert(c, codes, pb.S32)
    if codec.is_float:
        exponent = n.do("and", n.do("shift-right-logical", code, 3), 15)
        leading = n.do("shift-left", n.do("minimum", exponent, 1), 3)
        number = n.do("or", n.do("and", code, 7), leading)
        number = n.do("shift-left", number, n.do("subtract", n.do("maximum", exponent, 1), 1))
        number = n.where(code, "GT", 127, n.do("subtract", 0, number), number)
    else:
        sign = 1 << (codec.bits - 1)
        code = code if codec.bits == 8 else _unpaired(c, code, n.shape)
        number = n.do("subtract", n.do("xor", code, sign), sign)
    few = _Integers.like(c, scale)
    exponent = few.do("subtract", few.do("maximum", scale, codec.least_scale), codec.unit)
    unit = few.do("shift-left", exponent, _MANTISSA)
    unit = c.add("bitcast-convert", hlo.with_type(scale.shape, pb.F32), [unit])
    shape = hlo.array_shape(pb.F32, dims)
    number = arithmetic.convert(c, number, pb.F32)
    product = c.add("multiply", shape, [number, _along_block(c, unit, shape)])
    bits = c.add("bitcast-convert", n.shape, [product])
    bits = n.where(_along_block(c, scale, n.shape), "EQ", _NAN_SCALE, _NAN, bits)
    return c.add("bitcast-convert", shape, [bits])


def slice_last(c: Computation, x: Instruction, start: int, size: int) -> Instruction:
    """`size` elements of the last dimension from `start`."""
    *dims, _ = x.shape.dimensions
    bounds = pb.SliceDimensions
    whole = [bounds(start=0, limit=dim, stride=1) for dim in dims]
    cut = bounds(start=start, limit=start + size, stride=1)
    shape = hlo.array_shape(x.shape.element_type, [*dims, size])
    return c.add("slice", shape, [x], slice_dimensions=[*whole, cut])


def _bits(c: Computation, x: Instruction) -> Instruction:
    x = arithmetic.convert(c, x, pb.F32)
    return c.add("bitcast-convert", hlo.with_type(x.shape, pb.S32), [x])


def _rounded(n: _Integers, significand: Instruction, shift: Instruction) -> Instruction:
    """Significand / 2^shift, to the nearest; ties to even."""
    shift = n.do("minimum", shift, _HIDDEN)
    half = n.do("subtract", n.do("shift-left", 1, n.do("subtract", shift, 1)), 1)
    odd = n.do("and", n.do("shift-right-logical", significand, shift), 1)
    total = n.do("add", n.do("add", significand, half), odd)
    return n.do("shift-right-logical", total, shift)


def _along_block(c: Computation, x: Instruction, shape: Shape) -> Instruction:
    """Each entry of x [rows, blocks] in all elements of its block."""
    wide = hlo.with_type(shape, x.shape.element_type)
    return c.add("broadcast", wide, [x], dimensions=range(len(x.shape.dimensions)))


def _paired(c: Computation, code: Instruction) -> Instruction:
    """Two elements of 4 bits in a byte: element i below element i + BLOCK / 2."""
    *dims, size = code.shape.dimensions
    n = _Integers.like(c, code, [*dims, size // 2])
    low, high = (slice_last(c, code, start, size // 2) for start in (0, size // 2))
    return n.do("or", low, n.do("shift-left", high, 4))


def _unpaired(c: Computation, code: Instruction, shape: Shape) -> Instruction:
    n = _Integers.like(c, code)
    halves = [n.do("and", code, 15), n.do("shift-right-logical", code, 4)]
    return c.add("concatenate", shape, halves, dimensions=[len(shape.dimensions) - 1])
