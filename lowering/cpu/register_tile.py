# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The register tile of the tiled kernel: how its sums are held and multiplied on."""

from __future__ import annotations

from iree.compiler import ir

from block32.lowering.common.index import Index
from block32.lowering.cpu import ops
from block32.lowering.cpu.isa import InstructionSet
from block32.lowering.cpu.panel import Panel
from block32.lowering.cpu.registers import (
    as_operand,
    broadcast_operand,
    multiply_add,
    multiply_pairs,
)


class RegisterTile:
    """Sums of some rows and columns of y, a register being a few columns of one row.

    One step along K is an outer product: a word of each row is multiplied with one of each column.
    """

    def __init__(self, isa: InstructionSet, rows: int, columns: int, panel: Panel, x: ir.Value):
        """A tile of ``rows`` x ``columns``, of slabs ``x`` (see ``pack.slab_values``)."""
        self.isa = isa
        self.rows = rows
        self.columns = columns
        self.panel = panel
        self.x = x

    def from_rows(self, sums: list[ir.Value]) -> list[ir.Value]:
        """The tile's registers from those of its rows, one row after the other."""
        return sums

    def to_rows(self, sums: list[ir.Value]) -> list[ir.Value]:
        """What ``from_rows`` was given."""
        return sums

    def multiply(
        self, slab: Index, at: Index, step: Index, x_step: Index, sums: list[ir.Value]
    ) -> list[ir.Value]:
        """One step along K: ``step`` of the panel's columns from ``at``, ``x_step`` of the slab."""
        lanes = self.isa.lanes
        vectors = range(self.columns // lanes)
        weights = [self.panel.operand(step, at + v * lanes) for v in vectors]
        result = []
        for row in range(self.rows):
            broadcast = broadcast_operand(self.isa, ops.load_scalar(self.x, [slab, x_step, row]))
            for v in vectors:
                old = sums[row * len(vectors) + v]
                result.append(multiply_add(self.isa, old, broadcast, weights[v]))
        return result


class PairTile(RegisterTile):
    """A tile whose registers are two columns of two rows, as ``bfmmla`` has them.

    A step along K is four elements: an operand holds them of two rows of x or of w.
    """

    def from_rows(self, sums: list[ir.Value]) -> list[ir.Value]:
        """From four columns of two rows each, two registers of two columns."""
        result = []
        for upper, lower in self._row_pairs(sums):
            result += [ops.shuffle(upper, lower, order) for order in ((0, 1, 4, 5), (2, 3, 6, 7))]
        return result

    def to_rows(self, sums: list[ir.Value]) -> list[ir.Value]:
        """The same moves the other way: each pair of rows, their columns in order."""
        registers = self.columns // 2
        result = []
        for first in range(0, len(sums), registers):
            pairs = list(
                zip(
                    sums[first : first + registers : 2],
                    sums[first + 1 : first + registers : 2],
                    strict=True,
                )
            )
            for order in ((0, 1, 4, 5), (2, 3, 6, 7)):
                result += [ops.shuffle(left, right, order) for left, right in pairs]
        return result

    def _row_pairs(self, sums: list[ir.Value]) -> list[tuple[ir.Value, ir.Value]]:
        """Registers of four columns, those of an even row beside those of the next one."""
        count = self.columns // self.isa.lanes
        return [
            (sums[row * count + v], sums[(row + 1) * count + v])
            for row in range(0, self.rows, 2)
            for v in range(count)
        ]

    def multiply(
        self, slab: Index, at: Index, step: Index, x_step: Index, sums: list[ir.Value]
    ) -> list[ir.Value]:
        """Each pair of rows with each pair of columns."""
        weights = [self.panel.operand(step, at + column) for column in range(0, self.columns, 2)]
        result = []
        for row in range(0, self.rows, 2):
            words = ops.load(self.x, [slab, x_step, row], 2, 64)
            x = as_operand(self.isa, words)
            result += [
                multiply_pairs(sums[len(result) + i], x, weight) for i, weight in enumerate(weights)
            ]
        return result


def register_tile(
    isa: InstructionSet, rows: int, columns: int, panel: Panel, x: ir.Value
) -> RegisterTile:
    """The tile that the instruction set multiplies."""
    return (PairTile if isa.mmla else RegisterTile)(isa, rows, columns, panel, x)
