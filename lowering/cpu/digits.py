# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""4-bit weights times small activations as integers, for the stream kernel.

Twice an e2m1 value is an integer, and so is 2^9 times an e4m3 value. Where an instruction adds four
products of bytes to a 32-bit lane, that takes fewer instructions than products of floats: a weight
becomes an operand by one look-up of bytes, and a register holds 64 of them. The activation has up
to 18 bits and is packed as three *digits* of 7 bits, each with the sign of the whole. Sums of a
block are exact: eight products of at most 12 x 448 x 2^9 fit a 32-bit lane.

The instruction multiplies unsigned with signed bytes, so that weights are looked up with ``BIAS``
added, and a *correction*, which depends on x alone, is packed with it.

A chunk is 128 K: 64 bytes of w. Its even codes are one operand, its odd codes another, and lane i
of the sums belongs to the K from 8 i on.
"""

from __future__ import annotations

from collections.abc import Sequence

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.kernel import KernelTier
from block32.lowering.common.weight_layout import PLAIN
from block32.lowering.cpu import ops
from block32.lowering.cpu.formats import SMALL_FLOATS, SmallFloat
from block32.lowering.cpu.isa import instruction_set
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ScaledMatmul, ceil_div

#: Elements of K in a chunk.
CHUNK = 128
#: Bytes of an operand.
BYTES = 64
#: Added to twice a weight, which is at least -12.
BIAS = 12
#: Digits of an activation, and bits of a digit.
DIGITS, DIGIT_BITS = 3, 7
#: Registers of a packed chunk: the digits of even and of odd codes, and the correction.
REGISTERS = 2 * DIGITS + 1
LANES = 16
#: What is packed of the scales of x: factors where they are safe to fold, and exponents.
FACTORS, EXPONENTS = 0, 1
_WEIGHT = "f4E2M1FN"
#: Activations whose integers have no more digits than that.
_ACTIVATIONS = ("f8E4M3FN", "f4E2M1FN")


def serves(problem: ScaledMatmul, tier: KernelTier) -> bool:
    """Whether a tier multiplies as integers; the activation may be one that is quantised first."""
    packed = problem.quantized() if problem.lhs_quantize else problem
    return (
        tier.form == "stream"
        and tier.weight_layout == PLAIN
        and instruction_set(tier.isa).byte_products
        and problem.rhs == _WEIGHT
        and packed.lhs in _ACTIVATIONS
    )


def chunks(problem: ScaledMatmul) -> int:
    """Chunks of K; the last may be short."""
    return ceil_div(problem.k, CHUNK)


def values(kernel: KernelContext, name: str, rows: int) -> ir.Value:
    """The packed activation as the buffer ``name``: ``[row][chunk][register][lane]``."""
    count = chunks(kernel.problem)
    return kernel.memref(name, f"memref<{rows}x{count}x{REGISTERS}x{LANES}xi32>")


def scales(kernel: KernelContext, name: str, rows: int) -> ir.Value:
    """The scales of x as the buffer ``name``: ``[row][chunk][FACTORS or EXPONENTS][lane]``.

    Both are those of the sums of integers, and NaN where a lane's codes or its scale are.
    """
    count = chunks(kernel.problem)
    return kernel.memref(name, f"memref<{rows}x{count}x2x{LANES}xf32>")


def values_size(problem: ScaledMatmul) -> int:
    """32-bit elements of a row of the packed activation."""
    return chunks(problem) * REGISTERS * LANES


def scales_size(problem: ScaledMatmul) -> int:
    """32-bit elements of a row of its scales."""
    return chunks(problem) * 2 * LANES


def unit_exponent(lhs: str) -> int:
    """The power of two that sums of integers with an activation of type ``lhs`` stand for."""
    return -sum(_fraction_bits(SMALL_FLOATS[name]) for name in (lhs, _WEIGHT))


def _fraction_bits(small: SmallFloat) -> int:
    """Bits after the binary point of every value of a format."""
    return small.bias - 1 + small.mantissa_bits


def weight_table() -> ir.Value:
    """Twice the value of a 4-bit code plus ``BIAS``; the two bits above an index do not count."""
    return ops.int_table(
        [_integer(SMALL_FLOATS[_WEIGHT], i % 16) + BIAS for i in range(BYTES)], ops.i8()
    )


def _integer(small: SmallFloat, code: int) -> int:
    """A code's value as an integer; zero for what is no number."""
    magnitude = code & small.magnitude_mask
    if magnitude >= small.first_special:
        return 0
    value = int(small.magnitude(magnitude) * 2 ** _fraction_bits(small))
    return -value if code & small.sign_mask else value


class DigitTables:
    """Looks up the digits of activations; the tables are built where it is created."""

    def __init__(self, format_name: str):
        """Build the tables at the insertion point."""
        self._small = SMALL_FLOATS[format_name]
        mask = self._small.magnitude_mask
        integers = [_integer(self._small, i & mask) for i in range(2 * BYTES)]
        self._tables = []
        for digit in range(DIGITS):
            digits = [i >> digit * DIGIT_BITS & (1 << DIGIT_BITS) - 1 for i in integers]
            self._tables.append(
                [ops.int_table(half, ops.i8()) for half in (digits[:BYTES], digits[BYTES:])]
            )

    def digits(self, codes: ir.Value) -> list[ir.Value]:
        """The digits of 64 codes, the lowest first; those of NaN are zeros."""
        zeros = ops.splat(0, codes.type)
        sign = arith.andi(codes, ops.splat(self._small.sign_mask, codes.type))
        is_negative = arith.cmpi(arith.CmpIPredicate.ne, sign, zeros)
        found = []
        for low, high in self._tables:
            # The permute reads the low 7 bits of an index.
            permute = "llvm.x86.avx512.vpermi2var.qi.512"
            digit = ops.intrinsic(permute, codes.type, [low, codes, high])
            found.append(arith.select(is_negative, arith.subi(zeros, digit), digit))
        return found

    def is_nan(self, codes: Sequence[ir.Value]) -> ir.Value:
        """Which lanes hold a NaN in one of several vectors of 64 codes: 16 of i1."""
        lanes = ops.splat(0, ops.vector_type(LANES, ops.i32()))
        found = lanes
        for vector in codes if self._small.has_specials else ():
            mask = ops.splat(self._small.magnitude_mask, vector.type)
            special = ops.splat(self._small.first_special, vector.type)
            is_special = arith.cmpi(arith.CmpIPredicate.uge, arith.andi(vector, mask), special)
            marks = ops.convert(arith.extui, is_special, ops.i8())
            found = arith.ori(found, ops.bitcast(marks, ops.i32()))
        return arith.cmpi(arith.CmpIPredicate.ne, found, lanes)


def dot(weights: Sequence[ir.Value], registers: Sequence[ir.Value]) -> ir.Value:
    """The sum of integer products a lane, without the correction.

    Args:
        weights: Even and odd weights of a chunk, each plus ``BIAS``.
        registers: Digits of x in the order of memory, the highest first: even, then odd codes.
    """
    sums = ops.splat(0, ops.vector_type(LANES, ops.i32()))
    for first in range(0, 2 * DIGITS, 2):
        if first:
            sums = arith.shli(sums, ops.splat(DIGIT_BITS, sums.type))
        for weight, digits in zip(weights, registers[first : first + 2], strict=True):
            sums = _add_byte_products(sums, weight, digits)
    return sums


def _add_byte_products(sums: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """To each lane of ``sums``, four products of bytes."""
    return ops.intrinsic("llvm.x86.avx512.vpdpbusd.512", sums.type, [sums, unsigned, signed])
