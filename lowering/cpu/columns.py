# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The stream kernel over a weight in pieces: few rows of x, lanes along N.

A piece (``lowering/common/weight_layout.py``) is the operand of 16 columns of y: it is decoded in
registers and multiplied with broadcast elements of x. Nothing is turned and no lanes are summed.
The sums of a block of K are scaled once, when it ends.
"""

from __future__ import annotations

from iree.compiler import ir
from iree.compiler.dialects import arith, vector

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import Index, IndexValue, minimum
from block32.lowering.common.weight_layout import LAYOUTS
from block32.lowering.cpu import operands, ops, pack
from block32.lowering.cpu.decode import Decoder
from block32.lowering.cpu.fold import power_of_two
from block32.lowering.cpu.isa import instruction_set
from block32.lowering.cpu.registers import (
    broadcast_operand,
    multiply_add,
    scale_and_add,
    zero_accumulator,
)
from block32.lowering.cpu.scales import Exponents
from block32.lowering.cpu.store import GROUP, ResultStore
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import BLOCK_K, ScaledMatmul

#: Elements of K in the body of the innermost loop.
_UNROLL = 8
#: Bytes of a cache line.
_LINE_BYTES = 64


def emit_columns(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    """Write the kernel: a workgroup computes ``tile[1]`` columns of y for all rows."""
    _Columns(problem, tier, kernel).emit()


class _Columns:
    """What the parts of the kernel share: buffers, tables, and the tile in registers."""

    def __init__(self, problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext):
        assert tier.tile is not None and tier.mma is not None
        self.problem = problem
        self.kernel = kernel
        self.isa = instruction_set(tier.isa)
        self.rows = tier.tile[0]
        self.columns = tier.tile[1]
        self.groups = tier.mma[1] // GROUP
        self.layout = LAYOUTS[tier.weight_layout]
        self.exponents = Exponents(self.isa)
        self.decoder = Decoder(self.isa, problem.rhs)
        self.weights = operands.rhs_pieces(kernel, self.layout)
        self.scales = operands.rhs_scales(kernel)
        self.x = pack.slab_values(kernel, self.isa, self.rows, 1)
        self.x_scales = pack.slab_scales(kernel, self.rows, 1)
        self.result = ResultStore(kernel)
        # Pieces between the one that is multiplied and the one that is fetched meanwhile.
        self.pieces_ahead = (tier.stages - 1) * BLOCK_K // self.layout.row_bytes
        # Registers that the columns of one row of y take.
        self.vectors = self.groups * GROUP // self.isa.lanes

    def emit(self) -> None:
        """The loop over the workgroup's columns, a few groups of 16 at a time."""
        x_folded = pack.is_folded(pack.folded_flags(self.kernel, 1), 0)
        first = self.kernel.workgroup_id() * self.columns
        last = minimum(first + self.columns, self.problem.n)

        def columns(column: IndexValue) -> None:
            may_fold = arith.andi(x_folded, self._weights_may_fold(column))
            ops.choose(
                may_fold,
                lambda: self._multiply(column, is_folded=True),
                lambda: self._multiply(column, is_folded=False),
            )

        ops.repeat(first, last, self.groups * GROUP, columns)

    def _weights_may_fold(self, column: Index) -> ir.Value:
        share = self.problem.rhs_block[0]
        scale_rows, _ = self.problem.rhs_scale_shape
        first = column // share
        count = minimum(scale_rows - first, max(self.groups * GROUP // share, 1))
        return operands.rhs_fold_check(self.kernel, self.layout).may_fold(first, count)

    def _multiply(self, column: IndexValue, is_folded: bool) -> None:
        """All of K for some groups of columns, then their store."""
        zeros = [zero_accumulator(self.isa)] * (self.rows * self.vectors)

        def block(number: IndexValue, totals: list[ir.Value]) -> list[ir.Value]:
            sums = self._block_sums(column, number, zeros)
            scale = self._add_folded if is_folded else self._add_exact
            return scale(column, number, totals, sums)

        totals = ops.for_range(0, self.problem.k_blocks, 1, zeros, block)
        for row in range(self.rows):
            with ops.when(ops.is_below(row, self.kernel.m)):
                of_row = totals[row * self.vectors : (row + 1) * self.vectors]
                self._store_row(row, column, of_row)

    def _store_row(self, row: int, column: Index, totals: list[ir.Value]) -> None:
        in_group = GROUP // self.isa.lanes
        for group in range(self.groups):
            values = ops.join(totals[group * in_group : (group + 1) * in_group])
            self.result.store(values, row, column + group * GROUP)

    def _block_sums(
        self, column: Index, block: IndexValue, zeros: list[ir.Value]
    ) -> list[ir.Value]:
        """The products of one block of K without its scales."""

        def steps(i: IndexValue, sums: list[ir.Value]) -> list[ir.Value]:
            for k in range(0, _UNROLL, self.layout.row_bytes):
                for group in range(self.groups):
                    sums = self._multiply_piece(column, group, block * BLOCK_K + i, k, sums)
            return sums

        return ops.for_range(0, BLOCK_K, _UNROLL, zeros, steps)

    def _multiply_piece(
        self, column: Index, group: int, first_k: Index, k_inside: int, sums: list[ir.Value]
    ) -> list[ir.Value]:
        """A piece of w times the elements of x that meet it."""
        row = minimum(column + group * GROUP, self.problem.n - GROUP) if group else column
        k = first_k + k_inside
        number = self.layout.piece_of(row, k, self.problem.rhs_row_bytes)
        self._fetch(number, k_inside)
        codes = ops.load(self.weights, [number, 0], self.layout.piece, self.layout.piece)
        in_group = GROUP // self.isa.lanes
        sums = list(sums)
        for i, weight in enumerate(self.decoder.columns(codes)):
            step, part = divmod(i, in_group)
            for x_row in range(self.rows):
                x = ops.load_scalar(self.x, [0, k // self.isa.pair + step, x_row])
                at = x_row * self.vectors + group * in_group + part
                broadcast = broadcast_operand(self.isa, x)
                sums[at] = multiply_add(self.isa, sums[at], broadcast, weight)
        return sums

    def _fetch(self, piece: Index, k: int) -> None:
        """Ask for the cache line that is needed after a while; one line holds some pieces."""
        in_line = _LINE_BYTES // self.layout.piece
        if self.pieces_ahead and k // self.layout.row_bytes % in_line == 0:
            last = self.problem.n * self.problem.rhs_row_bytes // self.layout.piece - 1
            ops.prefetch(self.weights, [minimum(piece + self.pieces_ahead, last), 0])

    def _add_folded(
        self, column: Index, block: Index, totals: list[ir.Value], sums: list[ir.Value]
    ) -> list[ir.Value]:
        """``totals`` plus a block's sums times the weight's scale; x is scaled already."""
        factors = [
            power_of_two(self._scale_bytes(column, number, block), self.decoder.unit)
            for number in range(self.vectors)
        ]
        return [
            scale_and_add(self.isa, total, value, factors[i % self.vectors])
            for i, (total, value) in enumerate(zip(totals, sums, strict=True))
        ]

    def _add_exact(
        self, column: Index, block: Index, totals: list[ir.Value], sums: list[ir.Value]
    ) -> list[ir.Value]:
        """``totals`` plus a block's sums, rescaled by both exponents."""
        lanes = self.isa.lanes
        of_columns = [
            self.exponents.from_bytes(self._scale_bytes(column, number, block))
            for number in range(self.vectors)
        ]
        added = []
        for i, (total, value) in enumerate(zip(totals, sums, strict=True)):
            row, number = divmod(i, self.vectors)
            x_scale = ops.load_scalar(self.x_scales, [0, block, row])
            of_row = ops.broadcast(self.exponents.from_bytes(x_scale), lanes)
            if self.decoder.unit != 1:
                value = arith.mulf(value, ops.splat(self.decoder.unit, value.type))
            exponents = self.exponents.add(of_row, of_columns[number])
            added.append(arith.addf(total, self.exponents.rescale(value, exponents)))
        return added

    def _scale_bytes(self, column: Index, number: int, block: Index) -> ir.Value:
        """The scale bytes of a register's columns for one block of K."""
        lanes, share = self.isa.lanes, self.problem.rhs_block[0]
        last = self.problem.rhs_scale_shape[0] - 1
        first = column + number * lanes
        if share > 1:
            byte = ops.load_scalar(self.scales, [minimum(first // share, last), block])
            return ops.broadcast(byte, lanes)
        scales = [
            ops.load_scalar(self.scales, [minimum(first + lane, last), block])
            for lane in range(lanes)
        ]
        return vector.from_elements(ops.vector_type(lanes, ops.i8()), scales)
