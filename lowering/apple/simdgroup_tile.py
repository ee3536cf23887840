# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The 32x32 tile of one simdgroup: 2x2 matrix instructions, operands straight from device memory.

Every lane keeps the addresses of its runs and steps them along K. Rows beyond the matrix are not
masked: their addresses are clamped to the last row, once, before the loop; what they compute is
never stored. So one loop serves interior and edge tiles, and never reads out of bounds. Only K
needs a mask, in the last step, where both operands are filled with zeros.

An operand stored with K along the rows has its runs across the clamped axis; an edge tile then
loads element by element, and interior tiles have a loop of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.lowering.apple import block_scaled, builder
from block32.lowering.apple.atoms import SimdgroupAtom
from block32.lowering.apple.builder import AirKernel, Int, Pointer, Word, choose, less, wide
from block32.lowering.apple.epilogue import run_alignment, store_run, store_zeros
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.tile_scales import WORD, Scales, TileScales
from block32.lowering.problem import BLOCK_K, ceil_div

#: Rows and columns of y that one simdgroup owns, and instructions along each.
SIMDGROUP_TILE = 32
ATOMS = 2

#: Depth of one matrix instruction.
STEP = 16


@dataclass(frozen=True)
class Operand:
    """A matrix of which a simdgroup needs 32 rows, seen along K.

    Attributes:
        base: its first element.
        rows: how many rows it has, at least 1.
        k: its extent along K.
        transposed: it is stored [K, rows]; then ``rows`` is also its memory stride.
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


class OperandTiles:
    """A lane's addresses of one operand for the two atom tiles of its simdgroup."""

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
        self.starts = [first + tile * atom.size for tile in range(ATOMS)]
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

    def load(self, k: Int, offset: int = 0, count: int = STEP) -> list[ir.Value]:
        """The two tiles at ``k + offset``, of which ``count`` columns lie inside K.

        Zeros take the place of what lies beyond. The offset goes into the addresses as it is.
        """
        if count < self.atom.size:
            return [self._masked_tile(tile, k + offset, count) for tile in range(ATOMS)]
        return [self._tile(tile, k, offset) for tile in range(ATOMS)]

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


class SimdgroupTile:
    """Computes and stores the tile of y at (m0, n0), of which at least one element is inside."""

    def __init__(
        self,
        kernel: AirKernel,
        matmul: Matmul,
        lhs: Operand,
        rhs: Operand,
        origin: tuple[Word, Word],
        scales: Scales | None = None,
    ):
        self.kernel = kernel
        self.matmul = matmul
        self.atom = matmul.atom
        self.lhs = lhs
        self.rhs = rhs
        self.m0, self.n0 = origin
        self.scales = scales

    def run(self, finish: Callable[[list[ir.Value]], None]) -> None:
        """Computes the accumulators and hands them to ``finish``, row of tiles by row of tiles."""
        if not (self.lhs.transposed or self.rhs.transposed):
            finish(self.accumulate(clamped=True))
            return
        full = builder.both(
            builder.less(self.m0 + (SIMDGROUP_TILE - 1), self.lhs.rows),
            builder.less(self.n0 + (SIMDGROUP_TILE - 1), self.rhs.rows),
        )
        builder.either(
            full,
            lambda: finish(self.accumulate(clamped=False)),
            lambda: finish(self.accumulate(clamped=True)),
        )

    def accumulate(self, clamped: bool) -> list[ir.Value]:
        """The four accumulators after all of K, (m, n) with n fastest."""
        lane = self.kernel.lane
        a = OperandTiles(self.lhs, self.atom, self.m0, lane, clamped)
        b = OperandTiles(self.rhs, self.atom, self.n0, lane, clamped)
        zeros = [builder.zero(self._accumulator_type())] * (ATOMS * ATOMS)
        if self.scales is None:
            return self._accumulate_plain(a, b, zeros)
        return self._accumulate_scaled(a, b, zeros, self.scales)

    def _accumulator_type(self) -> ir.Type:
        return builder.vector_type(self.atom.slots, builder.f32())

    def _multiply(
        self, a: list[ir.Value], b: list[ir.Value], accumulators: list[ir.Value]
    ) -> list[ir.Value]:
        """One step: every tile of x with every tile of w."""
        # A's tile is read as [m, k]. B's is wanted as [k, n], and w's rows run along n.
        flags = [
            builder.as_value(int(flag), builder.i1())
            for flag in (self.lhs.transposed, not self.rhs.transposed)
        ]
        result: list[ir.Value] = []
        for index, accumulator in enumerate(accumulators):
            m, n = divmod(index, ATOMS)
            operands = [a[m], flags[0], b[n], flags[1], accumulator]
            result.append(self.kernel.call(self.atom.intrinsic, accumulator.type, operands))
        return result

    def _accumulate_plain(
        self, a: OperandTiles, b: OperandTiles, zeros: list[ir.Value]
    ) -> list[ir.Value]:
        k = self.matmul.k
        full = k - k % STEP

        def step(at: Word, accumulators: list[ir.Value]) -> list[ir.Value]:
            return self._multiply(a.load(at), b.load(at), accumulators)

        accumulators = builder.loop(0, full, STEP, zeros, step)
        if k > full:
            tiles = a.load(full, 0, k - full), b.load(full, 0, k - full)
            accumulators = self._multiply(*tiles, accumulators)
        return accumulators

    def _accumulate_scaled(
        self, a: OperandTiles, b: OperandTiles, zeros: list[ir.Value], scales: Scales
    ) -> list[ir.Value]:
        """Blocks of 32 K, each summed from zero and then scaled; four of them in a loop's step."""
        k, group = self.matmul.k, WORD * BLOCK_K
        full = k - k % group
        rows = self._scale_rows(a, b, scales)

        def add_blocks(at: Int, depth: int, accumulators: list[ir.Value]) -> list[ir.Value]:
            block = at // BLOCK_K if isinstance(at, int) else at >> (BLOCK_K.bit_length() - 1)
            factors = rows.load(block, ceil_div(depth, BLOCK_K))
            for first in range(0, depth, BLOCK_K):
                products = zeros
                for offset in range(first, min(first + BLOCK_K, depth), STEP):
                    count = min(STEP, depth - offset)
                    tiles = a.load(at, offset, count), b.load(at, offset, count)
                    products = self._multiply(*tiles, products)
                accumulators = [
                    block_scaled.add_scaled(*terms)
                    for terms in zip(
                        accumulators, products, factors.at(first // BLOCK_K), strict=True
                    )
                ]
            return accumulators

        accumulators = builder.loop(
            0, full, group, zeros, lambda at, values: add_blocks(at, group, values)
        )
        return add_blocks(full, k - full, accumulators) if k > full else accumulators

    def _scale_rows(self, a: OperandTiles, b: OperandTiles, scales: Scales) -> TileScales:
        """The addresses of this lane's scale bytes; rows beyond the matrix are clamped."""
        atom, matmul = self.atom, self.matmul

        def row(base: Pointer, index: Int, count: Int) -> Pointer:
            return base.at(wide(clamp(index, count)) * matmul.k_blocks)

        lhs: list[Pointer] = []
        if scales.lhs is not None:
            runs = range(atom.slots // atom.run)
            indices = [start + a.row + run * atom.run_rows for start in a.starts for run in runs]
            lhs = [row(scales.lhs, index, scales.lhs_rows) for index in indices]
        if matmul.rhs_block == (BLOCK_K, BLOCK_K):
            # The simdgroup's 32 columns are one row of blocks.
            indices = [self.n0 >> (BLOCK_K.bit_length() - 1)]
        else:
            indices = [start + b.column + i for start in b.starts for i in range(atom.run)]
        rhs = [row(scales.rhs, index, matmul.rhs_scale_rows) for index in indices]
        return TileScales(matmul, lhs, rhs, (ATOMS, ATOMS))

    def store(
        self, accumulators: list[ir.Value], row0: Int = 0, expert: Word | None = None
    ) -> None:
        """Stores what lies inside y, after the epilogue.

        Args:
            accumulators: as ``accumulate`` gives them.
            row0: row of y where row 0 of this operand lies (grouped).
            expert: the expert, in a grouped matmul.
        """
        run = self.atom.run

        def store(index: int, count: int, slot: int, row: Word, column: Word) -> None:
            values = [builder.extract(accumulators[index], slot + i) for i in range(count)]
            store_run(self.kernel, self.matmul, values, row + row0, column, expert)

        self._for_runs(run, store)

    def store_zeros(self, row0: Int) -> None:
        """Stores zeros wherever the tile lies inside y."""

        def store(index: int, count: int, slot: int, row: Word, column: Word) -> None:
            store_zeros(self.kernel, self.matmul, count, row + row0, column)

        self._for_runs(self.atom.run, store)

    def _for_runs(self, run: int, store: Callable[[int, int, int, Word, Word], None]) -> None:
        """Calls ``store`` (tile, count, first slot, row, column) for what lies inside y."""
        lane, atom, n = self.kernel.lane, self.atom, self.matmul.n

        def whole(index: int, slot: int, row: Word, column: Word) -> None:
            store(index, run, slot, row, column)

        def singly(index: int, slot: int, row: Word, column: Word) -> None:
            for i in range(run):
                builder.when(
                    less(column + i, n),
                    lambda i=i: store(index, 1, slot + i, row, column + i),
                )

        def columns(index: int, slot: int, row: Word, column: Word) -> None:
            if n % SIMDGROUP_TILE == 0:
                whole(index, slot, row, column)
                return
            builder.either(
                less(column + (run - 1), n),
                lambda: whole(index, slot, row, column),
                lambda: singly(index, slot, row, column),
            )

        for index in range(ATOMS * ATOMS):
            m, n_tile = divmod(index, ATOMS)
            column = self.n0 + n_tile * atom.size + atom.first_column(lane)
            for first in range(0, atom.slots, run):
                row = self.m0 + (m * atom.size + atom.run_rows * (first // run))
                row = row + atom.first_row(lane)
                builder.when(
                    less(row, self.lhs.rows),
                    lambda index=index, first=first, row=row, column=column: columns(
                        index, first, row, column
                    ),
                )
