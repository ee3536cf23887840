# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The panel of the matrix kernel: some rows of w over a part of K, decoded into tiles."""

from __future__ import annotations

from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import Index, IndexValue, choose, less, minimum
from block32.lowering.cpu import amx, operands, ops
from block32.lowering.cpu.decode import Decoder
from block32.lowering.cpu.fold import Factors
from block32.lowering.cpu.isa import instruction_set
from block32.lowering.cpu.scales import ONE_BYTE, Exponents
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import BLOCK_K

#: Rows of a tile.
TILE = amx.ROWS
#: Rows of w that may share a scale, aligned to as many.
SCALE_ROWS = 32


@dataclass(frozen=True)
class _Span:
    """What is decoded in a go.

    Attributes:
        column: The panel's first row of w.
        k: Where its part of K starts.
        first: The first chunk, counted from there.
        is_folded: Whether scales are folded, an i1.
    """

    column: Index
    k: IndexValue
    first: Index
    is_folded: ir.Value


class TilePanel:
    """Some rows of w over a part of K as tiles ``[16 rows of w][block of K][row][pair]``.

    Inside of a block K is in the order that decoding gives; x is packed in the same order.
    """

    def __init__(self, kernel: KernelContext, tier: KernelTier, part_k: int):
        """Take the stack for ``part_k`` elements of K.

        Args:
            kernel: The launch.
            tier: Says how many rows there are.
            part_k: A multiple of the chunk.
        """
        assert tier.mma is not None
        self._kernel = kernel
        self._problem = kernel.problem
        self._isa = instruction_set(tier.isa)
        self.rows = tier.mma[1]
        self.part_k = part_k
        self.steps = part_k // amx.DEPTH
        self._panels_ahead = tier.stages - 1
        # Few rows of x wait for memory, and more lines can be on their way to the second cache.
        # With more rows there is time enough to bring them into the first.
        self._fetch_into = 2 if tier.mma[0] <= TILE else 1
        self._decoder = Decoder(self._isa, kernel.problem.rhs)
        self._factors = Factors(self._isa)
        self._exponents = Exponents(self._isa)
        self._weights = operands.rhs_codes(kernel)
        self._scales = operands.rhs_scales(kernel)
        tiles = self.rows // TILE * self.steps
        self.buffer = ops.stack_buffer(f"memref<{tiles}x{TILE}x{amx.PAIRS}xi32>")

    def tile(self, group: Index, step: Index) -> Index:
        """The position of the tile of 16 rows and one step."""
        return group * self.steps + step

    def may_fold(self, column: Index) -> ir.Value:
        """Whether the scales of the panel's rows may be folded for all of K, as an i1."""
        return operands.panel_may_fold(self._kernel, column, self.rows)

    def exponents(self, weight_row: Index, block: Index, is_folded: ir.Value) -> ir.Value:
        """What is left of one row's scale for one block of K, in every lane."""
        scale = self._scale(self._existing_row(weight_row), block)
        left = arith.select(is_folded, ops.splat(ONE_BYTE, ops.i8()), scale)
        return ops.broadcast(self._exponents.from_bytes(left), self._isa.lanes)

    def fill(self, column: Index, k: IndexValue, is_folded: ir.Value) -> None:
        """Decode the rows from ``column`` on, from ``k`` on."""
        chunk = self._isa.chunk
        chunks = minimum(-(-self._problem.k // chunk) - k // chunk, self.part_k // chunk)
        share = self._problem.rhs_block[0]
        fill_rows = self._fill_sharing_rows if share > 1 else self._fill_row

        def fill_span(first: IndexValue) -> None:
            span = _Span(column, k, first, is_folded)
            ops.repeat(0, self.rows, share, lambda row: fill_rows(span, row))

        ops.repeat(0, chunks, self._span, fill_span)

    def _fetch(self, span: _Span, row: Index, chunk: int) -> None:
        """Ask for a chunk of a row that is decoded ``stages - 1`` panels later.

        A panel is short pieces of many rows, which processors do not fetch ahead by themselves.
        """
        column, k = span.column, span.k
        after = k + min(self._panels_ahead * self.part_k, self._problem.k)
        has_more = less(after, self._problem.k)
        first = choose(has_more, column, column + self.rows)
        # Rows that exist, and one address for all of them.
        first = minimum(first, max(self._problem.n - self.rows, 0))
        k_fetched = choose(has_more, after, after - self._problem.k)
        k_fetched += (span.first + chunk) * self._isa.chunk
        if self._problem.n < self.rows:
            row = minimum(row, self._problem.n - 1)
        position = [first + row, k_fetched // self._decoder.k_per_byte]
        ops.prefetch(self._weights, position, self._fetch_into)

    def _existing_row(self, row: Index) -> Index:
        return operands.existing_row(self._problem, row, self.rows)

    def _scale(self, row: Index, block: Index) -> ir.Value:
        """The scale byte of a row of w; past the last block that of the last one."""
        if self._problem.k_blocks % self._blocks:
            block = minimum(block, self._problem.k_blocks - 1)
        return ops.load_scalar(self._scales, [row // self._problem.rhs_block[0], block])

    @property
    def _span(self) -> int:
        """Chunks of a row that are decoded one after another: lines that are neighbours in memory.

        The tables of two fit in the registers.
        """
        two = 2 * self._isa.chunk
        return 2 if self.part_k % two == self._problem.k % two == 0 else 1

    @property
    def _blocks(self) -> int:
        """Blocks of a chunk."""
        return self._isa.chunk // BLOCK_K

    def _fill_sharing_rows(self, span: _Span, first: Index) -> None:
        """Rows that share their scales, which go into the decoder's tables."""
        first_row = self._existing_row(span.column + first)
        first_block = span.k // BLOCK_K + span.first * self._blocks
        decoders = []
        for at in range(self._span * self._blocks):
            scale = self._scale(first_row, first_block + at)
            folded = arith.select(span.is_folded, scale, ops.splat(ONE_BYTE, scale.type))
            decoders.append(self._decoder.scaled(folded))

        def fill_two_rows(row: IndexValue) -> None:
            rows = [row, row + 1]
            weight_rows = [self._existing_row(span.column + row) for row in rows]
            for at, decoder in enumerate(decoders):
                block = first_block + at
                codes = ops.join([self._load_block(row, block) for row in weight_rows])
                step = span.first * self._blocks + at
                for half, operand in enumerate(decoder.decode_chunk(codes)):
                    self._store_halves(operand, rows, [step, step], half)
                if at % self._blocks == 0:
                    for row in rows:
                        self._fetch(span, row, at // self._blocks)

        last = minimum(first + self._problem.rhs_block[0], self.rows)
        ops.repeat(first, last, 2, fill_two_rows)

    def _fill_row(self, span: _Span, row: Index) -> None:
        """One row, multiplied by scales of its own."""
        weight_row = self._existing_row(span.column + row)
        for chunk in range(self._span):
            steps = [(span.first + chunk) * self._blocks + block for block in range(self._blocks)]
            blocks = [span.k // BLOCK_K + step for step in steps]
            codes = ops.join([self._load_block(weight_row, block) for block in blocks])
            scales = [self._scale(weight_row, block) for block in blocks]
            factors = [self._factors.of(scale, span.is_folded) for scale in scales]
            factors = ops.join([ops.broadcast(factor, 1) for factor in factors])
            factors = operands.spread_blocks(self._isa, factors)
            for half, operand in enumerate(self._decoder.decode_chunk(codes)):
                self._store_halves(self._factors.apply(operand, factors), [row, row], steps, half)
            self._fetch(span, row, chunk)

    def _load_block(self, row: Index, block: Index) -> ir.Value:
        """The codes of a block of a row; zeros past the last block."""
        problem, width = self._problem, BLOCK_K // self._decoder.k_per_byte

        def load(count: int) -> ir.Value:
            k = block * BLOCK_K
            return self._decoder.load_chunk(self._weights, row, k, count, BLOCK_K)

        def load_present() -> ir.Value:
            return operands.whole_or_short(problem.k, BLOCK_K, block, width, load)

        if problem.k_blocks % self._blocks == 0:
            return load_present()
        nothing = ops.splat(0, ops.vector_type(width, ops.i8()))
        is_present = ops.is_below(block, problem.k_blocks)
        (codes,) = ops.choose_values(
            is_present, [nothing.type], lambda: [load_present()], lambda: [nothing]
        )
        return codes

    def _store_halves(
        self, operand: ir.Value, rows: list[Index], steps: list[Index], half: int
    ) -> None:
        """The two halves of a register, each to one half of a row of a tile."""
        pairs = ops.parts(ops.bitcast(operand, ops.i32()), amx.PAIRS // 2)
        for value, row, step in zip(pairs, rows, steps, strict=True):
            position = [self.tile(row // TILE, step), row % TILE, half * (amx.PAIRS // 2)]
            ops.store(value, self.buffer, position, 64)
