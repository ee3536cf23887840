# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The tiled form on ``mma.sync``: f32 accumulation, on every chip."""

from __future__ import annotations

from iree.compiler import ir

from block32.lowering.common.index import Index, IndexValue
from block32.lowering.nvidia.fragments import (
    Fragment,
    FragmentReader,
    multiply,
    operand_types,
)
from block32.lowering.nvidia.instructions import Pointer
from block32.lowering.nvidia.machine import WARP_LANES
from block32.lowering.nvidia.operands import fragment_readers, pair_type, warp_atom
from block32.lowering.nvidia.staged import BlockProducts, StagedKernel


class TiledKernel(StagedKernel):
    """Warps in a grid over the tile, each with its rows of x and w in registers."""

    @property
    def warp_grid(self) -> tuple[int, int]:
        """Warps along M and along N: the grid whose warps read the least from shared memory."""
        grids = [
            (rows, self.tier.warps // rows)
            for rows in range(1, self.tier.warps + 1)
            if self.tier.warps % rows == 0
        ]
        fitting = [grid for grid in grids if fits_warps(self.block_m, self.block_n, grid)]
        assert fitting, "the tile is smaller than its warps' fragments"
        return min(fitting, key=lambda g: self.block_m // g[0] + self.block_n // g[1])

    @property
    def row_groups(self) -> int:
        """Groups of 16 rows that a warp owns."""
        return self.block_m // self.warp_grid[0] // 16

    @property
    def column_groups(self) -> int:
        """Groups of 8 columns that a warp owns."""
        return self.block_n // self.warp_grid[1] // 8

    def first_row(self, thread: Index) -> Index:
        """Warps with one column of the grid are neighbours along M every ``columns``-th."""
        return thread // WARP_LANES // self.warp_grid[1] * (self.row_groups * 16)

    def first_column(self, thread: Index) -> Index:
        """Neighbouring warps are neighbours along N."""
        return thread // WARP_LANES % self.warp_grid[1] * (self.column_groups * 8)

    def prepare(self, thread: IndexValue) -> None:
        """The lane's places in a stage."""
        lane = thread % WARP_LANES
        self._lhs, self._rhs = fragment_readers(
            self.problem, self.chip, self.lhs_tile, self.rhs_tile
        )
        self._lhs_rows = _OperandRows(self._lhs, lane, self.first_row(thread), self.blocks)
        self._rhs_rows = _OperandRows(self._rhs, lane, self.first_column(thread), self.blocks)

    def start_block(self, stage: Pointer, block: int) -> BlockProducts:
        """Read the fragments of one block of K; those of x when they are needed."""
        column_pairs = range(self.column_groups // 2)
        columns = [
            fragment
            for pair in column_pairs
            for fragment in self._rhs_rows.read(stage + self.lhs_tile.bytes, pair, block)
        ]
        rows: dict[int, tuple[Fragment, Fragment]] = {}
        atom = warp_atom(self.problem, self.chip)
        types = operand_types(atom, self.problem.lhs, self.problem.rhs, pair_type(self.problem))

        def products(i: int, j: int) -> list[ir.Value]:
            if i not in rows:
                rows[i] = self._lhs_rows.read(stage, i, block)
            return multiply(atom, rows[i], columns[j], types)

        return products


def fits_warps(block_m: int, block_n: int, grid: tuple[int, int]) -> bool:
    """Whether a tile divides into whole fragments, and into blocks of 32 columns or halves."""
    rows, columns = grid
    if block_m % (rows * 16) or block_n % (columns * 16):
        return False
    own_columns = block_n // columns
    return own_columns == 16 or own_columns % 32 == 0


class _OperandRows:
    """A warp's rows of one operand: fragments of a block of K for 16 rows at a time."""

    def __init__(self, reader: FragmentReader, lane: Index, first_row: Index, blocks: int):
        self._reader = reader
        self._step = reader.blocks_at_once
        self._offsets = reader.lane_offsets(lane, first_row, reader.groups_at_once, blocks)
        self._per_block = len(self._offsets) * self._step // blocks
        self._ahead: dict[tuple[int, int], tuple[Fragment, Fragment]] = {}

    def read(self, base: Pointer, pair: int, block: int) -> tuple[Fragment, Fragment]:
        """The fragments of rows g and g + 8 of the 16 rows ``pair``.

        One read may serve several blocks: those that follow find theirs read.
        """
        if block % self._step == 0:
            self._read_ahead(base, pair, block)
        return self._ahead.pop((pair, block))

    def _read_ahead(self, base: Pointer, pair: int, block: int) -> None:
        reader = self._reader
        first = block // self._step * self._per_block
        offsets = self._offsets[first : first + self._per_block]
        halves: list[list[Fragment]] = []
        for group in range(0, 2, reader.groups_at_once):
            # Phases repeat every 8 rows: further groups are a constant further.
            place = base + (2 * pair + group) * 8 * reader.tile.row_bytes
            halves += reader.read(place, offsets, reader.groups_at_once, self._step)
        for index in range(self._step):
            self._ahead[pair, block + index] = halves[0][index], halves[1][index]
