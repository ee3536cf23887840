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
from block32.lowering.cpu.decode import Decoder
from block32.lowering.cpu.fold import Factors, power_of_two
from block32.lowering.cpu.isa import InstructionSet, instruction_set
from block32.lowering.cpu.registers import (
    lane_sums,
    multiply_add,
    scale_and_add,
    zero_accumulator,
)
from block32.lowering.cpu.scales import Exponents
from block32.lowering.cpu.store import GROUP, ResultStore
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import BLOCK_K, ScaledMatmul, ceil_div

#: Bytes of stack that the factors of a 32-row block may take; IREE allows 32 KiB in all.
_FACTOR_STACK = 24 * 1024


def emit_stream(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    """Write the kernel: a workgroup computes ``tile[1]`` columns of y for all rows."""
    Stream(problem, tier, kernel).emit()


def _scales_weights(isa: InstructionSet, rows: int) -> bool:
    """Whether to multiply a chunk's weights by their scale, and not the sums of each row of x.

    Sums take two instructions a row. An operand of weights takes one, or about four where pairs of
    bf16 have their exponents raised (``fold.Factors``).
    """
    operand_cost = 4 if isa.dot == "bf16" else 1
    operands_of_chunk = isa.chunk // (isa.lanes * isa.pair)
    return rows > 2 and 2 * rows >= operand_cost * operands_of_chunk


class Stream:
    """What the parts of the kernel share: buffers, tables, and the tile in registers.

    Attributes:
        chunk: Elements of K in one step.
    """

    def __init__(self, problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext):
        """Bind the operands and build the tables at the insertion point."""
        assert tier.tile is not None and tier.mma is not None
        self.problem = problem
        self.kernel = kernel
        self.isa = instruction_set(tier.isa)
        self.chunk = self.isa.chunk
        self.rows = tier.tile[0]
        self.weight_rows = tier.mma[1]
        self.columns = tier.tile[1]
        # Rows of w between the one that is multiplied and the one that is fetched meanwhile.
        self.rows_ahead = (tier.stages - 1) * self.weight_rows
        self.exponents = Exponents(self.isa)
        self.decoder = Decoder(self.isa, problem.rhs)
        self.weights = operands.rhs_codes(kernel)
        self.scales = operands.rhs_scales(kernel)
        self.result = ResultStore(kernel)
        self.sums = ops.stack_buffer(f"memref<{self.rows}x{GROUP}xf32>")
        self.scales_weights = _scales_weights(self.isa, self.rows)
        self.factors = Factors(self.isa, self.decoder.unit)
        self.bind_x()
        self.block_factors = self._factor_buffer()

    def bind_x(self) -> None:
        """Bind the packed activation."""
        self.x = pack.row_values(self.kernel, self.isa, self.rows)
        self.x_exponents = pack.row_exponents(self.kernel, self.isa, self.rows)

    def _factor_buffer(self) -> ir.Value | None:
        """Stack for the factors of a 32-row block, where these are shared and fit."""
        chunks = ceil_div(self.problem.k, self.chunk)
        fits = chunks * self.isa.lanes * 4 <= _FACTOR_STACK
        if self.problem.rhs_block[0] == 1 or not fits:
            return None
        element = self.factors.type_text if self.scales_weights else "f32"
        return ops.stack_buffer(f"memref<{chunks}x{self.isa.lanes}x{element}>")

    def emit(self) -> None:
        """The loop over the workgroup's groups of 16 columns."""
        x_folded = self._all_rows_folded()
        first = self.kernel.workgroup_id() * self.columns
        last = minimum(first + self.columns, self.problem.n)
        ops.repeat(first, last, GROUP, lambda column: self._group(column, x_folded))

    def _all_rows_folded(self) -> ir.Value:
        flags = pack.folded_flags(self.kernel, self.rows)
        combined = ops.load_scalar(flags, [0])
        for row in range(1, self.rows):
            combined = arith.andi(combined, ops.load_scalar(flags, [row]))
        return arith.trunci(ops.i1(), combined)

    def _group(self, column: IndexValue, x_folded: ir.Value) -> None:
        """16 rows of w, then 16 columns of y."""
        n = self.problem.n
        present: Index = GROUP if n % GROUP == 0 else minimum(n - column, GROUP)

        def multiply(is_folded: bool) -> None:
            if is_folded and self.block_factors is not None:
                self._fill_block_factors(column // self.problem.rhs_block[0])
            ops.repeat(
                0, present, self.weight_rows, lambda r: self._weight_rows(column, r, is_folded)
            )

        may_fold = arith.andi(x_folded, self._weights_may_fold(column, present))
        ops.choose(may_fold, lambda: multiply(True), lambda: multiply(False))
        for row in range(self.rows):
            if isinstance(self.kernel.m, int):
                if row < self.kernel.m:
                    self._store_row(row, column)
            else:
                with ops.when(ops.is_below(row, self.kernel.m)):
                    self._store_row(row, column)

    def _weights_may_fold(self, column: IndexValue, present: Index) -> ir.Value:
        share = self.problem.rhs_block[0]
        rows = present if share == 1 else 1
        return operands.rhs_fold_check(self.kernel).may_fold(column // share, rows)

    def _store_row(self, row: int, column: Index) -> None:
        self.result.store(ops.load(self.sums, [row, 0], GROUP), row, column)

    def _fill_block_factors(self, scale_row: Index) -> None:
        def fill(chunk: Index, count: int, _: list[ir.Value]) -> Sequence[ir.Value]:
            ops.store(self._load_factors(scale_row, chunk, count), self.block_factors, [chunk, 0])
            return []

        operands.for_chunks(self.problem.k, self.chunk, [], fill)

    def _load_factors(self, scale_row: Index, chunk: Index, count: int) -> ir.Value:
        """What a chunk's weights or sums are multiplied by, each in the lanes of its block."""
        scales = self._chunk_scales(scale_row, chunk, count)
        if self.scales_weights:
            return operands.spread_blocks(self.isa, self.factors.of_safe(scales))
        factors = operands.spread_blocks(self.isa, power_of_two(scales))
        if self.decoder.unit == 1:
            return factors
        return arith.mulf(factors, ops.splat(self.decoder.unit, factors.type))

    def _chunk_scales(self, scale_row: Index, chunk: Index, count: int) -> ir.Value:
        """The scale bytes of w for a chunk's blocks."""
        blocks = self.chunk // BLOCK_K
        return ops.load_first(
            self.scales, [scale_row, chunk * blocks], ceil_div(count, BLOCK_K), blocks
        )

    def _weight_rows(self, column: Index, offset: Index, is_folded: bool) -> None:
        """Dot products of a few rows of w with all rows of x, into the sums on the stack."""
        last = self.problem.n - 1
        weight_rows = [column + offset + j for j in range(self.weight_rows)]
        if self.problem.n % GROUP:
            weight_rows = [minimum(row, last) for row in weight_rows]

        multiply = self._multiply_folded if is_folded else self._multiply_exact

        def multiply_chunk(chunk: Index, count: int, carried: list[ir.Value]) -> list[ir.Value]:
            return multiply(weight_rows, chunk, count, carried)

        zeros = [zero_accumulator(self.isa)] * (self.weight_rows * self.rows)
        totals = operands.for_chunks(self.problem.k, self.chunk, zeros, multiply_chunk)
        for i, total in enumerate(lane_sums(totals)):
            j, row = divmod(i, self.rows)
            ops.store_scalar(total, self.sums, [row, offset + j])

    def _multiply_folded(
        self, weight_rows: list[Index], chunk: Index, count: int, totals: list[ir.Value]
    ) -> list[ir.Value]:
        """One chunk of K where all scales are safe to fold; x already is."""
        factors = [self._factors(row, chunk, count) for row in weight_rows]
        weights = [self._decode(row, chunk, count, raw=True) for row in weight_rows]
        if not self.scales_weights:
            return [
                scale_and_add(
                    self.isa,
                    total,
                    self.chunk_sums(weights[j], row, chunk),
                    self.sum_factors(factors[j], row, chunk),
                )
                for (j, row), total in zip(self._pairs(), totals, strict=True)
            ]
        totals = list(totals)
        # One operand of x after the other, each used for all rows of w: registers are few.
        for i in range(len(weights[0])):
            scaled = [self.factors.apply(weights[j][i], factors[j]) for j in range(len(weights))]
            for row in range(self.rows):
                x = self._load_x(row, chunk, i, ops.length(scaled[0]))
                for j, weight in enumerate(scaled):
                    at = j * self.rows + row
                    totals[at] = multiply_add(self.isa, totals[at], weight, x)
        return totals

    def _pairs(self) -> list[tuple[int, int]]:
        """(row of w, row of x) of the totals, in their order."""
        return [(j, row) for j in range(self.weight_rows) for row in range(self.rows)]

    def _factors(self, weight_row: Index, chunk: Index, count: int) -> ir.Value:
        if self.block_factors is not None:
            return ops.load(self.block_factors, [chunk, 0], self.isa.lanes, 64)
        return self._load_factors(weight_row // self.problem.rhs_block[0], chunk, count)

    def _multiply_exact(
        self, weight_rows: list[Index], chunk: Index, count: int, totals: list[ir.Value]
    ) -> list[ir.Value]:
        """One chunk of K for any scales: a block's sums are rescaled by both exponents."""
        totals = list(totals)
        for j, weight_row in enumerate(weight_rows):
            weights = self._decode(weight_row, chunk, count, raw=False)
            scale_row = weight_row // self.problem.rhs_block[0]
            scales = self._chunk_scales(scale_row, chunk, count)
            weight_exponents = operands.spread_blocks(self.isa, self.exponents.from_bytes(scales))
            for row in range(self.rows):
                x_exponents = self.load_x_exponents(row, chunk)
                exponents = self.exponents.add(x_exponents, weight_exponents)
                scaled = self.exponents.rescale(self.chunk_sums(weights, row, chunk), exponents)
                at = j * self.rows + row
                totals[at] = arith.addf(totals[at], scaled)
        return totals

    def _decode(self, weight_row: Index, chunk: Index, count: int, raw: bool) -> list[ir.Value]:
        k = chunk * self.chunk
        if self.rows_ahead:
            next_row = minimum(weight_row + self.rows_ahead, self.problem.n - 1)
            ops.prefetch(self.weights, [next_row, k // self.decoder.k_per_byte])
        return self.decode(weight_row, k, count, raw)

    def decode(self, weight_row: Index, k: Index, count: int, raw: bool) -> list[ir.Value]:
        """The operands of a chunk of w, of which ``count`` elements exist."""
        return self.decoder.decode_chunk(
            self.decoder.load_chunk(self.weights, weight_row, k, count), raw
        )

    def load_x_exponents(self, row: int, chunk: Index) -> ir.Value:
        """The exponents of a row of x for a chunk, in the lanes of its sums."""
        return ops.load(self.x_exponents, [row, chunk, 0], self.isa.lanes)

    def sum_factors(self, factors: ir.Value, row: int, chunk: Index) -> ir.Value:
        """What the sums of a chunk are multiplied by, with ``factors`` for w; x is folded."""
        return factors

    def chunk_sums(self, weights: list[ir.Value], row: int, chunk: Index) -> ir.Value:
        """The products of a chunk of w with a row of x, added up a lane."""
        sums = zero_accumulator(self.isa)
        for i, weight in enumerate(weights):
            x = self._load_x(row, chunk, i, ops.length(weight))
            sums = multiply_add(self.isa, sums, weight, x)
        return sums

    def _load_x(self, row: int, chunk: Index, i: int, size: int) -> ir.Value:
        """Operand ``i`` of a chunk of a row of x."""
        return ops.load(self.x, [row, chunk * self.chunk + i * size], size, 64)
