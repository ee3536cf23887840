# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The pair kernel: a few rows of x, products of pairs of rows, w read once in the order of memory.

The same products as the tiled kernel's (``register_tile.PairTile``), of a single slab of x. A panel
would be read only once, so that rows of w are decoded in registers instead: two of them side by
side, four elements of each in turn.
"""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import Index, IndexValue
from block32.lowering.cpu import operands, ops, pack
from block32.lowering.cpu.decode import Decoder
from block32.lowering.cpu.fold import power_of_two
from block32.lowering.cpu.isa import instruction_set
from block32.lowering.cpu.registers import (
    as_operand,
    multiply_pairs,
    scale_and_add,
    zero_accumulator,
)
from block32.lowering.cpu.scales import Exponents
from block32.lowering.cpu.store import GROUP, ResultStore, for_groups
from block32.lowering.cpu.tiled import Partition
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ScaledMatmul


def emit_pairs(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    """Write the kernel: a workgroup computes ``tile[1]`` columns of y for one slab of rows."""
    _Pairs(problem, tier, kernel).emit()


class _Pairs:
    """What the parts of the kernel share: buffers, tables, and the tile in registers."""

    def __init__(self, problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext):
        assert tier.tile is not None and tier.mma is not None
        self.problem = problem
        self.kernel = kernel
        self.isa = instruction_set(tier.isa)
        self.rows, self.weight_rows, _ = tier.mma
        self.columns = tier.tile[1]
        self.slab = kernel.workgroup_id(1)
        slabs = Partition.of(tier, kernel.m).slabs
        self.x = pack.slab_values(kernel, self.isa, self.rows, slabs)
        self.x_scales = pack.slab_scales(kernel, self.rows, slabs)
        self.flags = pack.folded_flags(kernel, slabs)
        self.exponents = Exponents(self.isa)
        self.decoder = Decoder(self.isa, problem.rhs)
        self.weights = operands.rhs_codes(kernel)
        self.scales = operands.rhs_scales(kernel)
        self.result = ResultStore(kernel)
        self.sums = ops.stack_buffer(f"memref<{self.rows}x{GROUP}xf32>")

    def emit(self) -> None:
        """The loop over the workgroup's groups of 16 columns."""
        for_groups(self.kernel, self.columns, self._group)

    def _group(self, column: IndexValue, present: Index) -> None:
        """16 rows of w, then 16 columns of y."""

        def multiply(is_folded: bool) -> None:
            def some_rows(offset: IndexValue) -> None:
                self._weight_rows(column, offset, is_folded)

            ops.repeat(0, present, self.weight_rows, some_rows)

        x_folded = pack.is_folded(self.flags, self.slab)
        may_fold = arith.andi(x_folded, operands.group_may_fold(self.kernel, column, present))
        ops.choose(may_fold, lambda: multiply(True), lambda: multiply(False))
        for row in range(self.rows):
            y_row = self.slab * self.rows + row
            with ops.when(ops.is_below(y_row, self.kernel.m)):
                self.result.store(ops.load(self.sums, [row, 0], GROUP), y_row, column)

    def _weight_rows(self, column: Index, offset: Index, is_folded: bool) -> None:
        """Some rows of w with the slab, into the sums on the stack."""
        rows = [
            operands.existing_row(self.problem, column + offset + j, GROUP)
            for j in range(self.weight_rows)
        ]
        tiles = [(j, row) for j in range(0, self.weight_rows, 2) for row in range(0, self.rows, 2)]

        def chunk(number: Index, count: int, totals: list[ir.Value]) -> list[ir.Value]:
            result = []
            for j in range(0, self.weight_rows, 2):
                weights = self._decode(rows[j : j + 2], number, count)
                scales = [self._scale(row, number) for row in rows[j : j + 2]]
                for row in range(0, self.rows, 2):
                    sums = self._products(weights, row, number)
                    total = totals[len(result)]
                    if is_folded:
                        factors = self._columns([power_of_two(scale) for scale in scales])
                        result.append(scale_and_add(self.isa, total, sums, factors))
                    else:
                        result.append(arith.addf(total, self._rescaled(sums, row, number, scales)))
            return result

        zeros = [zero_accumulator(self.isa)] * len(tiles)
        totals = operands.for_chunks(self.problem.k, self.isa.chunk, zeros, chunk)
        for (j, row), total in zip(tiles, totals, strict=True):
            for i, two_columns in enumerate(ops.parts(total, 2)):
                ops.store(two_columns, self.sums, [row + i, offset + j])

    def _decode(self, rows: list[Index], chunk: Index, count: int) -> list[ir.Value]:
        """A chunk of two rows of w: operands of four elements of each, in the order of K."""
        k = chunk * self.isa.chunk
        data = [self.decoder.load_chunk(self.weights, row, k, count) for row in rows]
        return self.decoder.paired(*data)

    def _scale(self, weight_row: Index, chunk: Index) -> ir.Value:
        return ops.load_scalar(self.scales, [weight_row // self.problem.rhs_block[0], chunk])

    def _columns(self, values: list[ir.Value]) -> ir.Value:
        """One value a column of w, in the lanes of 2x2 sums."""
        if self.problem.rhs_block[0] > 1:
            return ops.broadcast(values[0], self.isa.lanes)
        left, right = (ops.broadcast(value, self.isa.lanes) for value in values)
        return ops.shuffle(left, right, (0, 4, 0, 4))

    def _products(self, weights: list[ir.Value], row: int, chunk: Index) -> ir.Value:
        """The sums of a chunk for two rows of x, 2x2."""
        sums = zero_accumulator(self.isa)
        for i, weight in enumerate(weights):
            position = [self.slab, chunk * len(weights) + i, row]
            x = as_operand(self.isa, ops.load(self.x, position, self.isa.words, 64))
            sums = multiply_pairs(sums, x, weight)
        return sums

    def _rescaled(self, sums: ir.Value, row: int, chunk: Index, scales: list[ir.Value]) -> ir.Value:
        """The sums of a chunk times both scales, whatever they are."""
        of_w = self._columns([self.exponents.from_bytes(scale) for scale in scales])
        x_scales = [ops.load_scalar(self.x_scales, [self.slab, chunk, row + i]) for i in (0, 1)]
        upper, lower = (ops.broadcast(self.exponents.from_bytes(scale), 4) for scale in x_scales)
        of_x = ops.shuffle(upper, lower, (0, 0, 4, 4))
        return self.exponents.rescale(sums, self.exponents.add(of_x, of_w))
