# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scale bytes (E8M0) become exponents, and exponents rescale sums, exactly for every byte.

Two scales multiply by adding their exponents first: 2^-127 is a subnormal f32, which workers flush
to zero, and 2^127 x 2^127 overflows where a small sum would have brought it back.
"""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.cpu import ops
from block32.lowering.cpu.isa import InstructionSet

#: The scale byte of 1.
ONE_BYTE = 127
#: The scale byte of NaN.
NAN_BYTE = 255
#: Added to the integer exponent of a NaN scale; sums of exponents stay above half of it.
_NAN_MARK = 1 << 20


def integer_exponents(scales: ir.Value) -> ir.Value:
    """The exponents of one byte or of a vector of bytes, as i32."""
    words = ops.convert(arith.extui, scales, ops.i32())
    return arith.subi(words, ops.splat(ONE_BYTE, words.type))


class Exponents:
    """Exponents in the form that the instruction set rescales with.

    ``scalef`` takes f32 exponents, where NaN stands for itself; ``two_factors`` takes i32.

    Attributes:
        type: The element type of exponents.
        type_text: The same as text, for memrefs.
    """

    def __init__(self, isa: InstructionSet):
        """Exponents for ``isa``."""
        self._isa = isa
        self._is_float = isa.rescale == "scalef"
        self.type_text = "f32" if self._is_float else "i32"

    @property
    def type(self) -> ir.Type:
        """The element type of exponents."""
        return ops.f32() if self._is_float else ops.i32()

    def zero(self) -> ir.Value:
        """The exponent of a scale of 1."""
        return ops.splat(0, self.type)

    def from_bytes(self, scales: ir.Value) -> ir.Value:
        """Exponents of one byte or of a vector of bytes."""
        words = ops.convert(arith.extui, scales, ops.i32())
        exponent = integer_exponents(scales)
        is_nan = arith.cmpi(arith.CmpIPredicate.eq, words, ops.splat(NAN_BYTE, words.type))
        if not self._is_float:
            marked = arith.addi(exponent, ops.splat(_NAN_MARK, words.type))
            return arith.select(is_nan, marked, exponent)
        as_float = ops.convert(arith.sitofp, exponent, ops.f32())
        return arith.select(is_nan, ops.splat(float("nan"), as_float.type), as_float)

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The exponent of the product of two scales."""
        return arith.addf(a, b) if self._is_float else arith.addi(a, b)

    def rescale(self, sums: ir.Value, exponents: ir.Value) -> ir.Value:
        """``sums`` times 2^``exponents``; both are vectors of a register's lanes."""
        if self._is_float:
            return self._scalef(sums, exponents)
        return self._two_factors(sums, exponents)

    def _scalef(self, sums: ir.Value, exponents: ir.Value) -> ir.Value:
        zeros = ops.splat(0, sums.type)
        all_lanes = ops.splat(-1, ops.i16())
        current_rounding = ops.splat(4, ops.i32())
        return ops.intrinsic(
            "llvm.x86.avx512.mask.scalef.ps.512",
            sums.type,
            [sums, exponents, zeros, all_lanes, current_rounding],
        )

    def _two_factors(self, sums: ir.Value, exponents: ir.Value) -> ir.Value:
        """Multiply by 2^floor(e/2) and 2^(e - floor(e/2)): both are normal f32.

        Below -252 every sum of 32 products is less than the smallest f32, so the clamp is exact.
        """
        type_ = exponents.type
        is_nan = arith.cmpi(arith.CmpIPredicate.sgt, exponents, ops.splat(_NAN_MARK // 2, type_))
        clamped = arith.maxsi(exponents, ops.splat(-252, type_))
        clamped = arith.minsi(clamped, ops.splat(254, type_))
        first = arith.shrsi(clamped, ops.splat(1, type_))
        second = arith.subi(clamped, first)
        quiet_nan = ops.splat(0x7FC00000, type_)
        first_factor = _power_of_two(arith.select(is_nan, quiet_nan, _float_bits(first)))
        return arith.mulf(arith.mulf(sums, first_factor), _power_of_two(_float_bits(second)))


def _float_bits(exponent: ir.Value) -> ir.Value:
    """The bits of 2^exponent as f32, for -126 to 127."""
    biased = arith.addi(exponent, ops.splat(127, exponent.type))
    return arith.shli(biased, ops.splat(23, exponent.type))


def _power_of_two(bits: ir.Value) -> ir.Value:
    return ops.bitcast(bits, ops.f32())
