# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The 32x32 tile of one simdgroup: which matrix instructions compute it, and storing it.

2x2 instructions of 16x16x16, or 4x4 of 8x8x8, an accumulator each. How a lane comes by its operands
is ``operand_tiles`` and ``small_operand_tiles``.
"""

from __future__ import annotations

from collections.abc import Callable

from iree.compiler import ir
from iree.compiler.dialects import vector

from block32.lowering.apple import block_scaled, builder
from block32.lowering.apple.atoms import SmallAtom
from block32.lowering.apple.builder import AirKernel, Int, Pointer, Word, less, wide
from block32.lowering.apple.epilogue import store_run, store_zeros
from block32.lowering.apple.matmul import Matmul
from block32.lowering.apple.operand_tiles import Operand, OperandTiles, clamp
from block32.lowering.apple.small_operand_tiles import SmallOperandTiles
from block32.lowering.apple.tile_scales import Scales, TileScales
from block32.lowering.problem import BLOCK_K, ceil_div

#: Rows and columns of y that one simdgroup owns.
SIMDGROUP_TILE = 32


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
        self.tiles = SIMDGROUP_TILE // self.atom.size
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
        a = self._operand_tiles(self.lhs, self.m0, clamped, is_lhs=True)
        b = self._operand_tiles(self.rhs, self.n0, clamped, is_lhs=False)
        if self.scales is None:
            return self._accumulate_plain(a, b)
        return self._accumulate_scaled(a, b, self.scales)

    def _operand_tiles(
        self, operand: Operand, first: Word, clamped: bool, is_lhs: bool
    ) -> OperandTiles | SmallOperandTiles:
        lane = self.kernel.lane
        if isinstance(self.atom, SmallAtom):
            element = self.matmul.lhs if is_lhs else self.matmul.rhs
            return SmallOperandTiles(operand, self.atom, element, first, lane, is_lhs)
        return OperandTiles(operand, self.atom, first, lane, clamped)

    def _zeros(self, elements: int) -> list[ir.Value]:
        """An accumulator of zeros for every tile."""
        zero = builder.zero(builder.vector_type(elements, builder.f32()))
        return [zero] * (self.tiles * self.tiles)

    def _multiply(
        self,
        a: list[list[ir.Value]],
        b: list[list[ir.Value]],
        accumulators: list[ir.Value],
    ) -> list[ir.Value]:
        """One step: every tile of x with every tile of w, as often as the step is deep."""
        for lhs, rhs in zip(a, b, strict=True):
            accumulators = [
                self._instruction(lhs[index // self.tiles], rhs[index % self.tiles], accumulator)
                for index, accumulator in enumerate(accumulators)
            ]
        return accumulators

    def _instruction(self, a: ir.Value, b: ir.Value, accumulator: ir.Value) -> ir.Value:
        operands = [a, b, accumulator]
        if not isinstance(self.atom, SmallAtom):
            # A's tile is read as [m, k]. B's is wanted as [k, n], and w's rows run along n.
            flags = [
                builder.as_value(int(flag), builder.i1())
                for flag in (self.lhs.transposed, not self.rhs.transposed)
            ]
            operands = [a, flags[0], b, flags[1], accumulator]
        return self.kernel.call(self.atom.intrinsic, accumulator.type, operands)

    def _accumulate_plain(
        self, a: OperandTiles | SmallOperandTiles, b: OperandTiles | SmallOperandTiles
    ) -> list[ir.Value]:
        k = self.matmul.k
        full = k - k % a.step

        def step(at: Word, accumulators: list[ir.Value]) -> list[ir.Value]:
            return self._multiply(a.load(at), b.load(at), accumulators)

        zeros = self._zeros(self.atom.lane_elements)
        accumulators = builder.loop(0, full, a.step, zeros, step)
        if k > full:
            tiles = a.load(full, 0, k - full), b.load(full, 0, k - full)
            accumulators = self._multiply(*tiles, accumulators)
        return accumulators

    def _accumulate_scaled(
        self,
        a: OperandTiles | SmallOperandTiles,
        b: OperandTiles | SmallOperandTiles,
        scales: Scales,
    ) -> list[ir.Value]:
        """Blocks of 32 K, each summed from zero and then scaled."""
        k, group = self.matmul.k, self.matmul.architecture.blocks * BLOCK_K
        full = k - k % group
        rows = self._scale_rows(a, b, scales)

        def add_blocks(at: Int, depth: int, accumulators: list[ir.Value]) -> list[ir.Value]:
            block = at // BLOCK_K if isinstance(at, int) else at >> (BLOCK_K.bit_length() - 1)
            factors = rows.load(block, ceil_div(depth, BLOCK_K))
            for first in range(0, depth, BLOCK_K):
                products = self._zeros(self.atom.lane_elements)
                for offset in range(first, min(first + BLOCK_K, depth), a.step):
                    count = min(a.step, depth - offset)
                    tiles = a.load(at, offset, count), b.load(at, offset, count)
                    products = self._multiply(*tiles, products)
                accumulators = [
                    block_scaled.add_scaled(accumulator, self._own(product), factor)
                    for accumulator, product, factor in zip(
                        accumulators, products, factors.at(first // BLOCK_K), strict=True
                    )
                ]
            return accumulators

        accumulators = builder.loop(
            0,
            full,
            group,
            self._zeros(self.atom.slots),
            lambda at, values: add_blocks(at, group, values),
        )
        return add_blocks(full, k - full, accumulators) if k > full else accumulators

    def _own(self, accumulator: ir.Value) -> ir.Value:
        """The elements of an accumulator that are the lane's."""
        if self.atom.lane_elements == self.atom.slots:
            return accumulator
        return vector.shuffle(accumulator, accumulator, list(range(self.atom.slots)))

    def _scale_rows(
        self,
        a: OperandTiles | SmallOperandTiles,
        b: OperandTiles | SmallOperandTiles,
        scales: Scales,
    ) -> TileScales:
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
        return TileScales(matmul, lhs, rhs, (self.tiles, self.tiles))

    def store(
        self, accumulators: list[ir.Value], row0: Int = 0, expert: Word | None = None
    ) -> None:
        """Stores what lies inside y, after the epilogue.

        Args:
            accumulators: As ``accumulate`` gives them.
            row0: Row of y where row 0 of this operand lies (grouped).
            expert: The expert, in a grouped matmul.
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

        for index in range(self.tiles * self.tiles):
            m, n_tile = divmod(index, self.tiles)
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
