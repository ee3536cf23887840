# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The matrix kernel: products of whole tiles by AMX, for two rows of x and more.

The weight is the left operand of a product and x the right one, so that tiles of sums hold y
transposed: w is decoded along its rows, just as it lies in memory, and what has to be turned is
the small x, while it is packed, and y at the end. A workgroup takes some rows of w at a time and
walks K in parts. For each part it decodes these rows into a *panel* of tiles and multiplies all of
its slabs of x with it. Panel and sums are on the stack and stay in the first cache; x is read from
the second, so that a workgroup's rows of x should fit there.

Where the scales of x or of w may not be folded, or where the system does not grant the use of
tiles, vector instructions multiply the same tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import (
    Index,
    IndexValue,
    choose,
    less,
    maximum,
    minimum,
)
from block32.lowering.cpu import amx, operands, ops, pack
from block32.lowering.cpu.decode import Decoder
from block32.lowering.cpu.fold import Factors
from block32.lowering.cpu.isa import instruction_set
from block32.lowering.cpu.registers import (
    broadcast_operand,
    multiply_add,
    transpose,
    zero_accumulator,
)
from block32.lowering.cpu.scales import Exponents
from block32.lowering.cpu.store import ResultStore
from block32.lowering.cpu.tiled import Partition
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import BLOCK_K, ScaledMatmul

#: Rows and columns of a tile of sums.
TILE = amx.ROWS
#: bf16 pairs in a row of a tile.
PAIRS = amx.DEPTH // 2
#: Elements of a tile of 32-bit elements.
ELEMENTS = TILE * TILE
#: Rows of w that are decoded with the same factors.
_SCALE_ROWS = 32


def emit_matrix(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    """Write the kernel: a workgroup computes ``tile[1]`` columns of y for its slabs of rows."""
    _Matrix(problem, tier, kernel).emit()


def most_slabs(tier: KernelTier) -> int:
    """Slabs that a workgroup may have."""
    assert tier.tile is not None and tier.mma is not None
    return max(tier.tile[0] // tier.mma[0], 1)


def stack_bytes(tier: KernelTier) -> int:
    """What the panel and the sums of a workgroup take."""
    assert tier.tile is not None and tier.mma is not None
    slab_rows, panel_rows, _ = tier.mma
    return panel_rows * (2 * tier.tile[2] + 4 * slab_rows * most_slabs(tier))


class _Panel:
    """Some rows of w over a part of K as tiles ``[16 rows of w][step of 32 K][row][pair]``.

    A row of a tile holds what one operand of the decoder does; x is packed in the same order.
    """

    def __init__(self, kernel: KernelContext, tier: KernelTier, part_k: int):
        assert tier.mma is not None
        self._kernel = kernel
        self._problem = kernel.problem
        self._isa = instruction_set(tier.isa)
        self.rows = tier.mma[1]
        self.part_k = part_k
        self.steps = part_k // amx.DEPTH
        self._chunks = part_k // self._isa.chunk
        self._panels_ahead = tier.stages - 1
        # Where several slabs follow, weights are fetched in the time that their products take.
        self._fetches = most_slabs(tier) == 1
        self._decoder = Decoder(self._isa, kernel.problem.rhs)
        self._factors = Factors(self._isa)
        self._exponents = Exponents(self._isa)
        self._weights = operands.rhs_codes(kernel)
        self._scales = operands.rhs_scales(kernel)
        tiles = self.rows // TILE * self.steps
        self.buffer = ops.stack_buffer(f"memref<{tiles}x{TILE}x{PAIRS}xi32>")
        self._chunk_factors = ops.stack_buffer(f"memref<{self._chunks}x{self._isa.lanes}xi32>")

    def tile(self, group: Index, step: Index) -> Index:
        """The position of the tile of 16 rows and one step."""
        return group * self.steps + step

    def may_fold(self, column: Index) -> ir.Value:
        """Whether the scales of the panel's rows may be folded for all of K, as an i1."""
        scale_rows, _ = self._problem.rhs_scale_shape
        share = self._problem.rhs_block[0]
        first = column // share
        count = minimum(scale_rows - first, -(-self.rows // share))
        return operands.rhs_fold_check(self._kernel).may_fold(first, count)

    def exponents(self, weight_row: Index, block: Index, is_folded: ir.Value) -> ir.Value:
        """What is left of one row's scale for one block of K, in every lane."""
        position = [self._existing_row(weight_row) // self._problem.rhs_block[0], block]
        scale = ops.load_scalar(self._scales, position)
        left = arith.select(is_folded, ops.splat(127, ops.i8()), scale)
        return ops.broadcast(self._exponents.from_bytes(left), self._isa.lanes)

    def fill(self, column: Index, k: IndexValue, is_folded: ir.Value) -> None:
        """Decode the rows from ``column`` on, from ``k`` on."""
        chunk = self._isa.chunk
        first_chunk = k // chunk
        chunks = minimum(-(-self._problem.k // chunk) - first_chunk, self._chunks)
        share = self._problem.rhs_block[0]

        def fill_rows(first: IndexValue) -> None:
            if share > 1:
                scale_row = self._existing_row(column + first) // share
                self._fill_factors(scale_row, first_chunk, chunks, is_folded)

            def fill_row(row: IndexValue) -> None:
                weight_row = self._existing_row(column + row)
                if share == 1:
                    self._fill_factors(weight_row, first_chunk, chunks, is_folded)

                def fill_chunk(i: IndexValue) -> None:
                    self._fill_chunk(row, weight_row, first_chunk + i, i)
                    if self._fetches:
                        self.fetch(column, k, row, i * chunk)

                ops.repeat(0, chunks, 1, fill_chunk)

            ops.repeat(first, first + min(self.rows, _SCALE_ROWS), 1, fill_row)

        ops.repeat(0, self.rows, min(self.rows, _SCALE_ROWS), fill_rows)

    def fetch(self, column: Index, k: IndexValue, row: Index, depth: Index) -> None:
        """Ask for weights that are decoded ``stages - 1`` panels later, ``depth`` K into that one.

        A panel is short pieces of many rows, which processors do not fetch ahead by themselves.
        """
        after = k + min(self._panels_ahead * self.part_k, self._problem.k)
        has_more = less(after, self._problem.k)
        first = choose(has_more, column, column + self.rows)
        k_fetched = choose(has_more, after, after - self._problem.k) + depth
        position = [
            minimum(first + row, self._problem.n - 1),
            k_fetched // self._decoder.k_per_byte,
        ]
        ops.prefetch(self._weights, position)

    def _existing_row(self, row: Index) -> Index:
        return operands.existing_row(self._problem, row, self.rows)

    def _fill_factors(
        self, scale_row: Index, first_chunk: Index, chunks: Index, is_folded: ir.Value
    ) -> None:
        """What a row's chunks are multiplied by, each block's in the lanes of its pairs."""
        size = self._isa.chunk

        def fill(i: IndexValue) -> None:
            chunk = first_chunk + i

            def load(count: int) -> ir.Value:
                return operands.load_chunk_scales(self._scales, scale_row, chunk, count, size)

            scales = operands.whole_or_short(self._problem.k, size, chunk, size // BLOCK_K, load)
            factors = operands.spread_blocks(self._isa, self._factors.of(scales, is_folded))
            ops.store(factors, self._chunk_factors, [i, 0], 64)

        ops.repeat(0, chunks, 1, fill)

    def _fill_chunk(self, row: Index, weight_row: Index, chunk: Index, i: Index) -> None:
        """64 weights as one row of two tiles."""
        k, size = chunk * self._isa.chunk, self._isa.chunk

        def load(count: int) -> ir.Value:
            return self._decoder.load_chunk(self._weights, weight_row, k, count)

        width = self._decoder.chunk_bytes
        data = operands.whole_or_short(self._problem.k, size, chunk, width, load)
        factors = ops.load(self._chunk_factors, [i, 0], self._isa.lanes, 64)
        for half, operand in enumerate(self._decoder.decode_chunk(data)):
            value = ops.bitcast(self._factors.apply(operand, factors), ops.i32())
            position = [self.tile(row // TILE, i * 2 + half), row % TILE, 0]
            ops.store(value, self.buffer, position, 64)


class _Matrix:
    """What the parts of the kernel share: buffers, and the tiles in registers."""

    def __init__(self, problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext):
        assert tier.tile is not None and tier.mma is not None
        self.problem = problem
        self.kernel = kernel
        self.isa = instruction_set(tier.isa)
        self.slab_rows, self.panel_rows, _ = tier.mma
        self.columns = tier.tile[1]
        self.part_k = operands.panel_k(problem, tier)
        self.partition = Partition.of(tier, kernel.m)
        self.exponents = Exponents(self.isa)
        # Then tile registers hold the sums over all of K.
        self.most_slabs = most_slabs(tier)
        self.is_one_slab = self.most_slabs == 1
        # Tiles of sums that a panel and a slab make.
        self.along_n, self.along_m = self.panel_rows // TILE, self.slab_rows // TILE
        n_workgroup, m_workgroup = kernel.workgroup_id(0), kernel.workgroup_id(1)
        self.first_column = n_workgroup * self.columns
        self.first_slab = m_workgroup * self.partition.slabs_each
        tiles = self.most_slabs * self.along_n * self.along_m
        self.sums = ops.stack_buffer(f"memref<{tiles}x{TILE}x{TILE}xf32>")
        self.panel = _Panel(kernel, tier, self.part_k)
        slabs = self.partition.slabs
        self.x = pack.TileLayout(kernel, tier, slabs)
        self.x_scales = pack.slab_scales(kernel, self.slab_rows, slabs)
        self.flags = pack.folded_flags(kernel, slabs)
        self.turned = ops.stack_buffer(f"memref<{TILE}x{TILE}xf32>")
        self.result = ResultStore(kernel)

    def emit(self) -> None:
        """The walk down the rows of w, a panel at a time, each along K; then its results."""
        last = minimum(self.first_column + self.columns, self.problem.n)
        slabs = minimum(self.partition.slabs_each, self.partition.slabs - self.first_slab)
        granted = amx.is_permitted()
        with ops.when(granted):
            amx.configure()

        def panel(column: IndexValue) -> None:
            is_folded = self.panel.may_fold(column)

            def part(k: IndexValue) -> None:
                self.panel.fill(column, k, is_folded)
                self._multiply(column, k, is_folded, slabs, granted)

            ops.repeat(0, self.problem.k, self.part_k, part)
            ops.repeat(0, slabs, 1, lambda slab: self._finish(column, slab))

        ops.repeat(self.first_column, last, self.panel_rows, panel)
        with ops.when(granted):
            amx.release()

    def _multiply(
        self,
        column: IndexValue,
        k: IndexValue,
        is_folded: ir.Value,
        slabs: Index,
        granted: ir.Value,
    ) -> None:
        """Multiply every slab with the panel."""

        def multiply(slab: IndexValue) -> None:
            x_folded = pack.is_folded(self.flags, self.first_slab + slab)
            both_folded = arith.andi(x_folded, is_folded)
            ops.choose(
                arith.andi(both_folded, granted),
                lambda: self._multiply_tiles(column, slab, k),
                lambda: self._multiply_vectors(column, slab, k, is_folded, both_folded),
            )

        ops.repeat(0, slabs, 1, multiply)

    def _sums_tile(self, slab: Index, i: Index, j: Index) -> Index:
        """Where the sums of tile ``i`` of the panel and tile ``j`` of the slab rest."""
        return (slab * self.along_n + i) * self.along_m + j

    def _x_tile(self, k: Index, slab: Index, step: Index, j: Index) -> Index:
        """The position of 16 rows of x for one step of the part of K at ``k``."""
        return self.x.position(self.first_slab + slab, k) + step * self.along_m + j

    def _depth(self, k: Index) -> Index:
        """Elements of K in the part that starts at ``k``, padded to whole chunks."""
        return minimum(operands.padded_k(self.problem, self.isa) - k, self.part_k)

    def _multiply_tiles(self, column: Index, slab: Index, k: IndexValue) -> None:
        """A part of K by tile instructions; the sums stay in tile registers meanwhile."""
        tiles = [(i, j) for i in range(self.along_n) for j in range(self.along_m)]
        first_x = len(tiles)
        first_w = first_x + self.along_m
        places = {
            at: self._sums_tile(slab, *tile) * amx.TILE_BYTES for at, tile in enumerate(tiles)
        }

        def for_each(action: Callable[[int, ir.Value, Index], None]) -> None:
            for register, place in places.items():
                action(register, self.sums, place)

        def zero() -> None:
            for_each(lambda register, *_: amx.zero(register))

        if self.is_one_slab:
            with ops.when(ops.is_equal(k, 0)):
                zero()
        else:
            ops.choose(ops.is_equal(k, 0), zero, lambda: for_each(amx.load))

        def step(number: Index) -> None:
            for j in range(self.along_m):
                x_tile = self._x_tile(k, slab, number, j)
                amx.load(first_x + j, self.x.values, x_tile * amx.TILE_BYTES)
            for i in range(self.along_n):
                register = first_w + i % (amx.REGISTERS - first_w)
                amx.load(register, self.panel.buffer, self.panel.tile(i, number) * amx.TILE_BYTES)
                for j in range(self.along_m):
                    amx.multiply(i * self.along_m + j, register, first_x + j)

        steps = self.isa.chunk // amx.DEPTH
        fetched = -(-self.panel_rows // self.most_slabs)

        def chunk(number: IndexValue) -> None:
            if not self.is_one_slab:
                for row in range(fetched):
                    self.panel.fetch(column, k, slab * fetched + row, number * amx.DEPTH)
            for offset in range(steps):
                step(number + offset)

        ops.repeat(0, self._depth(k) // amx.DEPTH, steps, chunk)
        if self.is_one_slab:
            with ops.when(ops.is_below(self.problem.k - 1, k + self.part_k)):
                for_each(amx.store)
        else:
            for_each(amx.store)

    def _multiply_vectors(
        self,
        column: Index,
        slab: Index,
        k: IndexValue,
        is_folded: ir.Value,
        both_folded: ir.Value,
    ) -> None:
        """A part of K by vector instructions, each block of it rescaled unless all is folded."""

        def tile(number: IndexValue) -> None:
            i, j = number // self.along_m, number % self.along_m
            at = self._sums_tile(slab, i, j)
            with ops.when(ops.is_equal(k, 0)):
                for row in range(TILE):
                    ops.store(zero_accumulator(self.isa), self.sums, [at, row, 0], 64)
            ops.choose(
                both_folded,
                lambda: self._add_folded(at, slab, i, j, k),
                lambda: self._add_exact(at, column, slab, i, j, k, is_folded),
            )

        ops.repeat(0, self.along_n * self.along_m, 1, tile)

    def _add_folded(self, at: Index, slab: Index, i: Index, j: Index, k: Index) -> None:
        rows = range(TILE)
        sums = [ops.load(self.sums, [at, row, 0], TILE, 64) for row in rows]

        def step(number: IndexValue, sums: list[ir.Value]) -> list[ir.Value]:
            x_tile = self._x_tile(k, slab, number, j)
            return self._multiply_pairs(self.panel.tile(i, number), x_tile, 0, PAIRS, sums)

        sums = ops.for_range(0, self._depth(k) // amx.DEPTH, 1, sums, step)
        for row in rows:
            ops.store(sums[row], self.sums, [at, row, 0], 64)

    def _add_exact(
        self,
        at: Index,
        column: Index,
        slab: Index,
        i: Index,
        j: Index,
        k: Index,
        is_folded: ir.Value,
    ) -> None:
        blocks = minimum(self.problem.k_blocks - k // BLOCK_K, self.part_k // BLOCK_K)
        # A chunk's operands hold half of each of its blocks: that is the decoder's order.
        in_chunk = self.isa.chunk // BLOCK_K
        share = PAIRS // in_chunk

        def add_block(block: IndexValue) -> None:
            sums = [zero_accumulator(self.isa)] * TILE
            for half in range(in_chunk):
                step = block // in_chunk * in_chunk + half
                first = block % in_chunk * share
                w_tile, x_tile = self.panel.tile(i, step), self._x_tile(k, slab, step, j)
                sums = self._multiply_pairs(w_tile, x_tile, first, share, sums)
            k_block = k // BLOCK_K + block
            position = [self.first_slab + slab, k_block, j * TILE]
            x_exponents = self.exponents.from_bytes(ops.load(self.x_scales, position, TILE))
            for row in range(TILE):
                weight_row = column + i * TILE + row
                left = self.panel.exponents(weight_row, k_block, is_folded)
                scaled = self.exponents.rescale(sums[row], self.exponents.add(x_exponents, left))
                old = ops.load(self.sums, [at, row, 0], TILE, 64)
                ops.store(arith.addf(old, scaled), self.sums, [at, row, 0], 64)

        ops.repeat(0, blocks, 1, add_block)

    def _multiply_pairs(
        self, w_tile: Index, x_tile: Index, first: Index, count: int, sums: Sequence[ir.Value]
    ) -> list[ir.Value]:
        """Some pairs of one step: 16 rows of w against 16 rows of x, which are the lanes."""

        def multiply(number: IndexValue, sums: list[ir.Value]) -> list[ir.Value]:
            pair = first + number
            x = ops.load(self.x.values, [x_tile, pair, 0], TILE, 64)
            x = ops.bitcast(x, ir.BF16Type.get())
            result = []
            for row, old in enumerate(sums):
                w = ops.load_scalar(self.panel.buffer, [w_tile, row, pair])
                result.append(multiply_add(self.isa, old, broadcast_operand(self.isa, w), x))
            return result

        return ops.for_range(0, count, 1, sums, multiply)

    def _finish(self, column: Index, slab: Index) -> None:
        """Turn the sums of a panel and a slab, and store the rows and columns that exist."""

        def tile(number: IndexValue) -> None:
            i, j = number // self.along_m, number % self.along_m
            at = self._sums_tile(slab, i, j)
            rows = [ops.load(self.sums, [at, row, 0], TILE, 64) for row in range(TILE)]
            for row, values in enumerate(transpose(rows)):
                ops.store(values, self.turned, [row, 0], 64)
            first = ((self.first_slab + slab) * self.along_m + j) * TILE
            present = minimum(maximum(self.kernel.m, first) - first, TILE)

            def store(row: IndexValue) -> None:
                values = ops.load(self.turned, [row, 0], TILE, 64)
                self.result.store(values, first + row, column + i * TILE)

            ops.repeat(0, present, 1, store)

        ops.repeat(0, self.along_n * self.along_m, 1, tile)
