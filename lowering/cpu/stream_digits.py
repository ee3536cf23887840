# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The stream kernel for 4-bit weights whose products are integers (see ``digits``)."""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import Index
from block32.lowering.cpu import digits, ops, pack
from block32.lowering.cpu.stream import Stream
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ScaledMatmul


def emit_stream_digits(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    """Write the kernel: a workgroup computes ``tile[1]`` columns of y for all rows."""
    _DigitStream(problem, tier, kernel).emit()


class _DigitStream(Stream):
    """The stream kernel with chunks of 128 K and sums of integers."""

    def bind_x(self, tier: KernelTier) -> None:
        """Bind the packed digits; sums of integers are scaled, however many rows there are."""
        self.scales_weights = False
        rows = pack.stream_rows(tier)
        self.x = digits.values(self.kernel, pack.VALUES, rows)
        self.x_scales = digits.scales(self.kernel, pack.EXPONENTS, rows)
        self._table = digits.weight_table()

    def decode(self, weight_row: Index, k: Index, count: int, raw: bool) -> list[ir.Value]:
        """Even and odd weights; a code past K meets digits that are zeros."""
        data = self.decoder.load_bytes(self.weights, weight_row, k, count, self.chunk)
        words = ops.bitcast(data, ops.i16())
        odd = ops.bitcast(arith.shrui(words, ops.splat(4, words.type)), ops.i8())
        permute = "llvm.x86.avx512.permvar.qi.512"
        return [ops.intrinsic(permute, data.type, [self._table, codes]) for codes in (data, odd)]

    def chunk_sums(self, weights: list[ir.Value], slab: Index, row: int, chunk: Index) -> ir.Value:
        """Sums of integers, as f32."""
        *x_digits, correction = [
            self._register(slab, row, chunk, register) for register in range(digits.REGISTERS)
        ]
        sums = digits.dot(weights, [ops.bitcast(digit, ops.i8()) for digit in x_digits])
        return ops.convert(arith.sitofp, arith.addi(sums, correction), ops.f32())

    def _register(self, slab: Index, row: int, chunk: Index, register: int) -> ir.Value:
        return ops.load(self.x, [slab * self.rows + row, chunk, register, 0], digits.LANES, 64)

    def sum_factors(self, factors: ir.Value, slab: Index, row: int, chunk: Index) -> ir.Value:
        """The scales of w with those of x, which digits cannot take up."""
        return arith.mulf(factors, self._x_scales(slab, row, chunk, digits.FACTORS))

    def load_x_exponents(self, slab: Index, row: int, chunk: Index) -> ir.Value:
        """The exponents of a row of x for a chunk, with that of the integers' unit."""
        return self._x_scales(slab, row, chunk, digits.EXPONENTS)

    def _x_scales(self, slab: Index, row: int, chunk: Index, kind: int) -> ir.Value:
        return ops.load(self.x_scales, [slab * self.rows + row, chunk, kind, 0], digits.LANES, 64)
