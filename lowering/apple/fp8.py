# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Vectors of stored elements as f32, exactly, with integer arithmetic.

Used where no matrix instruction does it: the GEMV. AIR converts vectors of floats only by calls,
whose fp8 spelling no toolchain has shown, and f32 denormals flush, so the codes are widened by
hand: magnitude bits go where f32 has them and the exponent's bias is added. A subnormal code is
built as ``2^e * (1 + m) - 2^e``, which is exact and never denormal.
"""

from __future__ import annotations

from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.apple import builder
from block32.lowering.apple.builder import splat_integer

_F32_BIAS = 127
_F32_MANTISSA = 23
_QUIET_NAN = 0x7FC00000
_INFINITY = 0x7F800000


@dataclass(frozen=True)
class Fp8Format:
    """An 8-bit float: its fields, and which magnitudes are special (OCP 8-bit FP, section 5).

    Attributes:
        mantissa: Bits of the mantissa.
        bias: Of the exponent.
        first_nan: Smallest magnitude code that is a NaN.
        infinity: Magnitude code of infinity, or None.
    """

    mantissa: int
    bias: int
    first_nan: int
    infinity: int | None

    @property
    def first_normal(self) -> int:
        """Smallest magnitude code that is no subnormal."""
        return 1 << self.mantissa


FORMATS = {
    "f8E4M3FN": Fp8Format(mantissa=3, bias=7, first_nan=0x7F, infinity=None),
    "f8E5M2": Fp8Format(mantissa=2, bias=15, first_nan=0x7D, infinity=0x7C),
}


def decode(codes: ir.Value, element: str) -> ir.Value:
    """A vector of stored elements as f32.

    Args:
        codes: A vector of the element's storage type (i8 for fp8).
        element: MLIR name of the element: an fp8, bf16, f16 or f32.
    """
    count = ir.VectorType(codes.type).shape[0]
    if element == "f32":
        return codes
    words = builder.vector_type(count, builder.i32())
    floats = builder.vector_type(count, builder.f32())
    if element == "bf16":
        halves = builder.vector_type(count, ir.IntegerType.get_signless(16))
        wide = arith.extui(words, arith.bitcast(halves, codes))
        return arith.bitcast(floats, arith.shli(wide, splat_integer(16, words)))
    if element == "f16":
        scalars = [builder.extract(codes, i) for i in range(count)]
        return builder.from_elements([arith.extf(builder.f32(), s) for s in scalars])
    return _decode_fp8(arith.extui(words, codes), FORMATS[element], floats)


def _decode_fp8(codes: ir.Value, fp8: Fp8Format, floats: ir.Type) -> ir.Value:
    words = codes.type

    def splat(value: int) -> ir.Value:
        return splat_integer(value, words)

    magnitude = arith.andi(codes, splat(0x7F))
    sign = arith.shli(arith.andi(codes, splat(0x80)), splat(24))
    shift = splat(_F32_MANTISSA - fp8.mantissa)
    aligned = arith.shli(magnitude, shift)
    normal = arith.addi(aligned, splat((_F32_BIAS - fp8.bias) << _F32_MANTISSA))

    one = (_F32_BIAS - fp8.bias + 1) << _F32_MANTISSA  # 2^(1 - bias), the subnormals' exponent
    above = arith.bitcast(floats, arith.addi(aligned, splat(one)))
    subnormal = arith.bitcast(words, arith.subf(above, arith.bitcast(floats, splat(one))))

    is_subnormal = arith.cmpi(arith.CmpIPredicate.ult, magnitude, splat(fp8.first_normal))
    value = arith.select(is_subnormal, subnormal, normal)
    if fp8.infinity is not None:
        infinite = arith.cmpi(arith.CmpIPredicate.eq, magnitude, splat(fp8.infinity))
        value = arith.select(infinite, splat(_INFINITY), value)
    is_nan = arith.cmpi(arith.CmpIPredicate.uge, magnitude, splat(fp8.first_nan))
    value = arith.select(is_nan, splat(_QUIET_NAN), value)
    return arith.bitcast(floats, arith.ori(value, sign))
