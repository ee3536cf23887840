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
from block32.lowering.problem import BLOCK_K

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

    def load(self, k: Int) -> list[ir.Value]:
        """The two tiles at ``k``, with the whole step inside K."""
        return [self._tile(tile, k) for tile in range(ATOMS)]

    def load_tail(self, k: Int, count: int) -> list[ir.Value]:
        """The two tiles at ``k`` of which only ``count`` columns lie inside K; zeros beyond."""
        return [self._masked_tile(tile, k, count) for tile in range(ATOMS)]

    def _tile(self, tile: int, k: Int) -> ir.Value:
        if self.operand.transposed and self.clamped:
            return self._masked_tile(tile, k, self.atom.size)
        alignment = 0
        if not self.operand.transposed:
            alignment = run_alignment(self.operand.k, self.operand.base.element, self.atom.run)
        step = self._along_k(k)
        runs = [p.at(step).load(self.atom.run, alignment or None) for p in self.pointers[tile]]
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


@dataclass(frozen=True)
class Scales:
    """Where the E8M0 bytes of a scaled matmul lie.

    Attributes:
        lhs: x's bytes, [M, K/32], or None.
        rhs: w's bytes, [N or N/32, K/32].
        lhs_rows: rows of x.
    """

    lhs: Pointer | None
    rhs: Pointer
    lhs_rows: Int


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
            tail = k - full
            tiles = a.load_tail(full, tail), b.load_tail(full, tail)
            accumulators = self._multiply(*tiles, accumulators)
        return accumulators

    def _accumulate_scaled(
        self, a: OperandTiles, b: OperandTiles, zeros: list[ir.Value], scales: Scales
    ) -> list[ir.Value]:
        """Blocks of 32 K, each summed from zero and then scaled."""
        k = self.matmul.k
        full = k - k % BLOCK_K
        bytes_ = ScaleBytes(self, scales, a, b)

        def add_block(at: Int, depth: int, accumulators: list[ir.Value]) -> list[ir.Value]:
            products = zeros
            for offset in range(0, depth, STEP):
                position, count = at + offset, min(STEP, depth - offset)
                if count == STEP:
                    tiles = a.load(position), b.load(position)
                else:
                    tiles = a.load_tail(position, count), b.load_tail(position, count)
                products = self._multiply(*tiles, products)
            block = at // BLOCK_K if isinstance(at, int) else at >> 5
            return [
                block_scaled.add_scaled(accumulator, product, factor)
                for accumulator, product, factor in zip(
                    accumulators, products, bytes_.factors(block), strict=True
                )
            ]

        accumulators = builder.loop(
            0, full, BLOCK_K, zeros, lambda at, values: add_block(at, BLOCK_K, values)
        )
        return add_block(full, k - full, accumulators) if k > full else accumulators

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


class ScaleBytes:
    """A lane's scale bytes for the four accumulators of its simdgroup."""

    def __init__(self, tile: SimdgroupTile, scales: Scales, a: OperandTiles, b: OperandTiles):
        matmul, atom = tile.matmul, tile.atom
        self.atom = atom
        self.k_blocks = matmul.k_blocks
        self.lhs: list[list[Pointer]] = []
        if scales.lhs is not None:
            self.lhs = [
                [
                    self._row(scales.lhs, start + a.row + run * atom.run_rows, scales.lhs_rows)
                    for run in range(atom.slots // atom.run)
                ]
                for start in a.starts
            ]
        self.uniform = matmul.rhs_block == (BLOCK_K, BLOCK_K)
        if self.uniform:
            # The simdgroup's 32 columns are one row of blocks.
            self.rhs = [[scales.rhs.at(wide(tile.n0 >> 5) * self.k_blocks)]]
        else:
            self.rhs = [
                [
                    self._row(scales.rhs, start + b.column + i, matmul.rhs_scale_rows)
                    for i in range(atom.run)
                ]
                for start in b.starts
            ]

    def _row(self, base: Pointer, row: Int, rows: Int) -> Pointer:
        return base.at(wide(clamp(row, rows)) * self.k_blocks)

    def factors(self, block: Int) -> list[tuple[ir.Value, ir.Value]]:
        """The factors of the four accumulators at one block of K."""
        i32 = builder.i32()

        def byte(pointer: Pointer) -> ir.Value:
            return arith.extui(i32, pointer.at(block).load())

        atom = self.atom
        lhs: list[ir.Value | None] = [None] * ATOMS
        if self.lhs:
            rows = [[byte(pointer) for pointer in tile] for tile in self.lhs]
            lhs = [
                builder.from_elements([tile[slot // atom.run] for slot in range(atom.slots)])
                for tile in rows
            ]
        if self.uniform:
            rhs = [builder.broadcast(byte(self.rhs[0][0]), atom.slots)] * ATOMS
        else:
            columns = [[byte(pointer) for pointer in tile] for tile in self.rhs]
            rhs = [
                builder.from_elements([tile[slot % atom.run] for slot in range(atom.slots)])
                for tile in columns
            ]
        if lhs[0] is None and self.uniform:
            return [block_scaled.factors(None, rhs[0])] * (ATOMS * ATOMS)
        return [block_scaled.factors(lhs[m], rhs[n]) for m in range(ATOMS) for n in range(ATOMS)]
