# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""E8M0 scales on f32 accumulators: no Apple instruction takes them.

A scale is a power of two, 2^(byte - 127). The product of two reaches from 2^-254 to 2^254, beyond
f32, and Apple GPUs flush denormals, so it is applied as two normal factors one after the other.
Each byte is split into two halves, 2^floor((byte - 127) / 2) and what is left; x's smaller half
goes with w's larger one, so that the largest product of halves is 2^127. Byte 255 is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.apple import builder
from block32.lowering.apple.builder import splat_integer

#: The E8M0 byte of NaN.
NAN = 255

_BIAS = 127
_MANTISSA_BITS = 23
_EXPONENT_MASK = 0x7F800000
_QUIET_NAN_BITS = 0x7FC00000
_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Factors:
    """Two f32 values, scalars or vectors; multiplying by one and then the other scales exactly."""

    first: ir.Value
    second: ir.Value


def factors(codes: ir.Value, larger_first: bool = False) -> Factors:
    """The factors of scale bytes, element by element.

    Args:
        codes: The bytes as an i32 or a vector of them.
        larger_first: Whether the larger factor comes first.
    """
    kind = codes.type
    is_vector = isinstance(kind, ir.VectorType)

    def constant(value: int) -> ir.Value:
        return splat_integer(value, kind) if is_vector else builder.as_value(value, kind)

    # The sum's half lies where an exponent lies; what the mask drops is the sum's lowest bit.
    below = _MANTISSA_BITS - 1
    shifted = arith.shli(codes, constant(below))
    mask = constant(_EXPONENT_MASK)
    smaller = arith.andi(arith.addi(shifted, constant(_BIAS << below)), mask)
    larger = arith.andi(arith.addi(shifted, constant((_BIAS + 1) << below)), mask)
    is_nan = arith.cmpi(arith.CmpIPredicate.eq, codes, constant(NAN))
    smaller = arith.select(is_nan, constant(_QUIET_NAN_BITS), smaller)
    result = builder.f32()
    if isinstance(kind, ir.VectorType):
        result = builder.vector_type(kind.shape[0], result)
    halves = [arith.bitcast(result, bits) for bits in (smaller, larger)]
    return Factors(halves[1], halves[0]) if larger_first else Factors(halves[0], halves[1])


def combine(lhs: Factors, rhs: Factors, keep_infinity: bool) -> Factors:
    """The factors of a product of two scales, whose smaller halves are on opposite sides.

    Products below 2^-126 flush to zero. That is right for every finite sum of 32 fp8 products, but
    it would make NaN of an infinite one; ``keep_infinity`` (where a type has infinities) raises
    such factors to 2^-126.
    """
    products = (arith.mulf(lhs.first, rhs.first), arith.mulf(lhs.second, rhs.second))
    if keep_infinity:
        smallest = builder.float_constant(_SMALLEST_NORMAL, products[0].type)
        products = tuple(
            arith.select(arith.cmpf(arith.CmpFPredicate.OLT, value, smallest), smallest, value)
            for value in products
        )
    return Factors(*products)


def add_scaled(accumulator: ir.Value, product: ir.Value, scale: Factors) -> ir.Value:
    """``accumulator + product * scale``."""
    contract = arith.FastMathFlags.contract
    scaled = arith.mulf(arith.mulf(product, scale.first), scale.second, fastmath=contract)
    return arith.addf(accumulator, scaled, fastmath=contract)
