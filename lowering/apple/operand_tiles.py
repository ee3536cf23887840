# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A lane's parts of the operands of 16x16x16 matrix instructions, straight from device memory.

Every lane keeps the addresses of its runs and steps them along K. Rows beyond the matrix are not
masked: their addresses are clamped to the last row, once, before the loop; what they compute is
never stored. So one loop serves interior and edge tiles, and never reads out of bounds. Only K
needs a mask, in the last step, where both operands are filled with zeros.

An operand stored with K along the rows has its runs across the clamped axis; an edge tile then
loads element by element, and interior tiles have a loop of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.apple import builder
from block32.lowering.apple.atoms import SimdgroupAtom
from block32.lowering.apple.builder import Int, Pointer, Word, choose, less, wide
from block32.lowering.apple.epilogue import run_alignment


@dataclass(frozen=True)
class Operand:
    """A matrix of which a simdgroup needs 32 rows, seen along K.

    Attributes:
        base: Its first element.
        rows: How many rows it has, at least 1.
        k: Its extent along K.
        transposed: It is stored [K, rows]; then ``rows`` is also its memory stride.
    """

    base: Pointer
    rows: Int
    k: int
    transposed: bool = False


def clamp(index: Int, count: Int) -> Int:
    """``index``, or the last valid one where it lies beyond."""
    if isinstance(index, int) and isinstance(count, int):
        return min(index, count - 1)
    return choose(less(index, count), index, count - 1)


#: Tiles of an operand that a simdgroup's 32 rows make.
TILES = 2

#: Depth of one matrix instruction, and of a step.
DEPTH = 16


class OperandTiles:
    """A lane's addresses of one operand for the two atom tiles of its simdgroup."""

    step = DEPTH

    def __init__(
        self, operand: Operand, atom: SimdgroupAtom, first: Word, lane: Word, clamped: bool = True
    ):
        """Computes the addresses; ``first`` is the simdgroup's first row.

        ``clamped`` says that the tile may reach beyond the operand.
        """
        self.operand = operand
        self.atom = atom
        self.clamped = clamped
        self.row = atom.first_row(lane)
        self.column = atom.first_column(lane)
        self.starts = [first + tile * atom.size for tile in range(TILES)]
        self.pointers = [self._tile_pointers(start) for start in self.starts]

    def _tile_pointers(self, start: Word) -> list[Pointer]:
        """Address of each run of a tile at K = 0."""
        operand, atom = self.operand, self.atom
        pointers: list[Pointer] = []
        for run in range(atom.slots // atom.run):
            row = self.row + run * atom.run_rows
            if operand.transposed:
                offset = wide(row) * wide(operand.rows) + wide(start + self.column)
            else:
                index = start + row
                if self.clamped:
                    index = clamp(index, operand.rows)
                offset = wide(index) * operand.k + wide(self.column)
            pointers.append(operand.base.at(offset))
        return pointers

    def load(self, k: Int, offset: int = 0, count: int = DEPTH) -> list[list[ir.Value]]:
        """The two tiles at ``k + offset``, of which ``count`` columns lie inside K.

        Zeros take the place of what lies beyond. The offset goes into the addresses as it is.

        Returns:
            For each matrix instruction of the step, here one, the operand of each tile.
        """
        if count < self.atom.size:
            return [[self._masked_tile(tile, k + offset, count) for tile in range(TILES)]]
        return [[self._tile(tile, k, offset) for tile in range(TILES)]]

    def _tile(self, tile: int, k: Int, offset: int) -> ir.Value:
        if self.operand.transposed and self.clamped:
            return self._masked_tile(tile, k + offset, self.atom.size)
        alignment = 0
        if not self.operand.transposed:
            alignment = run_alignment(self.operand.k, self.operand.base.element, self.atom.run)
        steps = self._along_k(k), self._along_k(offset)
        runs = [
            pointer.at(steps[0]).at(steps[1]).load(self.atom.run, alignment or None)
            for pointer in self.pointers[tile]
        ]
        return builder.concatenate(*runs)

    def _along_k(self, k: Int) -> Int:
        """Distance in elements from K = 0 to ``k``."""
        return wide(k) * wide(self.operand.rows) if self.operand.transposed else k

    def _masked_tile(self, tile: int, k: Int, count: int) -> ir.Value:
        """Loads element by element, from clamped addresses; what lies outside K becomes zero."""
        atom, operand = self.atom, self.operand
        zero = builder.zero(builder.element_type(operand.base.element))
        elements: list[ir.Value] = []
        for slot in range(atom.slots):
            row = self.row + atom.run_rows * (slot // atom.run)
            column = self.column + slot % atom.run
            depth, across = (row, column) if operand.transposed else (column, row)
            inner = clamp(depth, count)
            outer = clamp(self.starts[tile] + across, operand.rows)
            stride = operand.rows if operand.transposed else operand.k
            memory_row, memory_column = (
                (inner + k, outer) if operand.transposed else (outer, inner + k)
            )
            offset = wide(memory_row) * wide(stride) + wide(memory_column)
            value = operand.base.at(offset).load()
            if count < atom.size:
                value = arith.select(less(depth, count), value, zero)
            elements.append(value)
        return builder.from_elements(elements)
