# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Folding: multiply operands by their scale once, instead of every block's sum.

A folded operand is value x 2^(byte - 127). That is exact, and no product of two folded operands
leaves the range of normal f32, while both bytes are in ``SAFE_BYTES``; for other bytes kernels take
the exact form, which rescales sums (``scales.py``). Real models' scales are near 127.
"""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith, vector

from block32.lowering.common.index import Index
from block32.lowering.cpu import ops
from block32.lowering.cpu.isa import InstructionSet

#: Bytes that may be folded. The smallest product of two e5m2 codes is 2^-32 and the largest below
#: 2^32: with 2^-44 to 2^44 from each side it stays between 2^-120 and 2^120.
SAFE_BYTES = range(127 - 44, 127 + 44 + 1)

#: Bytes that are looked at together.
_SCAN = 16


def all_safe(scales: ir.Value, start: Index, count: Index) -> ir.Value:
    """Whether the ``count`` scale bytes from ``start`` on may all be folded, as an i1.

    ``scales`` is a flat ``memref<? x i8>``; ``count`` is not zero.
    """
    # One unsigned comparison: bytes below the range wrap round to large numbers.
    lanes_type = ops.vector_type(_SCAN, ops.i8())
    low = ops.splat(SAFE_BYTES.start, lanes_type)
    whole = count // _SCAN * _SCAN

    def scan(i: Index, largest: list[ir.Value]) -> list[ir.Value]:
        offsets = arith.subi(ops.load(scales, [start + i], _SCAN), low)
        return [arith.maxui(largest[0], offsets)]

    (largest,) = ops.for_range(0, whole, _SCAN, [ops.splat(0, lanes_type)], scan)

    def scan_one(i: Index, so_far: list[ir.Value]) -> list[ir.Value]:
        byte = ops.load_scalar(scales, [start + i])
        offset = arith.subi(byte, ops.splat(SAFE_BYTES.start, ops.i8()))
        return [arith.maxui(so_far[0], offset)]

    reduced = vector.reduction(ops.i8(), vector.CombiningKind.MAXUI, largest)
    (reduced,) = ops.for_range(whole, count, 1, [reduced], scan_one)
    return arith.cmpi(arith.CmpIPredicate.ult, reduced, ops.splat(len(SAFE_BYTES), ops.i8()))


def power_of_two(scales: ir.Value) -> ir.Value:
    """2^(byte - 127) as f32 for safe bytes: the byte is the exponent field."""
    words = ops.convert(arith.extui, scales, ops.i32())
    bits = arith.shli(words, ops.splat(23, words.type))
    if ops.is_vector(bits.type):
        return ops.bitcast(bits, ops.f32())
    return arith.bitcast(ops.f32(), bits)


class Factors:
    """What an operand is multiplied by, in the form that the instruction set applies.

    f32 operands are multiplied by an f32. The exponent fields of a bf16 pair are raised by an
    integer, held twice in an i32: there is no bf16 multiplication.

    Attributes:
        type_text: The element type as text, for memrefs.
    """

    def __init__(self, isa: InstructionSet, unit: float = 1.0):
        """Factors for ``isa``, all multiplied by ``unit`` (see ``Decoder.unit``)."""
        self._is_float = isa.dot == "f32"
        self._unit = unit
        self.type_text = "f32" if self._is_float else "i32"

    def of(self, scale: ir.Value, is_folded: ir.Value) -> ir.Value:
        """The factors of scale bytes, or those of 1 where the i1 ``is_folded`` does not hold."""
        return self.of_safe(arith.select(is_folded, scale, ops.splat(127, scale.type)))

    def of_safe(self, scale: ir.Value) -> ir.Value:
        """The factors of scale bytes that are safe to fold."""
        if self._is_float:
            factor = power_of_two(scale)
            unit = ops.splat(self._unit, factor.type)
            return factor if self._unit == 1 else arith.mulf(factor, unit)
        words = ops.convert(arith.extui, scale, ops.i32())
        exponent = arith.subi(words, ops.splat(127, words.type))
        field = arith.shli(exponent, ops.splat(7, words.type))
        field = arith.andi(field, ops.splat(0xFFFF, words.type))
        return arith.muli(field, ops.splat(0x10001, words.type))

    def apply(self, operand: ir.Value, factors: ir.Value) -> ir.Value:
        """``operand`` times ``factors``, a vector of the register's 32-bit lanes."""
        if self._is_float:
            return arith.mulf(operand, factors)
        bits = ops.bitcast(operand, ops.i16())
        raised = arith.addi(bits, ops.bitcast(factors, ops.i16()))
        # Zeros and NaN have no exponent to raise; infinity and NaN share theirs.
        magnitude = arith.andi(bits, ops.splat(0x7FFF, bits.type))
        minimum_normal = ops.splat(0x0080, bits.type)
        infinity = ops.splat(0x7F80 - 0x0080, bits.type)
        offset = arith.subi(magnitude, minimum_normal)
        is_normal = arith.cmpi(arith.CmpIPredicate.ult, offset, infinity)
        return ops.bitcast(arith.select(is_normal, raised, bits), ir.BF16Type.get())
