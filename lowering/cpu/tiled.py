# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The tiled kernel: many rows of x against panels of w that are decoded once.

Lanes run along N. For 64 columns and a part of K the workgroup decodes w into a *panel* of operands
``[K / pair][64]``, then multiplies every slab of x with it: a register tile of a few rows and
columns whose accumulators live in a buffer between the parts of K.
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
from block32.lowering.problem import BLOCK_K, ScaledMatmul

ACCUMULATORS = "accumulators"
PANEL = "panel"
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
        most = max(tier.tile[0] // tier.mma[0], 1)
        workgroups = ceil_div(slabs, most)
        # M = 0 has no workgroups; the maximum keeps the division defined.
        divisor = maximum(workgroups, 1)
        return cls(slabs, workgroups, _quotient(slabs + (divisor - 1), divisor))


def _quotient(a: Index, b: Index) -> Index:
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    return IndexValue(arith.divui(as_value(a), as_value(b)))


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


def panel_size(problem: ScaledMatmul, tier: KernelTier, m: Index) -> Index:
    """i32 or f32 elements of the panels of all workgroups."""
    assert tier.tile is not None
    steps = operands.panel_k(problem, tier) // instruction_set(tier.isa).pair
    return Partition.of(tier, m).workgroups * column_workgroups(problem, tier) * (steps * COLUMNS)


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
        layout = LAYOUTS.get(tier.weight_layout)
        self.panel = Panel(kernel, self.isa, self.part_k, workgroup, workgroups, layout)
        x = pack.slab_values(kernel, self.isa, self.rows, self.partition.slabs)
        self.tile = register_tile(self.isa, self.rows, self.tile_columns, self.panel, x)
        self.x_scales = pack.slab_scales(kernel, self.rows, self.partition.slabs)
        self.accumulators = kernel.memref(
            ACCUMULATORS,
            f"memref<?x{self.rows}x{COLUMNS}xf32>",
            (workgroups * self.partition.slabs_each,),
        )
        self.flags = pack.folded_flags(kernel, self.partition.slabs)
        self.result = ResultStore(kernel)

    def emit(self) -> None:
        """The loop over the workgroup's panels of columns."""
        last = minimum(self.first_column + self.columns, self.problem.n)
        left = self.partition.slabs - self.first_slab
        slabs = minimum(self.partition.slabs_each, left)

        def columns(column: IndexValue) -> None:
            is_folded = self.panel.may_fold(column)
            ops.repeat(0, slabs, 1, self._clear)

            def part(k: IndexValue) -> None:
                self._part(column, k, slabs, is_folded)

            ops.repeat(0, self.problem.k, self.part_k, part)
            ops.repeat(0, slabs, 1, lambda slab: self._finish(column, slab))

        ops.repeat(self.first_column, last, COLUMNS, columns)

    def _clear(self, slab: Index) -> None:
        for row in range(self.rows):
            for at in range(0, COLUMNS, self.isa.lanes):
                position = [self.first_accumulator + slab, row, at]
                ops.store(zero_accumulator(self.isa), self.accumulators, position, 64)

    def _part(self, column: Index, k: IndexValue, slabs: Index, is_folded: ir.Value) -> None:
        """Decode a panel for one part of K and multiply every slab with it."""
        self.panel.fill(column, k, is_folded)

        def slab(slab: IndexValue) -> None:
            flag = ops.load_scalar(self.flags, [self.first_slab + slab])
            x_folded = arith.trunci(ops.i1(), flag)
            ops.choose(
                arith.andi(x_folded, is_folded),
                lambda: self._folded_slab(slab, k),
                lambda: self._exact_slab(slab, k),
            )

        ops.repeat(0, slabs, 1, slab)

    def _folded_slab(self, slab: Index, k: IndexValue) -> None:
        """The register tile's accumulators stay in registers for the part of K."""
        lanes = self.isa.lanes
        depth = minimum(operands.padded_k(self.problem, self.isa) - k, self.part_k)
        first_x = k // self.isa.word

        def tile(at: IndexValue) -> None:
            positions = [
                [self.first_accumulator + slab, row, at + v]
                for row in range(self.rows)
                for v in range(0, self.tile_columns, lanes)
            ]
            rows = [ops.load(self.accumulators, p, lanes, 64) for p in positions]

            def steps(i: IndexValue, sums: list[ir.Value]) -> list[ir.Value]:
                for unrolled in range(_UNROLL):
                    step = i + unrolled
                    sums = self.tile.multiply(
                        self.first_slab + slab, at, step, first_x + step, sums
                    )
                return sums

            sums = self.tile.from_rows(rows)
            sums = ops.for_range(0, depth // self.isa.word, _UNROLL, sums, steps)
            for value, position in zip(self.tile.to_rows(sums), positions, strict=True):
                ops.store(value, self.accumulators, position, 64)

        ops.repeat(0, COLUMNS, self.tile_columns, tile)

    def _exact_slab(self, slab: Index, k: IndexValue) -> None:
        blocks = minimum(self.problem.k_blocks - k // BLOCK_K, self.part_k // BLOCK_K)

        def tile(at: IndexValue) -> None:
            ops.repeat(0, blocks, 1, lambda block: self._exact_block(slab, at, k, block))

        ops.repeat(0, COLUMNS, self.tile_columns, tile)

    def _exact_block(self, slab: Index, at: Index, k: Index, block: Index) -> None:
        """One block of 32 K: sums in registers, rescaled and added to the accumulators."""
        steps = BLOCK_K // self.isa.word
        first = block * steps
        first_x = k // self.isa.word + first
        count = self.rows * self.tile_columns // self.isa.lanes
        zeros = [zero_accumulator(self.isa)] * count

        def step(i: IndexValue, sums: list[ir.Value]) -> list[ir.Value]:
            return self.tile.multiply(self.first_slab + slab, at, first + i, first_x + i, sums)

        sums = self.tile.to_rows(ops.for_range(0, steps, 1, zeros, step))
        self._add_rescaled(slab, at, k // BLOCK_K, block, sums)

    def _add_rescaled(
        self, slab: Index, at: Index, first_block: Index, block: Index, sums: list[ir.Value]
    ) -> None:
        lanes = self.isa.lanes
        vectors = self.tile_columns // lanes
        for row in range(self.rows):
            x_position = [self.first_slab + slab, first_block + block, row]
            x_scale = ops.load_scalar(self.x_scales, x_position)
            x_exponent = ops.broadcast(self.exponents.from_bytes(x_scale), lanes)
            for v in range(vectors):
                exponents = self.exponents.add(
                    x_exponent, self.panel.block_exponents(block, at + v * lanes)
                )
                position = [self.first_accumulator + slab, row, at + v * lanes]
                old = ops.load(self.accumulators, position, lanes, 64)
                scaled = self.exponents.rescale(sums[row * vectors + v], exponents)
                ops.store(arith.addf(old, scaled), self.accumulators, position, 64)

    def _finish(self, column: Index, slab: Index) -> None:
        """Store the columns of a slab whose rows exist."""
        for row in range(self.rows):
            y_row = (self.first_slab + slab) * self.rows + row
            with ops.when(ops.is_below(y_row, self.kernel.m)):

                def store_group(at: IndexValue, row: int = row, y_row: Index = y_row) -> None:
                    position = [self.first_accumulator + slab, row, at]
                    values = ops.load(self.accumulators, position, GROUP, 64)
                    self.result.store(values, y_row, column + at)

                ops.repeat(0, COLUMNS, GROUP, store_group)
