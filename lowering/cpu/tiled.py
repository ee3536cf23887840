# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The tiled kernel: many rows of x against panels of w that are decoded once.

Lanes run along N. For 64 columns and a part of K the workgroup decodes w into a *panel* of operands
``[K / pair][64]`` on the stack, then multiplies every slab of x with it: a register tile of a few
rows and columns. Between the parts of K its sums rest in y where this holds them as they are, and
in a buffer otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import (
    Index,
    IndexValue,
    as_value,
    ceil_div,
    maximum,
    minimum,
)
from block32.lowering.common.weight_layout import LAYOUTS
from block32.lowering.cpu import operands, ops, pack
from block32.lowering.cpu.isa import InstructionSet, instruction_set
from block32.lowering.cpu.panel import COLUMNS, Panel
from block32.lowering.cpu.register_tile import register_tile
from block32.lowering.cpu.registers import zero_accumulator
from block32.lowering.cpu.scales import Exponents
from block32.lowering.cpu.store import GROUP, ResultStore
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import BLOCK_K, Epilogue, ScaledMatmul

ACCUMULATORS = "accumulators"
#: K steps in the body of the innermost loop; chunks hold a multiple of it.
_UNROLL = 4


@dataclass(frozen=True)
class Partition:
    """How the rows of x are shared out: slabs of ``mma[0]`` rows, and workgroups of slabs.

    Attributes:
        slabs: Slabs in all.
        workgroups: Workgroups along M.
        slabs_each: Slabs of a workgroup; the last may have fewer.
    """

    slabs: Index
    workgroups: Index
    slabs_each: Index

    @classmethod
    def of(cls, tier: KernelTier, m: Index) -> Partition:
        """Share out ``m`` rows as evenly as whole slabs allow."""
        assert tier.tile is not None and tier.mma is not None
        slabs = ceil_div(m, tier.mma[0])
        workgroups = ceil_div(slabs, most_slabs(tier))
        # M = 0 has no workgroups; the maximum keeps the division defined.
        divisor = maximum(workgroups, 1)
        return cls(slabs, workgroups, _quotient(slabs + (divisor - 1), divisor))


def _quotient(a: Index, b: Index) -> Index:
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    return IndexValue(arith.divui(as_value(a), as_value(b)))


def most_slabs(tier: KernelTier) -> int:
    """Slabs that a workgroup may have."""
    assert tier.tile is not None and tier.mma is not None
    return max(tier.tile[0] // tier.mma[0], 1)


def column_workgroups(problem: ScaledMatmul, tier: KernelTier) -> int:
    """Workgroups along N."""
    assert tier.tile is not None
    return -(-problem.n // tier.tile[1])


def accumulators_size(problem: ScaledMatmul, tier: KernelTier, m: Index) -> Index:
    """f32 elements of the accumulators of all workgroups."""
    assert tier.mma is not None
    partition = Partition.of(tier, m)
    slabs = partition.workgroups * partition.slabs_each * column_workgroups(problem, tier)
    return slabs * (tier.mma[0] * COLUMNS)


def decodes_in_registers(tier: KernelTier) -> bool:
    """Whether a tile of one slab is computed without a panel and accumulators (``pairs.py``)."""
    assert tier.tile is not None and tier.mma is not None
    return instruction_set(tier.isa).mmla and tier.tile[0] == tier.mma[0]


def sums_rest_in_result(problem: ScaledMatmul) -> bool:
    """Whether y holds the sums between the parts of K: it is f32, and ends where a panel does."""
    return problem.result == "f32" and problem.n % COLUMNS == 0


def stack_bytes(tier: KernelTier) -> int:
    """What a panel, its scales and a widened part of a slab take."""
    assert tier.tile is not None and tier.mma is not None
    isa, part_k = instruction_set(tier.isa), tier.tile[2]
    scales = -(-part_k // BLOCK_K) * COLUMNS * 8
    slab = part_k * tier.mma[0] * 4 if isa.dot == "f32" else 0
    return part_k // isa.pair * COLUMNS * 4 + scales + slab


def emit_tiled(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    """Write the kernel: a workgroup computes ``tile[1]`` columns of y for its slabs of rows."""
    _Tiled(problem, tier, kernel).emit()


class _Tiled:
    """What the parts of the kernel share: buffers, tables, and the register tile."""

    def __init__(self, problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext):
        assert tier.tile is not None and tier.mma is not None
        self.problem = problem
        self.kernel = kernel
        self.isa: InstructionSet = instruction_set(tier.isa)
        self.rows, self.tile_columns, _ = tier.mma
        self.columns = tier.tile[1]
        self.part_k = operands.panel_k(problem, tier)
        self.partition = Partition.of(tier, kernel.m)
        self.exponents = Exponents(self.isa)
        n_workgroup, m_workgroup = kernel.workgroup_id(0), kernel.workgroup_id(1)
        workgroup = m_workgroup * column_workgroups(problem, tier) + n_workgroup
        workgroups = self.partition.workgroups * column_workgroups(problem, tier)
        self.first_column = n_workgroup * self.columns
        self.first_slab = m_workgroup * self.partition.slabs_each
        self.first_accumulator = workgroup * self.partition.slabs_each
        self.panel = Panel(kernel, self.isa, self.part_k, LAYOUTS.get(tier.weight_layout))
        slabs = self.partition.slabs
        self.widened = None
        if pack.is_halved(problem, tier):
            self.widened = pack.SlabPart(kernel, self.isa, self.rows, self.part_k, slabs)
            x = self.widened.values
        else:
            x = pack.slab_values(kernel, self.isa, self.rows, slabs)
        self.tile = register_tile(self.isa, self.rows, self.tile_columns, self.panel, x)
        self.x_scales = pack.slab_scales(kernel, self.rows, slabs)
        self.flags = pack.folded_flags(kernel, slabs)
        self.result = ResultStore(kernel)
        self.in_result = sums_rest_in_result(problem)
        self.sums = self.result.y
        if not self.in_result:
            self.sums = kernel.memref(
                ACCUMULATORS,
                f"memref<?x{self.rows}x{COLUMNS}xf32>",
                (workgroups * self.partition.slabs_each,),
            )

    def emit(self) -> None:
        """The loop over the workgroup's panels of columns."""
        last = minimum(self.first_column + self.columns, self.problem.n)
        left = self.partition.slabs - self.first_slab
        slabs = minimum(self.partition.slabs_each, left)

        def columns(column: IndexValue) -> None:
            is_folded = self.panel.may_fold(column)
            ops.repeat(0, slabs, 1, lambda slab: self._clear(column, slab))

            def part(k: IndexValue) -> None:
                self._part(column, k, slabs, is_folded)

            ops.repeat(0, self.problem.k, self.part_k, part)
            if not self.in_result or self.problem.epilogue != Epilogue():
                ops.repeat(0, slabs, 1, lambda slab: self._finish(column, slab))

        ops.repeat(self.first_column, last, COLUMNS, columns)

    def _sums_at(self, column: Index, slab: Index, row: int, at: Index) -> list[Index]:
        """Where the sums of a row of a slab rest, from ``at`` on in the panel at ``column``.

        In y, rows past the last have the place of that one: their sums are the same.
        """
        if not self.in_result:
            return [self.first_accumulator + slab, row, at]
        y_row = (self.first_slab + slab) * self.rows + row
        return [minimum(y_row, self.kernel.m - 1), column + at]

    def _tile_positions(self, column: Index, slab: Index, at: Index) -> list[list[Index]]:
        """Where the registers of sums of the tile at ``at`` in the panel rest, row by row."""
        return [
            self._sums_at(column, slab, row, at + v)
            for row in range(self.rows)
            for v in range(0, self.tile_columns, self.isa.lanes)
        ]

    def _load_sums(self, positions: list[list[Index]]) -> list[ir.Value]:
        return [ops.load(self.sums, position, self.isa.lanes, 64) for position in positions]

    def _store_sums(self, sums: list[ir.Value], positions: list[list[Index]]) -> None:
        for value, position in zip(sums, positions, strict=True):
            ops.store(value, self.sums, position, 64)

    def _clear(self, column: Index, slab: Index) -> None:
        for at in range(0, COLUMNS, self.tile_columns):
            positions = self._tile_positions(column, slab, at)
            self._store_sums([zero_accumulator(self.isa)] * len(positions), positions)

    def _part(self, column: Index, k: IndexValue, slabs: Index, is_folded: ir.Value) -> None:
        """Decode a panel for one part of K and multiply every slab with it."""
        self.panel.fill(column, k, is_folded)

        def slab(slab: IndexValue) -> None:
            x_folded = pack.is_folded(self.flags, self.first_slab + slab)
            self.panel.fetch(column, k + self.part_k, slab, slabs)
            if self.widened:
                following = minimum(slab + 1, slabs - 1)
                first = self.first_slab
                self.widened.fill(first + slab, k, self._depth(k), first + following)
            ops.choose(
                arith.andi(x_folded, is_folded),
                lambda: self._folded_slab(column, slab, k),
                lambda: self._exact_slab(column, slab, k),
            )

        ops.repeat(0, slabs, 1, slab)

    def _depth(self, k: Index) -> Index:
        """Elements of K in the part that starts at ``k``, padded to whole chunks."""
        return minimum(operands.padded_k(self.problem, self.isa) - k, self.part_k)

    def _first_x(self, slab: Index, k: Index) -> tuple[Index, Index]:
        """The slab and the step that x is read at for the part of K at ``k``."""
        return (0, 0) if self.widened else (self.first_slab + slab, k // self.isa.word)

    def _folded_slab(self, column: Index, slab: Index, k: IndexValue) -> None:
        """The register tile's accumulators stay in registers for the part of K."""
        x_slab, first_x = self._first_x(slab, k)

        def tile(at: IndexValue) -> None:
            positions = self._tile_positions(column, slab, at)

            def steps(i: IndexValue, sums: list[ir.Value]) -> list[ir.Value]:
                for unrolled in range(_UNROLL):
                    step = i + unrolled
                    sums = self.tile.multiply(x_slab, at, step, first_x + step, sums)
                return sums

            sums = self.tile.from_rows(self._load_sums(positions))
            sums = ops.for_range(0, self._depth(k) // self.isa.word, _UNROLL, sums, steps)
            self._store_sums(self.tile.to_rows(sums), positions)

        ops.repeat(0, COLUMNS, self.tile_columns, tile)

    def _exact_slab(self, column: Index, slab: Index, k: IndexValue) -> None:
        blocks = minimum(self.problem.k_blocks - k // BLOCK_K, self.part_k // BLOCK_K)

        def tile(at: IndexValue) -> None:
            ops.repeat(0, blocks, 1, lambda block: self._exact_block(column, slab, at, k, block))

        ops.repeat(0, COLUMNS, self.tile_columns, tile)

    def _exact_block(self, column: Index, slab: Index, at: Index, k: Index, block: Index) -> None:
        """One block of 32 K: sums in registers, rescaled and added to the accumulators."""
        steps = BLOCK_K // self.isa.word
        first = block * steps
        x_slab, first_x = self._first_x(slab, k)
        count = self.rows * self.tile_columns // self.isa.lanes
        zeros = [zero_accumulator(self.isa)] * count

        def step(i: IndexValue, sums: list[ir.Value]) -> list[ir.Value]:
            return self.tile.multiply(x_slab, at, first + i, first_x + first + i, sums)

        sums = self.tile.to_rows(ops.for_range(0, steps, 1, zeros, step))
        sums = self._rescaled(slab, at, k // BLOCK_K, block, sums)
        positions = self._tile_positions(column, slab, at)
        # All are loaded before any is stored: in y, several rows may have one place.
        old = self._load_sums(positions)
        self._store_sums([arith.addf(*pair) for pair in zip(old, sums, strict=True)], positions)

    def _rescaled(
        self, slab: Index, at: Index, first_block: Index, block: Index, sums: list[ir.Value]
    ) -> list[ir.Value]:
        """The sums of one block of K times its scales."""
        lanes = self.isa.lanes
        vectors = self.tile_columns // lanes
        result = []
        for row in range(self.rows):
            x_position = [self.first_slab + slab, first_block + block, row]
            x_scale = ops.load_scalar(self.x_scales, x_position)
            x_exponent = ops.broadcast(self.exponents.from_bytes(x_scale), lanes)
            for v in range(vectors):
                of_w = self.panel.block_exponents(block, at + v * lanes)
                exponents = self.exponents.add(x_exponent, of_w)
                result.append(self.exponents.rescale(sums[row * vectors + v], exponents))
        return result

    def _finish(self, column: Index, slab: Index) -> None:
        """Store the columns of a slab whose rows exist."""
        for row in range(self.rows):
            y_row = (self.first_slab + slab) * self.rows + row
            with ops.when(ops.is_below(y_row, self.kernel.m)):

                def store_group(at: IndexValue, row: int = row, y_row: Index = y_row) -> None:
                    position = self._sums_at(column, slab, row, at)
                    self.result.store(ops.load(self.sums, position, GROUP, 64), y_row, column + at)

                ops.repeat(0, COLUMNS, GROUP, store_group)
