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
from block32.lowering.common.index import Index, IndexValue, maximum, minimum
from block32.lowering.cpu import amx, operands, ops, pack
from block32.lowering.cpu.isa import instruction_set
from block32.lowering.cpu.registers import (
    broadcast_operand,
    multiply_add,
    transpose,
    zero_accumulator,
)
from block32.lowering.cpu.scales import Exponents
from block32.lowering.cpu.store import ResultStore
from block32.lowering.cpu.tile_panel import TILE, TilePanel
from block32.lowering.cpu.tiled import Partition, most_slabs
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import BLOCK_K, ScaledMatmul

#: The one number of rows below a tile's that a slab may have.
FEW_ROWS = 8


def emit_matrix(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    """Write the kernel: a workgroup computes ``tile[1]`` columns of y for its slabs of rows."""
    _Matrix(problem, tier, kernel).emit()


def stack_bytes(tier: KernelTier) -> int:
    """What the panel and the sums of a workgroup take."""
    assert tier.tile is not None and tier.mma is not None
    panel_rows = tier.mma[1]
    sums = tiles_along_n(tier) * pack.tiles_of_slab(tier) * most_slabs(tier)
    return 2 * panel_rows * tier.tile[2] + sums * amx.TILE_BYTES


def tiles_along_n(tier: KernelTier) -> int:
    """Tiles of a panel."""
    assert tier.mma is not None
    return tier.mma[1] // TILE


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
        self.along_n, self.along_m = tiles_along_n(tier), pack.tiles_of_slab(tier)
        n_workgroup, m_workgroup = kernel.workgroup_id(0), kernel.workgroup_id(1)
        self.first_column = n_workgroup * self.columns
        self.first_slab = m_workgroup * self.partition.slabs_each
        tiles = self.most_slabs * self.along_n * self.along_m
        self.sums = ops.stack_buffer(f"memref<{tiles}x{TILE}x{TILE}xf32>")
        self.panel = TilePanel(kernel, tier, self.part_k)
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
            amx.configure([self.x.row_bytes] * self._first_w)

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
                lambda: self._multiply_tiles(slab, k),
                lambda: self._multiply_vectors(column, slab, k, is_folded, both_folded),
            )

        ops.repeat(0, slabs, 1, multiply)

    def _sums_tile(self, slab: Index, i: Index, j: Index) -> Index:
        """Where the sums of tile ``i`` of the panel and tile ``j`` of the slab rest."""
        return (slab * self.along_n + i) * self.along_m + j

    def _x_tile(self, k: Index, slab: Index, step: Index, j: Index) -> Index:
        """The position of a tile of x for one step of the part of K at ``k``."""
        return self.x.position(self.first_slab + slab, k) + step * self.along_m + j

    @property
    def _first_x(self) -> int:
        """The first tile register of x: those of the sums come before."""
        return self.along_n * self.along_m

    @property
    def _first_w(self) -> int:
        """The first tile register of w: those that are left take turns."""
        return self._first_x + self.along_m

    def _depth(self, k: Index) -> Index:
        """Elements of K in the part that starts at ``k``, padded to whole chunks."""
        return minimum(operands.padded_k(self.problem, self.isa) - k, self.part_k)

    def _multiply_tiles(self, slab: Index, k: IndexValue) -> None:
        """A part of K by tile instructions; the sums stay in tile registers meanwhile."""
        tiles = [(i, j) for i in range(self.along_n) for j in range(self.along_m)]
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
                offset = self._x_tile(k, slab, number, j) * self.x.tile_bytes
                amx.load(self._first_x + j, self.x.values, offset, self.x.row_bytes)
            for i in range(self.along_n):
                register = self._first_w + i % (amx.REGISTERS - self._first_w)
                amx.load(register, self.panel.buffer, self.panel.tile(i, number) * amx.TILE_BYTES)
                for j in range(self.along_m):
                    amx.multiply(i * self.along_m + j, register, self._first_x + j)

        steps = self.isa.chunk // amx.DEPTH

        def chunk(number: IndexValue) -> None:
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
            return self._multiply_step(self.panel.tile(i, number), k, slab, number, j, sums)

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

        def add_block(block: IndexValue) -> None:
            sums = [zero_accumulator(self.isa)] * TILE
            sums = self._multiply_step(self.panel.tile(i, block), k, slab, block, j, sums)
            k_block = k // BLOCK_K + block
            position = [self.first_slab + slab, k_block, j * TILE]
            x_exponents = self.exponents.from_bytes(
                ops.load_first(self.x_scales, position, self.x.rows, TILE)
            )
            for row in range(TILE):
                weight_row = column + i * TILE + row
                left = self.panel.exponents(weight_row, k_block, is_folded)
                scaled = self.exponents.rescale(sums[row], self.exponents.add(x_exponents, left))
                old = ops.load(self.sums, [at, row, 0], TILE, 64)
                ops.store(arith.addf(old, scaled), self.sums, [at, row, 0], 64)

        ops.repeat(0, blocks, 1, add_block)

    def _multiply_step(
        self, w_tile: Index, k: Index, slab: Index, step: Index, j: Index, sums: Sequence[ir.Value]
    ) -> list[ir.Value]:
        """One step: 16 rows of w against up to 16 rows of x, which are the lanes."""
        x_tile = self._x_tile(k, slab, step, j)

        def multiply(pair: IndexValue, sums: list[ir.Value]) -> list[ir.Value]:
            x = ops.load_first(self.x.values, [x_tile, pair, 0], self.x.rows, TILE)
            x = ops.bitcast(x, ir.BF16Type.get())
            result = []
            for row, old in enumerate(sums):
                w = ops.load_scalar(self.panel.buffer, [w_tile, row, pair])
                result.append(multiply_add(self.isa, old, broadcast_operand(self.isa, w), x))
            return result

        return ops.for_range(0, amx.PAIRS, 1, sums, multiply)

    def _finish(self, column: Index, slab: Index) -> None:
        """Turn the sums of a panel and a slab, and store the rows and columns that exist."""

        def tile(number: IndexValue) -> None:
            i, j = number // self.along_m, number % self.along_m
            at = self._sums_tile(slab, i, j)
            for row, values in enumerate(self._turned(at)):
                ops.store(values, self.turned, [row, 0], 64)
            first = ((self.first_slab + slab) * self.along_m + j) * self.x.rows
            present = minimum(maximum(self.kernel.m, first) - first, self.x.rows)

            def store(row: IndexValue) -> None:
                values = ops.load(self.turned, [row, 0], TILE, 64)
                self.result.store(values, first + row, column + i * TILE)

            ops.repeat(0, present, 1, store)

        ops.repeat(0, self.along_n * self.along_m, 1, tile)

    def _turned(self, at: Index) -> list[ir.Value]:
        """A tile of sums as rows of y: 16 rows of as many lanes as x has rows become 16 columns."""
        size = self.x.rows
        firsts = range(0, TILE, size)
        rows = [
            ops.join([ops.load(self.sums, [at, first + row, 0], size, 64) for first in firsts])
            for row in range(size)
        ]
        return transpose(rows, len(firsts))
