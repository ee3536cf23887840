# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Folding: multiply operands by their scale once, instead of every block's sum.

A folded operand is value x 2^(byte - 127). That is exact, and no product of two folded operands
leaves the range of normal f32, while both bytes are in ``SAFE_BYTES``; for other bytes kernels take
the exact form, which rescales sums (``scales.py``). Real scales are near 127, but for blocks
of zeros, to which quantisers give byte 0: these may be folded whatever their byte, except NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith, vector

from block32.lowering.common.index import Index, IndexValue, minimum
from block32.lowering.common.weight_layout import WeightLayout
from block32.lowering.cpu import ops
from block32.lowering.cpu.formats import SMALL_FLOATS
from block32.lowering.cpu.isa import InstructionSet
from block32.lowering.cpu.scales import NAN_BYTE, integer_exponents
from block32.lowering.problem import BLOCK_K, ScaledMatmul

#: Bytes that may be folded. The smallest product of two e5m2 codes is 2^-32 and the largest below
#: 2^32: with 2^-44 to 2^44 from each side it stays between 2^-120 and 2^120.
SAFE_BYTES = range(127 - 44, 127 + 44 + 1)

#: Bytes that are looked at together.
_SCAN = 16


@dataclass(frozen=True)
class FoldCheck:
    """Decides whether the scales of some rows of an operand may be folded.

    Attributes:
        problem: Says K.
        element: The element type of the operand.
        codes: Its codes, ``memref<rows x bytes x i8>``, or ``memref<pieces x bytes x i8>``.
        scales: Its scale bytes as one row.
        rows: Rows of the operand.
        share: Rows that share a scale.
        layout: The order of its bytes, where that is not the plain one.
    """

    problem: ScaledMatmul
    element: str
    codes: ir.Value
    scales: ir.Value
    rows: Index
    share: int
    layout: WeightLayout | None = None

    def may_fold(self, first: Index, count: Index) -> ir.Value:
        """Whether ``count`` rows of scales from ``first`` on may be folded, as an i1."""
        blocks = self.problem.k_blocks
        quick = _all_safe(self.scales, first * blocks, count * blocks)
        (result,) = ops.choose_values(
            quick,
            [quick.type],
            lambda: [quick],
            lambda: [self._no_unsafe_block(first, first + count)],
        )
        return result

    def _no_unsafe_block(self, first: Index, last: Index) -> ir.Value:
        """The thorough look, at codes too where a byte is not safe."""
        full, tail = divmod(self.problem.k, BLOCK_K)
        true = ops.splat(1, ops.i1())

        def row(scale_row: IndexValue, so_far: list[ir.Value]) -> list[ir.Value]:
            def block(i: Index, so_far: list[ir.Value]) -> list[ir.Value]:
                return [arith.andi(so_far[0], self._block_may_fold(scale_row, i, BLOCK_K))]

            so_far = ops.for_range(0, full, 1, so_far, block)
            if tail:
                so_far = [arith.andi(so_far[0], self._block_may_fold(scale_row, full, tail))]
            return so_far

        return ops.for_range(first, last, 1, [true], row)[0]

    def _block_may_fold(self, scale_row: Index, block: Index, count: int) -> ir.Value:
        byte = ops.load_scalar(self.scales, [scale_row * self.problem.k_blocks + block])
        is_safe = _is_safe(arith.subi(byte, ops.splat(SAFE_BYTES.start, byte.type)))
        (result,) = ops.choose_values(
            is_safe,
            [is_safe.type],
            lambda: [is_safe],
            lambda: [self._is_zero_block(byte, scale_row, block, count)],
        )
        return result

    def _is_zero_block(
        self, byte: ir.Value, scale_row: Index, block: Index, count: int
    ) -> ir.Value:
        """Whether a block holds zeros alone and its scale is a number."""
        small = SMALL_FLOATS[self.element]
        per_byte = 8 // small.bits
        width = BLOCK_K // per_byte
        first = scale_row * self.share
        nothing = ops.splat(0, ops.vector_type(width, ops.i8()))

        def combine(row: IndexValue, so_far: list[ir.Value]) -> list[ir.Value]:
            codes = self._load_codes(row, block * width, -(-count // per_byte), width)
            return [arith.ori(so_far[0], codes)]

        last = minimum(first + self.share, self.rows)
        (bits,) = ops.for_range(first, last, 1, [nothing], combine)
        magnitudes = ops.splat(small.magnitude_mask * (0x11 if small.bits == 4 else 1), bits.type)
        combined = vector.reduction(ops.i8(), vector.CombiningKind.OR, arith.andi(bits, magnitudes))
        zero, nan = (ops.splat(value, ops.i8()) for value in (0, NAN_BYTE))
        is_zero = arith.cmpi(arith.CmpIPredicate.eq, combined, zero)
        return arith.andi(is_zero, arith.cmpi(arith.CmpIPredicate.ne, byte, nan))

    def _load_codes(self, row: Index, byte: Index, count: int, width: int) -> ir.Value:
        """``count`` neighbouring bytes of a row, and zeros up to ``width``."""
        if self.layout is None:
            return ops.load_first(self.codes, [row, byte], count, width)
        bytes_of_row = self.problem.k * SMALL_FLOATS[self.element].bits // 8
        inside = row % self.layout.rows * self.layout.row_bytes
        pieces = [
            ops.load(
                self.codes,
                [self.layout.piece_of(row, byte + at, bytes_of_row), inside],
                self.layout.row_bytes,
            )
            for at in range(0, width, self.layout.row_bytes)
        ]
        return ops.join(pieces)


def _is_safe(offset: ir.Value) -> ir.Value:
    """Whether a byte less the least safe one is in range: smaller bytes wrap to large numbers."""
    return arith.cmpi(arith.CmpIPredicate.ult, offset, ops.splat(len(SAFE_BYTES), offset.type))


def _all_safe(scales: ir.Value, start: Index, count: Index) -> ir.Value:
    """Whether the ``count`` scale bytes from ``start`` on are all safe, as an i1."""
    lanes_type = ops.vector_type(_SCAN, ops.i8())
    low = ops.splat(SAFE_BYTES.start, lanes_type)
    whole = count // _SCAN * _SCAN

    def scan(i: Index, largest: list[ir.Value]) -> list[ir.Value]:
        offsets = arith.subi(ops.load(scales, [start + i], _SCAN), low)
        return [arith.maxui(largest[0], offsets)]

    def scan_one(i: Index, largest: list[ir.Value]) -> list[ir.Value]:
        byte = ops.load_scalar(scales, [start + i])
        offset = arith.subi(byte, ops.splat(SAFE_BYTES.start, ops.i8()))
        return [arith.maxui(largest[0], offset)]

    (largest,) = ops.for_range(0, whole, _SCAN, [ops.splat(0, lanes_type)], scan)
    reduced = vector.reduction(ops.i8(), vector.CombiningKind.MAXUI, largest)
    (reduced,) = ops.for_range(whole, count, 1, [reduced], scan_one)
    return _is_safe(reduced)


def power_of_two(scales: ir.Value, unit: float = 1.0) -> ir.Value:
    """``unit`` times 2^(byte - 127) as f32 for safe bytes: the byte is the exponent field.

    Larger bytes belong to blocks of zeros: they get a factor that stays finite when multiplied on.
    """
    scales = arith.minui(scales, ops.splat(SAFE_BYTES.stop - 1, scales.type))
    words = ops.convert(arith.extui, scales, ops.i32())
    bits = arith.shli(words, ops.splat(23, words.type))
    is_vector = ops.is_vector(bits.type)
    power = ops.bitcast(bits, ops.f32()) if is_vector else arith.bitcast(ops.f32(), bits)
    return power if unit == 1 else arith.mulf(power, ops.splat(unit, power.type))


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
            return power_of_two(scale, self._unit)
        exponent = integer_exponents(scale)
        field = arith.shli(exponent, ops.splat(7, exponent.type))
        field = arith.andi(field, ops.splat(0xFFFF, field.type))
        return arith.muli(field, ops.splat(0x10001, field.type))

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
