# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a workgroup works on: its tile, its range of K, and the memory that belongs to them.

Buffers start at the tile and end with its last row that exists, so 32-bit offsets are enough for
any matrix, and a row past M or N is past the end of its buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

from block32.lowering.common.index import Condition, Index, IndexValue, less, minimum
from block32.lowering.common.tile_order import (
    die_contiguous,
    split_position,
    tile_position,
)
from block32.lowering.gfx950 import ops
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.machine import XCDS
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ELEMENT_BITS, ceil_div


@dataclass(frozen=True)
class Workgroup:
    """A workgroup's place in the launch. All values are i32 and the same in all its lanes.

    Attributes:
        geometry: Sizes.
        kernel: Bindings.
        m: Rows of x.
        tile_m: The tile's position along M.
        tile_n: The tile's position along N.
        split: The workgroup's range of K, 0 without split-K.
        has_tile: Whether the tile exists: a split-K grid is rounded up.
    """

    geometry: Geometry
    kernel: KernelContext
    m: Index
    tile_m: Index
    tile_n: Index
    split: Index
    has_tile: Condition

    @property
    def tile(self) -> Index:
        """The number of the tile in slots and counters."""
        return self.tile_m * self.geometry.tiles_n + self.tile_n

    @property
    def first_row(self) -> Index:
        """The tile's first row of x and y."""
        return self.tile_m * self.geometry.block_m

    @property
    def first_column(self) -> Index:
        """The tile's first column of y, row of w."""
        return self.tile_n * self.geometry.block_n

    @property
    def rows(self) -> Index:
        """Rows of the tile that exist."""
        return minimum(self.m - self.first_row, self.geometry.block_m)

    @property
    def columns(self) -> Index:
        """Columns of the tile that exist."""
        return minimum(self.geometry.problem.n - self.first_column, self.geometry.block_n)

    @property
    def k_start(self) -> Index:
        """The first K of the range."""
        return self.geometry.partition.start(self.split)

    @property
    def k_end(self) -> Index:
        """One past the last K of the range."""
        return self.geometry.partition.end(self.split)

    def row_buffer(self, name: str, first: Index, count: Index, row_bytes: int) -> ops.Buffer:
        """``count`` rows of a row-major operand, from row ``first`` on."""
        address = ops.global_pointer(self.kernel, name) + ops.as_i64(first) * row_bytes
        return ops.make_buffer(address, count * row_bytes)

    def x(self) -> ops.Buffer:
        """The tile's rows of x as they come from memory."""
        row_bytes = ceil_div(self.geometry.problem.k * self.geometry.loaded_lhs_bits, 8)
        return self.row_buffer("lhs", self.first_row, self.rows, row_bytes)

    def x_scales(self) -> ops.Buffer:
        """The scales of the tile's rows of x."""
        k_blocks = self.geometry.problem.k_blocks
        return self.row_buffer("lhs_scale", self.first_row, self.rows, k_blocks)

    def w(self) -> ops.Buffer:
        """The tile's rows of w."""
        row_bytes = self.geometry.problem.rhs_row_bytes
        first = self.first_weight_row + self.first_column
        return self.row_buffer("rhs", first, self.columns, row_bytes)

    def w_scales(self) -> ops.Buffer:
        """The scales of the tile's rows of w."""
        rows, k_blocks = self.geometry.problem.rhs_scale_shape
        first = self.first_column // self.geometry.problem.rhs_block[0]
        count = minimum(rows - first, self._scale_rows)
        return self.row_buffer("rhs_scale", self.first_weight_scale_row + first, count, k_blocks)

    @property
    def first_weight_row(self) -> Index:
        """The first row of the weight that the workgroup reads."""
        return 0

    @property
    def first_weight_scale_row(self) -> Index:
        """The first row of that weight's scales."""
        return 0

    @property
    def _scale_rows(self) -> int:
        return max(1, self.geometry.block_n // self.geometry.problem.rhs_block[0])

    def w_scale_row(self, row: Index) -> Index:
        """The scale row of a row of w, both counted from the tile's first.

        A tile is a whole number of scale blocks, or lies inside one.
        """
        block = self.geometry.problem.rhs_block[0]
        return row // block if self.geometry.block_n % block == 0 else 0

    def matrix_buffer(self, name: str, element: str) -> ops.Buffer:
        """The tile's rows of an [M, N] operand, from the tile's first column on."""
        element_bytes = ELEMENT_BITS[element] // 8
        row_bytes = self.geometry.problem.n * element_bytes
        skipped = self.first_column * element_bytes
        address = ops.global_pointer(self.kernel, name)
        address += ops.as_i64(self.first_row) * row_bytes
        return ops.make_buffer(address + ops.as_i64(skipped), self.rows * row_bytes - skipped)


def locate(geometry: Geometry, kernel: KernelContext) -> Workgroup:
    """The workgroup that runs this code."""
    m = ops.as_i32(kernel.m)
    number = ops.as_i32(kernel.workgroup_id(0))
    tiles = geometry.tiles(m)
    split: Index = 0
    has_tile: Condition = True
    if geometry.splits > 1:
        tile, split = split_position(number, geometry.splits, XCDS)
        has_tile = less(tile, tiles)
    else:
        tile = die_contiguous(number, tiles, XCDS)
    tile_m, tile_n = tile_position(tile, geometry.tiles_m(m), geometry.tiles_n, geometry.tier.order)
    return Workgroup(geometry, kernel, m, tile_m, tile_n, split, has_tile)


@dataclass(frozen=True)
class Lane:
    """A lane's place in its wave, and its wave's place in the workgroup.

    Attributes:
        wave: The wave's number, in a scalar register.
        row: The lane's row in a fragment.
        group: The lane's group: which K it holds.
    """

    wave: IndexValue
    row: Index
    group: Index

    @classmethod
    def create(cls, geometry: Geometry, lane: Index, wave: IndexValue) -> Lane:
        """From the numbers of lane and wave."""
        return cls(wave, lane % geometry.atom.m, lane // geometry.atom.m)
