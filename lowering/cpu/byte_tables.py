# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Codes become bf16 by look-ups in tables of 16 bytes: ``tbl`` and ``tbx`` of aarch64.

The low and the high byte of 16 bf16 are made apart and then interleaved. For a normal number both
are simple: the low byte is the code shifted, and the high byte depends on the code's high bits
alone. What is not normal (subnormals, infinity, NaN) lies at both ends of the magnitudes: counted
from a little before zero, they are the first ones, and replaced from a second table, since ``tbx``
keeps the bytes whose index is past its table.
"""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.cpu import ops
from block32.lowering.cpu.formats import SmallFloat

#: Bytes of a register and entries of a table.
BYTES = 16


class ByteTables:
    """The tables of one format, built at the insertion point.

    Attributes:
        small: The format.
    """

    def __init__(self, small: SmallFloat):
        """Build the tables."""
        self.small = small
        if small.bits == 4:
            self._low = _table([small.bf16_bits(i) & 255 for i in range(BYTES)])
            self._high = _table([small.bf16_bits(i) >> 8 for i in range(BYTES)])
            return
        # An exponent's lowest bit is in the low byte of a bf16. It stays what it is, since the
        # biases differ by an even number.
        self._shift = small.mantissa_bits + 1
        magnitudes = range(128 >> self._shift)
        high = [sign + (127 - small.bias) // 2 + i for sign in (0, 128) for i in magnitudes]
        self._high_of_normals = [_table(high[at : at + BYTES]) for at in range(0, len(high), BYTES)]
        # As many magnitudes have the largest exponent, and as many the smallest.
        self._before_zero = 1 << small.mantissa_bits
        special = [
            small.bf16_bits(i - self._before_zero & small.magnitude_mask) for i in range(BYTES)
        ]
        self._special_low = _table([bits & 255 for bits in special])
        self._special_high = _table([bits >> 8 for bits in special])

    def pairs(self, codes: ir.Value) -> list[ir.Value]:
        """Decode 16 codes, one a byte, into two registers of 8 bf16 in the order of the codes."""
        low, high = self._halves(codes)
        return [
            ops.bitcast(
                ops.shuffle(low, high, [at + i for at in positions for i in (0, BYTES)]),
                ir.BF16Type.get(),
            )
            for positions in (range(8), range(8, 16))
        ]

    def _halves(self, codes: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The low and the high bytes of 16 bf16."""
        type_, small = codes.type, self.small
        if small.bits == 4:
            return _look_up([self._low], codes), _look_up([self._high], codes)
        low = arith.shli(codes, ops.splat(8 - self._shift, type_))
        high = _look_up(self._high_of_normals, arith.shrui(codes, ops.splat(self._shift, type_)))
        number = arith.addi(codes, ops.splat(self._before_zero, type_))
        number = arith.andi(number, ops.splat(small.magnitude_mask, type_))
        low = _replace(low, self._special_low, number)
        high = _replace(high, self._special_high, number)
        sign = arith.andi(codes, ops.splat(small.sign_mask, type_))
        magnitude = arith.andi(high, ops.splat(small.magnitude_mask, type_))
        return low, arith.ori(magnitude, sign)


def _table(entries: list[int]) -> ir.Value:
    return ops.int_table(entries, ops.i8())


def _look_up(tables: list[ir.Value], indices: ir.Value) -> ir.Value:
    """The entries of consecutive tables."""
    name = f"llvm.aarch64.neon.tbl{len(tables)}.v16i8"
    return ops.intrinsic(name, indices.type, [*tables, indices])


def _replace(values: ir.Value, table: ir.Value, indices: ir.Value) -> ir.Value:
    """``values``, or the table's entry where there is one."""
    return ops.intrinsic("llvm.aarch64.neon.tbx1.v16i8", values.type, [values, table, indices])
