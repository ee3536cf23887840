# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The stream kernel: few rows of x, the weight read in the order of memory.

Lanes run along K, so a row of w is read from end to end, decoded in registers and multiplied with
a slab of x: as many rows as there are registers for. At the row's end the lanes are summed. Where a
slab is larger than the innermost cache, 16 rows of w take one part of K after the other, and their
sums rest on the stack meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import Index, IndexValue, ceil_div, minimum
from block32.lowering.cpu import operands, ops, pack, split_k
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
from block32.lowering.cpu.staging import Staging
from block32.lowering.cpu.store import GROUP, ResultStore, for_groups
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ScaledMatmul

#: Bytes of stack that the sums of 16 rows of w may take between parts of K.
_RESTING_STACK = 12 * 1024
#: Bytes of stack that the factors of a 32-row block may take.
_FACTOR_STACK = ops.STACK - _RESTING_STACK


def most_slab_rows(isa: InstructionSet) -> int:
    """The most rows of a slab, ``mma[0]``."""
    return _RESTING_STACK // (GROUP * isa.lanes * 4)


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
        self.rows, self.weight_rows, _ = tier.mma
        self.is_one_slab = tier.tile[0] <= self.rows
        self.columns = tier.tile[1]
        self.chunk = split_k.chunk(problem, tier)
        self.chunks, self.tail = divmod(problem.k, self.chunk)
        # Rows of w between the one that is multiplied and the one that is fetched meanwhile.
        self.rows_ahead = (tier.stages - 1) * self.weight_rows
        self.exponents = Exponents(self.isa)
        self.decoder = Decoder(self.isa, problem.rhs)
        self.weights = operands.rhs_codes(kernel)
        self.scales = operands.rhs_scales(kernel)
        self.flags = pack.folded_flags(kernel, pack.stream_rows(tier))
        self.is_split = tier.splits > 1
        self.partition = split_k.partition(problem, tier)
        self.split = kernel.workgroup_id(1) if self.is_split else 0
        self.result = (
            split_k.SlotStore(kernel, tier, self.split) if self.is_split else ResultStore(kernel)
        )
        self.sums = ops.stack_buffer(f"memref<{self.rows}x{GROUP}xf32>")
        self.scales_weights = _scales_weights(self.isa, self.rows)
        self.staging = (
            Staging(self.decoder, self.weight_rows) if self.isa.widens_from_memory else None
        )
        self.factors = Factors(self.isa, self.decoder.unit)
        self.bind_x(tier)
        self.block_factors = self._factor_buffer()
        self.chunks_of_part = max(tier.tile[2] // self.chunk, 1)
        self.resting = self._resting_sums()

    def bind_x(self, tier: KernelTier) -> None:
        """Bind the packed activation."""
        self.x = pack.row_values(self.kernel, tier)
        self.x_exponents = pack.row_exponents(self.kernel, tier)

    def _factor_buffer(self) -> ir.Value | None:
        """Stack for the factors of a 32-row block, where these are shared and fit."""
        chunks = -(-self.problem.k // self.chunk)
        fits = chunks * self.isa.lanes * 4 <= _FACTOR_STACK
        if self.problem.rhs_block[0] == 1 or not fits:
            return None
        element = self.factors.type_text if self.scales_weights else "f32"
        return ops.stack_buffer(f"memref<{chunks}x{self.isa.lanes}x{element}>")

    def _resting_sums(self) -> ir.Value | None:
        """Stack for the sums of 16 rows of w between parts of K, where there are several."""
        if self.partition.size <= self.chunks_of_part:
            return None
        return ops.stack_buffer(f"memref<{GROUP}x{self.rows}x{self.isa.lanes}xf32>")

    def emit(self) -> None:
        """The loop over the workgroup's groups of 16 columns."""
        for_groups(self.kernel, self.columns, self._group)

    def _group(self, column: IndexValue, present: Index) -> None:
        """16 rows of w, then 16 columns of y for every slab of x."""
        may_fold = operands.group_may_fold(self.kernel, column, present)
        if self.block_factors is not None:
            with ops.when(may_fold):
                self._fill_block_factors(column // self.problem.rhs_block[0])

        def multiply(slab: Index) -> None:
            ops.choose(
                arith.andi(may_fold, self._slab_is_folded(slab)),
                lambda: self._multiply_in_parts(column, slab, present),
                lambda: self._multiply_exactly(column, slab, present),
            )
            for row in range(self.rows):
                self._store_row(slab, row, column)

        if self.is_one_slab:
            multiply(0)
        else:
            ops.repeat(0, ceil_div(self.kernel.m, self.rows), 1, multiply)

    def _slab_is_folded(self, slab: Index) -> ir.Value:
        first = slab * self.rows
        combined = ops.load_scalar(self.flags, [first])
        for row in range(1, self.rows):
            combined = arith.andi(combined, ops.load_scalar(self.flags, [first + row]))
        return arith.trunci(ops.i1(), combined)

    def _store_row(self, slab: Index, row: int, column: Index) -> None:
        y_row = slab * self.rows + row
        with ops.when(ops.is_below(y_row, self.kernel.m)):
            self.result.store(ops.load(self.sums, [row, 0], GROUP), y_row, column)

    def _fill_block_factors(self, scale_row: Index) -> None:
        def fill(chunk: Index, count: int) -> None:
            ops.store(self._load_factors(scale_row, chunk, count), self.block_factors, [chunk, 0])

        first, last = self._range()
        ops.repeat(first, last, 1, lambda chunk: fill(chunk, self.chunk))
        if self.tail:
            fill(self.chunks, self.tail)

    def _range(self) -> tuple[Index, Index]:
        """The workgroup's whole chunks of K."""
        if not self.is_split:
            return 0, self.chunks
        return self.partition.start(self.split), self.partition.end(self.split)

    def _load_factors(self, scale_row: Index, chunk: Index, count: int) -> ir.Value:
        """What a chunk's weights or sums are multiplied by, each in the lanes of its block."""
        scales = operands.load_chunk_scales(self.scales, scale_row, chunk, count, self.chunk)
        if self.scales_weights:
            return operands.spread_blocks(self.isa, self.factors.of_safe(scales))
        return operands.spread_blocks(self.isa, power_of_two(scales, self.decoder.unit))

    def _multiply_exactly(self, column: Index, slab: Index, present: Index) -> None:
        """The sums of 16 rows of w for any scales."""

        def weight_rows(r: IndexValue) -> None:
            rows = self._existing_rows(column, r)

            def add(chunk: Index, count: int, sums: list[ir.Value]) -> list[ir.Value]:
                return self._multiply_exact(rows, slab, chunk, count, sums)

            first, last = self._range()
            sums = ops.for_range(
                first, last, 1, self._zeros(), lambda chunk, sums: add(chunk, self.chunk, sums)
            )
            self._keep(self._with_tail(sums, lambda sums: add(self.chunks, self.tail, sums)), r)

        ops.repeat(0, present, self.weight_rows, weight_rows)

    def _multiply_in_parts(self, column: Index, slab: Index, present: Index) -> None:
        """The sums of 16 rows of w where all scales are safe to fold, a part of K at a time."""
        first_chunk, last_chunk = self._range()

        def part(first: Index, last: Index, r: IndexValue, sums: list[ir.Value]) -> list[ir.Value]:
            return self._walk(self._existing_rows(column, r), slab, first, last, sums)

        def finish(r: IndexValue, sums: list[ir.Value]) -> None:
            rows = self._existing_rows(column, r)
            self._keep(self._with_tail(sums, lambda sums: self._add_tail(rows, slab, sums)), r)

        def each(body: Callable[[IndexValue], None]) -> None:
            ops.repeat(0, present, self.weight_rows, body)

        if self.resting is None:
            each(lambda r: finish(r, part(first_chunk, last_chunk, r, self._zeros())))
            return

        def next_part(first: IndexValue) -> None:
            last = minimum(first + self.chunks_of_part, last_chunk)
            each(lambda r: self._rest(r, part(first, last, r, self._resumed(r))))

        each(lambda r: self._rest(r, self._zeros()))
        ops.repeat(first_chunk, last_chunk, self.chunks_of_part, next_part)
        each(lambda r: finish(r, self._resumed(r)))

    def _with_tail(
        self, sums: list[ir.Value], add: Callable[[list[ir.Value]], list[ir.Value]]
    ) -> list[ir.Value]:
        """``sums``, after ``add`` where the workgroup has the short last chunk."""
        if not self.tail:
            return sums
        if not self.is_split:
            return add(sums)
        is_last = ops.is_equal(self.split, self.partition.count - 1)
        types = [value.type for value in sums]
        return ops.choose_values(is_last, types, lambda: add(sums), lambda: sums)

    def _zeros(self) -> list[ir.Value]:
        return [zero_accumulator(self.isa)] * (self.weight_rows * self.rows)

    def _existing_rows(self, column: Index, r: Index) -> list[Index]:
        """The rows of w that are multiplied together; the last one instead of those past N."""
        rows = [column + r + j for j in range(self.weight_rows)]
        return [operands.existing_row(self.problem, row, GROUP) for row in rows]

    def _rest(self, r: Index, sums: list[ir.Value]) -> None:
        """Leave sums on the stack until the next part of K."""
        for value, (j, row) in zip(sums, self._pairs(), strict=True):
            ops.store(value, self.resting, [r + j, row, 0], 4 * self.isa.lanes)

    def _resumed(self, r: Index) -> list[ir.Value]:
        """The sums that were left."""
        lanes = self.isa.lanes
        return [
            ops.load(self.resting, [r + j, row, 0], lanes, 4 * lanes) for j, row in self._pairs()
        ]

    def _keep(self, sums: list[ir.Value], r: Index) -> None:
        """Add up the lanes of finished sums, for the store."""
        for total, (j, row) in zip(lane_sums(sums), self._pairs(), strict=True):
            ops.store_scalar(total, self.sums, [row, r + j])

    def _pairs(self) -> list[tuple[int, int]]:
        """(row of w, row of the slab) of the sums, in their order."""
        return [(j, row) for j in range(self.weight_rows) for row in range(self.rows)]

    def _walk(
        self, rows: list[Index], slab: Index, first: Index, last: Index, sums: list[ir.Value]
    ) -> list[ir.Value]:
        """Add the products of whole chunks ``first`` to ``last``."""
        size = self.chunk
        if not self.chunks:
            return sums
        if self.staging is None:
            return ops.for_range(
                first,
                last,
                1,
                sums,
                lambda chunk, sums: self._multiply_direct(rows, slab, chunk, size, sums),
            )

        def step(chunk: IndexValue, sums: list[ir.Value]) -> list[ir.Value]:
            self._stage(rows, chunk + 1, size)
            return self._multiply_staged(rows, slab, chunk, size, sums)

        self._stage(rows, first, size)
        sums = ops.for_range(first, last - 1, 1, sums, step)
        return self._multiply_staged(rows, slab, last - 1, size, sums)

    def _add_tail(self, rows: list[Index], slab: Index, sums: list[ir.Value]) -> list[ir.Value]:
        """Add the products of the short last chunk."""
        if self.staging is None:
            return self._multiply_direct(rows, slab, self.chunks, self.tail, sums)
        self._stage(rows, self.chunks, self.tail)
        return self._multiply_staged(rows, slab, self.chunks, self.tail, sums)

    def _stage(self, rows: list[Index], chunk: Index, count: int) -> None:
        assert self.staging is not None
        for j, row in enumerate(rows):
            self._fetch(row, chunk)
            codes = self.decoder.load_chunk(self.weights, row, chunk * self.chunk, count)
            self.staging.write(chunk, j, codes)

    def _multiply_staged(
        self, rows: list[Index], slab: Index, chunk: Index, count: int, sums: list[ir.Value]
    ) -> list[ir.Value]:
        assert self.staging is not None
        weights = [self.staging.read(chunk, j) for j in range(self.weight_rows)]
        return self._multiply_folded(rows, weights, slab, chunk, count, sums)

    def _multiply_direct(
        self, rows: list[Index], slab: Index, chunk: Index, count: int, sums: list[ir.Value]
    ) -> list[ir.Value]:
        weights = [self._decode(row, chunk, count, raw=True) for row in rows]
        return self._multiply_folded(rows, weights, slab, chunk, count, sums)

    def _multiply_folded(
        self,
        rows: list[Index],
        weights: list[list[ir.Value]],
        slab: Index,
        chunk: Index,
        count: int,
        sums: list[ir.Value],
    ) -> list[ir.Value]:
        """One chunk of K where all scales are safe to fold; x already is."""
        factors = [self._factors(row, chunk, count) for row in rows]
        if not self.scales_weights:
            return [
                scale_and_add(
                    self.isa,
                    total,
                    self.chunk_sums(weights[j], slab, row, chunk),
                    self.sum_factors(factors[j], slab, row, chunk),
                )
                for (j, row), total in zip(self._pairs(), sums, strict=True)
            ]
        sums = list(sums)
        # One operand of x after the other, each used for all rows of w: registers are few.
        for i in range(len(weights[0])):
            scaled = [self.factors.apply(weights[j][i], factors[j]) for j in range(len(weights))]
            for row in range(self.rows):
                x = self._load_x(slab, row, chunk, i, ops.length(scaled[0]))
                for j, weight in enumerate(scaled):
                    at = j * self.rows + row
                    sums[at] = multiply_add(self.isa, sums[at], weight, x)
        return sums

    def _factors(self, weight_row: Index, chunk: Index, count: int) -> ir.Value:
        if self.block_factors is not None:
            return ops.load(self.block_factors, [chunk, 0], self.isa.lanes, 64)
        return self._load_factors(weight_row // self.problem.rhs_block[0], chunk, count)

    def _multiply_exact(
        self, rows: list[Index], slab: Index, chunk: Index, count: int, sums: list[ir.Value]
    ) -> list[ir.Value]:
        """One chunk of K for any scales: a block's sums are rescaled by both exponents."""
        sums = list(sums)
        for j, weight_row in enumerate(rows):
            weights = self._decode(weight_row, chunk, count, raw=False)
            scale_row = weight_row // self.problem.rhs_block[0]
            scales = operands.load_chunk_scales(self.scales, scale_row, chunk, count, self.chunk)
            weight_exponents = operands.spread_blocks(self.isa, self.exponents.from_bytes(scales))
            for row in range(self.rows):
                x_exponents = self.load_x_exponents(slab, row, chunk)
                exponents = self.exponents.add(x_exponents, weight_exponents)
                products = self.chunk_sums(weights, slab, row, chunk)
                at = j * self.rows + row
                sums[at] = arith.addf(sums[at], self.exponents.rescale(products, exponents))
        return sums

    def _decode(self, weight_row: Index, chunk: Index, count: int, raw: bool) -> list[ir.Value]:
        self._fetch(weight_row, chunk)
        return self.decode(weight_row, chunk * self.chunk, count, raw)

    def _fetch(self, weight_row: Index, chunk: Index) -> None:
        """Ask for the chunk of a later row of w."""
        if self.rows_ahead:
            next_row = minimum(weight_row + self.rows_ahead, self.problem.n - 1)
            k = chunk * self.chunk
            ops.prefetch(self.weights, [next_row, k // self.decoder.k_per_byte])

    def decode(self, weight_row: Index, k: Index, count: int, raw: bool) -> list[ir.Value]:
        """The operands of a chunk of w, of which ``count`` elements exist."""
        return self.decoder.decode_chunk(
            self.decoder.load_chunk(self.weights, weight_row, k, count), raw
        )

    def load_x_exponents(self, slab: Index, row: int, chunk: Index) -> ir.Value:
        """The exponents of a row of x for a chunk, in the lanes of its sums."""
        return ops.load(self.x_exponents, [slab * self.rows + row, chunk, 0], self.isa.lanes)

    def sum_factors(self, factors: ir.Value, slab: Index, row: int, chunk: Index) -> ir.Value:
        """What the sums of a chunk are multiplied by, with ``factors`` for w; x is folded."""
        return factors

    def chunk_sums(self, weights: list[ir.Value], slab: Index, row: int, chunk: Index) -> ir.Value:
        """The products of a chunk of w with a row of x, added up a lane."""
        sums = zero_accumulator(self.isa)
        for i, weight in enumerate(weights):
            x = self._load_x(slab, row, chunk, i, ops.length(weight))
            sums = multiply_add(self.isa, sums, weight, x)
        return sums

    def _load_x(self, slab: Index, row: int, chunk: Index, i: int, size: int) -> ir.Value:
        """Operand ``i`` of a chunk of a row of x."""
        return ops.load(self.x, [slab, chunk, row, i * size], size, 64)
