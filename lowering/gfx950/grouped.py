# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Grouped matmuls: which rows and which expert's weight a workgroup has.

A workgroup finds its group (``lowering/common/group_tiles.py``) by counting those that start at or
before its tile: 64 of them at once, one a lane.
"""

from __future__ import annotations

from dataclasses import dataclass

from iree.compiler import ir
from iree.compiler.dialects import arith, math, rocdl

from block32.lowering.common.group_tiles import first_tile
from block32.lowering.common.index import (
    Condition,
    Index,
    IndexValue,
    as_value,
    both,
    less,
    minimum,
)
from block32.lowering.gfx950 import ops
from block32.lowering.gfx950.geometry import Geometry
from block32.lowering.gfx950.machine import WAVE_LANES
from block32.lowering.gfx950.workgroup import Workgroup, locate
from block32.lowering.kernel_context import KernelContext
from block32.lowering.problem import ELEMENT_BITS, Grouping
from block32.lowering.target import RESULT


@dataclass(frozen=True)
class GroupedWorkgroup(Workgroup):
    """A workgroup whose rows are some of one group's.

    Attributes:
        first: Its first row of x and y.
        end: One past the last row that it may have: its group's end.
        expert: The number of its weight.
    """

    first: Index
    end: Index
    expert: Index

    @property
    def first_row(self) -> Index:
        """The tile's first row of x and y."""
        return self.first

    @property
    def rows(self) -> Index:
        """Rows of the tile that exist and belong to the group."""
        return minimum(self.end - self.first, self.geometry.block_m)

    @property
    def first_weight_row(self) -> Index:
        """The first row of the expert's weight."""
        return self.expert * self.geometry.problem.n

    @property
    def first_weight_scale_row(self) -> Index:
        """The first row of the scales of the expert's weight."""
        return self.expert * self.geometry.problem.rhs_scale_shape[0]


def locate_workgroup(geometry: Geometry, kernel: KernelContext) -> Workgroup:
    """The workgroup that runs this code."""
    workgroup = locate(geometry, kernel)
    return locate_group(workgroup) if geometry.problem.grouping else workgroup


def locate_group(workgroup: Workgroup) -> GroupedWorkgroup:
    """The rows and the expert of a workgroup that knows its tile.

    Where the group has no expert, this stores the zeros, and the workgroup then has no tile.
    """
    geometry, kernel = workgroup.geometry, workgroup.kernel
    grouping = geometry.problem.grouping
    assert grouping is not None
    offsets = _table(kernel, "offsets", grouping.groups + 1)
    started = _groups_started(workgroup, offsets, grouping)
    # No group before the first: then whatever group 0 says is not used.
    is_in_group = less(0, started)
    group = started - 1
    first_offset, end = (minimum(_load(offsets, group + step), workgroup.m) for step in (0, 1))
    tile_of_group = workgroup.tile_m - first_tile(first_offset, group, geometry.block_m)
    first = first_offset + tile_of_group * geometry.block_m
    has_rows = both(is_in_group, less(first, end))
    expert = _load(_table(kernel, "expert_ids", grouping.groups), group)
    has_expert = less(expert, grouping.experts)
    fields = {name: getattr(workgroup, name) for name in Workgroup.__dataclass_fields__}
    fields["has_tile"] = both(workgroup.has_tile, both(has_rows, has_expert))
    located = GroupedWorkgroup(**fields, first=first, end=end, expert=expert)

    def zeros(_: list[ir.Value]) -> list[ir.Value]:
        _store_zeros(located)
        return []

    ops.if_then(both(workgroup.has_tile, both(has_rows, negated(has_expert))), [], zeros)
    return located


def negated(condition: Condition) -> Condition:
    """``not condition``."""
    if isinstance(condition, bool):
        return not condition
    return arith.xori(condition, arith.constant(condition.type, 1))


def _table(kernel: KernelContext, name: str, count: int) -> ops.Buffer:
    return ops.make_buffer(ops.global_pointer(kernel, name), count * 4)


def _load(table: ops.Buffer, position: Index) -> IndexValue:
    """An entry of a table, the same in all lanes; 0 where there is none."""
    return ops.first_lane(IndexValue(table.load(ops.i32_type(), position * 4)))


def _groups_started(workgroup: Workgroup, offsets: ops.Buffer, grouping: Grouping) -> Index:
    """How many groups own a tile up to this workgroup's."""
    lane = ops.thread_id() % WAVE_LANES
    started: Index = 0
    for first_group in range(0, grouping.groups, WAVE_LANES):
        group = lane + first_group
        offset = IndexValue(offsets.load(ops.i32_type(), group * 4))
        first = first_tile(minimum(offset, workgroup.m), group, workgroup.geometry.block_m)
        exists = less(group, grouping.groups)
        has_started = both(exists, less(first, workgroup.tile_m + 1))
        lanes = math.ctpop(rocdl.ballot(ops.i64_type(), has_started))
        started = IndexValue(arith.trunci(ops.i32_type(), lanes)) + started
    return started


def _store_zeros(workgroup: GroupedWorkgroup) -> None:
    """Zeros for the tile's rows and columns that exist."""
    geometry = workgroup.geometry
    element = ir.Type.parse(geometry.problem.result)
    element_bytes = ELEMENT_BITS[geometry.problem.result] // 8
    y = workgroup.matrix_buffer(RESULT, geometry.problem.result)
    stored = ir.IntegerType.get_signless(8 * element_bytes)
    zero = arith.bitcast(stored, arith.constant(element, 0.0))
    thread = as_value(ops.thread_id())

    def store(position: IndexValue, state: list[ir.Value]) -> list[ir.Value]:
        row, column = position // geometry.block_n, position % geometry.block_n
        offset = (row * geometry.problem.n + column) * element_bytes
        exists = less(column, workgroup.columns)
        y.store(zero, ops.or_out_of_bounds(exists, offset))
        return state

    tile = geometry.block_m * geometry.block_n
    ops.for_range(IndexValue(thread), tile, geometry.threads, [], store)
