# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Grouped matmuls (mixture of experts): the kernels of one matmul, run on parts of groups.

The rows of a group are cut into *parts* of at most ``tile[0]`` rows. A workgroup finds its part in
the offsets and then runs the multiplying kernel on a view of the launch: x, y and the
packed activation from the part's first row on, w and its scales from the group's expert on. Rows of
no group are in no part, so that y keeps them.

Offsets are clamped to M, and each group begins where the one before has ended: with a table that
does not rise, parts stay inside all buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from iree.compiler import ir
from iree.compiler.dialects import arith

from block32.dialects.kernel import KernelTier
from block32.lowering.common.index import (
    Index,
    IndexValue,
    as_integer,
    as_value,
    ceil_div,
    maximum,
    minimum,
    round_up,
)
from block32.lowering.common.quantize_launch import CODES, SCALES
from block32.lowering.cpu import gemm, ops, pack, quantize, tiled
from block32.lowering.cpu.store import GROUP, ResultStore
from block32.lowering.kernel_context import KernelContext, KernelView, Start
from block32.lowering.problem import ELEMENT_BITS, Grouping, ScaledMatmul
from block32.lowering.target import RESULT


def one_matmul(problem: ScaledMatmul) -> ScaledMatmul:
    """The matmul of a part: any number of rows, one w."""
    return replace(problem, m=None, grouping=None)


def rows_of_part(tier: KernelTier) -> int:
    """Most rows of a part."""
    assert tier.tile is not None
    return tier.tile[0]


def rows_of_slab(tier: KernelTier) -> int:
    """Rows that are packed together, of which a part has a whole number: see ``pack``."""
    assert tier.mma is not None
    return 1 if tier.form == "stream" else tier.mma[0]


def most_parts(problem: ScaledMatmul, tier: KernelTier, m: Index) -> Index:
    """Parts that any division of ``m`` rows may have."""
    return m // rows_of_part(tier) + _grouping(problem).groups


def most_slabs(problem: ScaledMatmul, tier: KernelTier, m: Index) -> Index:
    """Slabs that any division may have; a stream kernel packs all of a part's rows."""
    if tier.form == "stream":
        return most_parts(problem, tier, m) * rows_of_part(tier)
    return m // rows_of_slab(tier) + _grouping(problem).groups


def _grouping(problem: ScaledMatmul) -> Grouping:
    assert problem.grouping is not None
    return problem.grouping


@dataclass(frozen=True)
class Part:
    """Some rows of one group.

    Attributes:
        exists: Whether there is such a part, as an i1.
        group: Its group.
        first_row: Its first row of x and y.
        rows: How many it has.
        first_slab: Its first slab among those of all groups.
    """

    exists: ir.Value
    group: Index
    first_row: Index
    rows: Index
    first_slab: Index


def find_part(kernel: KernelContext, number: Index, rows: int, slab_rows: int) -> Part:
    """The part of this number, where every group is cut into parts of ``rows``."""
    groups = _grouping(kernel.problem).groups
    offsets = kernel.memref("offsets", f"memref<{groups + 1}xi32>")

    def offset(at: Index) -> Index:
        # As an unsigned number, a negative offset is larger than M.
        value = arith.index_castui(ir.IndexType.get(), ops.load_scalar(offsets, [at]))
        return minimum(IndexValue(value), kernel.m)

    def group(at: IndexValue, carried: list[ir.Value]) -> list[ir.Value]:
        exists, found_group, found_row, found_rows, found_slab, *position = carried
        begin, parts, slabs = (IndexValue(value) for value in position)
        end = maximum(begin, offset(at + 1))
        size = end - begin
        next_parts = parts + ceil_div(size, rows)
        # Parts are numbered from group to group: this one's begin at `parts`.
        is_inside = arith.andi(
            arith.cmpi(arith.CmpIPredicate.uge, as_value(number), as_value(parts)),
            ops.is_below(number, next_parts),
        )
        skipped = (number - parts) * rows
        found = (
            at,
            begin + skipped,
            minimum(size - skipped, rows),
            slabs + (number - parts) * (rows // slab_rows),
        )
        before = (found_group, found_row, found_rows, found_slab)
        chosen = [
            arith.select(is_inside, as_value(new), old)
            for new, old in zip(found, before, strict=True)
        ]
        next_slabs = slabs + ceil_div(size, slab_rows)
        after = [as_value(value) for value in (end, next_parts, next_slabs)]
        return [arith.ori(exists, is_inside), *chosen, *after]

    zero = as_value(0)
    start = [ops.splat(0, ops.i1()), *[zero] * 4, as_value(offset(0)), zero, zero]
    exists, *found = ops.for_range(0, groups, 1, start, group)[:5]
    return Part(exists, *(IndexValue(value) for value in found))


class _Buffers:
    """Where the views of a part begin in each buffer."""

    def __init__(self, problem: ScaledMatmul, tier: KernelTier):
        self.problem = problem
        self.tier = tier

    def activation(self, first_row: Index) -> dict[str, Start]:
        """The activation and its scales from a row on."""
        return {
            "lhs": Start(first_row, self.problem.lhs_row_bytes),
            "lhs_scale": Start(first_row, self.problem.k_blocks),
        }

    def packed(self, first_slab: Index) -> dict[str, Start]:
        """What the packing launch writes, from a slab on."""
        problem, slab = one_matmul(self.problem), _one_slab(self.tier)
        rows = rows_of_slab(self.tier)
        return {
            pack.VALUES: Start(first_slab, 4 * as_integer(pack.values_size(problem, slab, rows))),
            pack.EXPONENTS: Start(first_slab, as_integer(pack.exponents_size(problem, slab, rows))),
            pack.FOLDED: Start(first_slab, 4),
            CODES: Start(first_slab, rows * problem.k),
            SCALES: Start(first_slab, rows * problem.k_blocks),
        }

    def weight(self, expert: Index) -> dict[str, Start]:
        """An expert's w and scales."""
        rows, blocks = self.problem.rhs_scale_shape
        return {
            "rhs": Start(expert, self.problem.n * self.problem.rhs_row_bytes),
            "rhs_scale": Start(expert, rows * blocks),
        }

    def result(self, first_row: Index) -> dict[str, Start]:
        """The result from a row on."""
        return {RESULT: Start(first_row, self.problem.n * ELEMENT_BITS[self.problem.result] // 8)}

    def accumulators(self, first_slab: Index) -> dict[str, Start]:
        """The accumulators of a part's slabs, for kernels that have a buffer of them."""
        if self.tier.form == "stream":
            return {}
        problem, rows = one_matmul(self.problem), rows_of_slab(self.tier)
        accumulators = as_integer(tiled.accumulators_size(problem, self.tier, rows))
        return {tiled.ACCUMULATORS: Start(first_slab, 4 * accumulators)}


def _tile(tier: KernelTier) -> tuple[int, int, int]:
    assert tier.tile is not None
    return tier.tile


def workgroups(
    problem: ScaledMatmul, tier: KernelTier, is_pack: bool, m: Index
) -> tuple[Index, Index, Index]:
    """The grid of a launch: one a slab, or columns in x and parts in y; none without rows."""
    any_row = minimum(m, 1)
    if is_pack:
        return most_slabs(problem, tier, m) * any_row, 1, 1
    columns = tiled.column_workgroups(problem, tier)
    return columns, most_parts(problem, tier, m) * any_row, 1


def buffer_elements(problem: ScaledMatmul, tier: KernelTier, name: str, m: Index) -> Index:
    """Elements of a transient buffer: of all slabs that there may be."""
    one = one_matmul(problem)
    rows = rows_of_slab(tier)
    slab = _one_slab(tier)
    slabs = most_slabs(problem, tier, m)
    sizes: dict[str, Callable[[], Index]] = {
        pack.VALUES: lambda: pack.values_size(one, slab, rows) * slabs,
        pack.EXPONENTS: lambda: pack.exponents_size(one, slab, rows) * slabs,
        pack.FOLDED: lambda: slabs,
        CODES: lambda: slabs * (rows * problem.k),
        SCALES: lambda: slabs * (rows * problem.k_blocks),
        tiled.ACCUMULATORS: lambda: tiled.accumulators_size(one, tier, rows) * slabs,
    }
    return sizes[name]()


def _one_slab(tier: KernelTier) -> KernelTier:
    """A tier that packs a single slab; one row of it for a stream kernel, which packs all."""
    if tier.form != "stream":
        return tier
    assert tier.mma is not None
    return replace(tier, tile=(1, *_tile(tier)[1:]), mma=(1, *tier.mma[1:]))


def emit_pack(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    """Write the packing kernel: a workgroup packs a row of a part (stream) or a slab (tiled)."""
    slab = kernel.workgroup_id()
    rows = rows_of_part(tier) if tier.form == "stream" else rows_of_slab(tier)
    number: Index = slab // rows if tier.form == "stream" else slab
    part = find_part(kernel, number, rows, rows_of_slab(tier))
    buffers = _Buffers(problem, tier)
    first_slab, place, exists = slab, 0, part.exists
    if tier.form == "stream":
        assert tier.mma is not None
        first_slab, place = number * rows, slab % rows
        is_read = ops.is_below(place, round_up(part.rows, tier.mma[0]))
        exists = arith.andi(exists, is_read)
    with ops.when(exists):
        view = KernelView(
            kernel,
            one_matmul(problem),
            part.rows,
            workgroup=(_index(place),),
            starts=buffers.activation(part.first_row) | buffers.packed(first_slab),
        )
        emit = quantize.emit_quantizing_pack if problem.lhs_quantize else pack.emit_pack
        emit(one_matmul(problem), tier, view)


def emit_gemm(problem: ScaledMatmul, tier: KernelTier, kernel: KernelContext) -> None:
    """Write the multiplying kernel: a workgroup computes some columns of a part."""
    column_workgroup, number = (kernel.workgroup_id(dimension) for dimension in range(2))
    grouping = _grouping(problem)
    part = find_part(kernel, number, rows_of_part(tier), rows_of_slab(tier))
    first_slab = number * rows_of_part(tier) if tier.form == "stream" else part.first_slab
    buffers = _Buffers(problem, tier)
    one = one_matmul(problem)

    def view_of(expert: Index) -> KernelView:
        starts = buffers.result(part.first_row) | buffers.packed(first_slab)
        starts |= buffers.weight(expert)
        starts |= buffers.accumulators(first_slab)
        workgroup = (column_workgroup, _index(0))
        return KernelView(kernel, one, part.rows, workgroup=workgroup, starts=starts)

    with ops.when(part.exists):
        ids = kernel.memref("expert_ids", f"memref<{grouping.groups}xi32>")
        expert = arith.index_castui(ir.IndexType.get(), ops.load_scalar(ids, [part.group]))
        ops.choose(
            ops.is_below(IndexValue(expert), grouping.experts),
            lambda: gemm.emit_gemm(one, tier, view_of(IndexValue(expert))),
            lambda: _store_zeros(one, tier, view_of(0)),
        )


def _store_zeros(problem: ScaledMatmul, tier: KernelTier, view: KernelView) -> None:
    """The workgroup's columns of a part whose group has no expert."""
    result = ResultStore(view)
    zeros = ops.splat(0.0, ops.vector_type(GROUP, ops.f32()))
    columns = _tile(tier)[1]
    first = view.workgroup_id() * columns
    last = minimum(first + columns, problem.n)

    def row(y_row: IndexValue) -> None:
        ops.repeat(first, last, GROUP, lambda column: result.store(zeros, y_row, column))

    ops.repeat(0, view.m, 1, row)


def _index(value: Index) -> IndexValue:
    return IndexValue(as_value(value))
