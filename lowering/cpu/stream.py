# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The stream kernel: few rows of x, the weight read once in the order of memory.

Lanes run along K, so a row of w is read from end to end, decoded in registers and multiplied with
every row of x. At the row's end the lanes are summed. All of x stays in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import Index, IndexValue, minimum
from block32.lowering.cpu import operands, ops, pack
from block32.lowering.cpu.decode import IN_LANE, Decoder
from block32.lowering.cpu.isa import instruction_set
from block32.lowering.cpu.registers import lane_sum, multiply_add, zero_accumulator
from block32.lowering.cpu.scales import Exponents
from block32.lowering.cpu.store import GROUP, ResultStore
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ScaledMatmul

#: Bytes of stack that the exponents of a 32-row block may take; IREE allows 32 KiB in all.
_EXPONENT_STACK = 24 * 1024


def emit_stream(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    """Write the kernel: a workgroup computes ``tile[1]`` columns of y for all rows."""
    _Stream(problem, tier, kernel).emit()


class _Stream:
    """What the parts of the kernel share: buffers, tables, and the tile in registers."""

    def __init__(self, problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext):
        assert tier.tile is not None and tier.mma is not None
        self.problem = problem
        self.kernel = kernel
        self.isa = instruction_set(tier.isa)
        self.rows = tier.tile[0]
        self.weight_rows = tier.mma[1]
        self.columns = tier.tile[1]
        self.exponents = Exponents(self.isa)
        self.decoder = Decoder(self.isa, problem.rhs)
        self.weights = operands.rhs_codes(kernel)
        self.scales = operands.rhs_scales(kernel)
        self.x = pack.row_values(kernel, self.isa, self.rows)
        self.x_exponents = pack.row_exponents(kernel, self.isa, self.rows)
        self.result = ResultStore(kernel)
        self.sums = ops.stack_buffer(f"memref<{self.rows}x{GROUP}xf32>")
        self.block_exponents = self._block_exponent_buffer()

    def _block_exponent_buffer(self) -> ir.Value | None:
        """Stack for the exponents of 32 rows, where these are shared and fit."""
        chunks = operands.padded_k(self.problem, self.isa) // self.isa.chunk
        fits = chunks * self.isa.lanes * 4 <= _EXPONENT_STACK
        if self.problem.rhs_block[0] == 1 or not fits:
            return None
        text = self.exponents.type_text
        return ops.stack_buffer(f"memref<{chunks}x{self.isa.lanes}x{text}>")

    def emit(self) -> None:
        """The loop over the workgroup's groups of 16 columns."""
        first = self.kernel.workgroup_id() * self.columns
        last = minimum(first + self.columns, self.problem.n)
        ops.repeat(first, last, GROUP, self._group)

    def _group(self, column: IndexValue) -> None:
        """16 rows of w, then 16 columns of y."""
        n = self.problem.n
        if self.block_exponents is not None:
            self._fill_block_exponents(column // self.problem.rhs_block[0])
        present: Index = GROUP if n % GROUP == 0 else minimum(n - column, GROUP)
        ops.repeat(0, present, self.weight_rows, lambda r: self._weight_rows(column, r))
        for row in range(self.rows):
            if isinstance(self.kernel.m, int):
                if row < self.kernel.m:
                    self._store_row(row, column)
            else:
                with ops.when(ops.is_below(row, self.kernel.m)):
                    self._store_row(row, column)

    def _store_row(self, row: int, column: Index) -> None:
        self.result.store(ops.load(self.sums, [row, 0], GROUP), row, column)

    def _fill_block_exponents(self, scale_row: Index) -> None:
        def fill(chunk: Index, count: int, _: list[ir.Value]) -> Sequence[ir.Value]:
            lanes = self._load_exponents(scale_row, chunk, count)
            ops.store(lanes, self.block_exponents, [chunk, 0])
            return []

        operands.for_chunks(self.problem.k, self.isa.chunk, [], fill)

    def _load_exponents(self, scale_row: Index, chunk: Index, count: int) -> ir.Value:
        return operands.chunk_exponents(
            self.exponents, self.isa, self.scales, scale_row, chunk, count
        )

    def _weight_rows(self, column: Index, offset: Index) -> None:
        """Dot products of a few rows of w with all rows of x, into the sums on the stack."""
        last = self.problem.n - 1
        weight_rows = [column + offset + j for j in range(self.weight_rows)]
        if self.problem.n % GROUP:
            weight_rows = [minimum(row, last) for row in weight_rows]

        def multiply_chunk(chunk: Index, count: int, carried: list[ir.Value]) -> list[ir.Value]:
            return self._multiply_chunk(weight_rows, chunk, count, carried)

        zeros = [zero_accumulator(self.isa)] * (self.weight_rows * self.rows)
        totals = operands.for_chunks(self.problem.k, self.isa.chunk, zeros, multiply_chunk)
        for i, total in enumerate(totals):
            j, row = divmod(i, self.rows)
            ops.store_scalar(lane_sum(total), self.sums, [row, offset + j])

    def _multiply_chunk(
        self, weight_rows: list[Index], chunk: Index, count: int, carried: list[ir.Value]
    ) -> list[ir.Value]:
        """One chunk of K: each partial sum of a block is rescaled, then added."""
        isa = self.isa
        k = chunk * isa.chunk
        totals = list(carried)
        for j, weight_row in enumerate(weight_rows):
            codes = self.decoder.load_codes(self.weights, weight_row, k, count, isa.chunk)
            weight_operands = self.decoder.operands(codes, IN_LANE)
            weight_exponents = self._weight_exponents(weight_row, chunk, count)
            for row in range(self.rows):
                sums = zero_accumulator(isa)
                for i, operand in enumerate(weight_operands):
                    size = ops.length(operand)
                    x = ops.load(self.x, [row, k + i * size], size)
                    sums = multiply_add(isa, sums, operand, x)
                x_exponents = ops.load(self.x_exponents, [row, chunk, 0], isa.lanes)
                exponents = self.exponents.add(x_exponents, weight_exponents)
                at = j * self.rows + row
                totals[at] = arith.addf(totals[at], self.exponents.rescale(sums, exponents))
        return totals

    def _weight_exponents(self, weight_row: Index, chunk: Index, count: int) -> ir.Value:
        if self.block_exponents is not None:
            return ops.load(self.block_exponents, [chunk, 0], self.isa.lanes)
        scale_row = weight_row // self.problem.rhs_block[0]
        return self._load_exponents(scale_row, chunk, count)
