# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""E8M0 scales on f32 accumulators: no Apple instruction takes them.

A scale is a power of two, 2^(byte - 127). The product of two reaches from 2^-254 to 2^254, beyond
f32, and Apple GPUs flush denormals, so it is applied as two normal factors one after the other:
with ``s`` the sum of the biased exponents, 2^(s // 2 - 127) and 2^(s - s // 2 - 127). Byte 255 is
NaN and makes the product NaN.
"""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.apple import builder
from block32.lowering.apple.builder import splat_integer

#: The E8M0 byte of 1.0 and of NaN.
ONE = 127
NAN = 255

_QUIET_NAN_BITS = 0x7FC00000
_MANTISSA_BITS = 23


def split_exponent(total: int) -> tuple[int, int]:
    """Biased exponents of the two factors for a sum of two scale bytes, for the tests."""
    total = max(total, 2)
    return total // 2, total - total // 2


def factors(lhs: ir.Value | None, rhs: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The two f32 factors of the scales' product, element by element.

    Args:
        lhs: x's scale bytes as a vector of i32, or None where x has no scales.
        rhs: w's scale bytes as a vector of i32.

    Returns:
        Two f32 vectors; multiplying by one and then the other scales exactly.
    """
    kind = rhs.type
    count = ir.VectorType(kind).shape[0]

    def splat(value: int) -> ir.Value:
        return splat_integer(value, kind)

    is_nan = arith.cmpi(arith.CmpIPredicate.eq, rhs, splat(NAN))
    if lhs is None:
        total = arith.addi(rhs, splat(ONE))  # never below 2: no clamp is needed
    else:
        lhs_nan = arith.cmpi(arith.CmpIPredicate.eq, lhs, splat(NAN))
        is_nan = arith.ori(is_nan, lhs_nan)
        total = arith.addi(lhs, rhs)
        too_small = arith.cmpi(arith.CmpIPredicate.ult, total, splat(2))
        total = arith.select(too_small, splat(2), total)
    half = arith.shrui(total, splat(1))
    shift = splat(_MANTISSA_BITS)
    first = arith.shli(half, shift)
    first = arith.select(is_nan, splat(_QUIET_NAN_BITS), first)
    second = arith.shli(arith.subi(total, half), shift)
    result = builder.vector_type(count, builder.f32())
    return arith.bitcast(result, first), arith.bitcast(result, second)


def add_scaled(
    accumulator: ir.Value, product: ir.Value, scale: tuple[ir.Value, ir.Value]
) -> ir.Value:
    """``accumulator + product * scale``, the scale given as two factors."""
    contract = arith.FastMathFlags.contract
    scaled = arith.mulf(arith.mulf(product, scale[0]), scale[1], fastmath=contract)
    return arith.addf(accumulator, scaled, fastmath=contract)
