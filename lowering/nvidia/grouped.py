# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Grouped matmuls: the rows and the expert of a workgroup (``lowering/common/group_tiles.py``)."""

from __future__ import annotations

from dataclasses import dataclass

from iree.compiler import ir

from block32.lowering.common.group_tiles import first_tile
from block32.lowering.common.index import Condition, Index, IndexValue, both, choose, less, minimum
from block32.lowering.kernel_context import KernelContext
from block32.lowering.nvidia import instructions as ptx
from block32.lowering.nvidia.instructions import Pointer
from block32.lowering.nvidia.machine import WARP_LANES
from block32.lowering.problem import Grouping


@dataclass(frozen=True)
class GroupRows:
    """The rows of one workgroup.

    Attributes:
        first: The first of them.
        end: The end of their group.
        exist: There are any.
        expert: The number of their weight; 0 where they have none.
        have_expert: They have a weight; where not, their results are zeros.
    """

    first: Index
    end: Index
    exist: Condition
    expert: Index
    have_expert: Condition


def group_rows(kernel: KernelContext, tile_m: Index, block_m: int) -> GroupRows:
    """The rows of tile ``tile_m`` along M, whose tiles have ``block_m`` rows.

    Whatever the offsets are, the rows are below M.
    """
    grouping = kernel.problem.grouping
    assert grouping is not None
    m = ptx.as_i32(kernel.m)
    offsets = ptx.global_pointer(kernel, "offsets", (grouping.groups + 1) * 4)
    started = _started_groups(offsets, grouping, m, tile_m, block_m)
    is_in_group = less(0, started)
    group = choose(is_in_group, started - 1, 0)
    begin, end = (minimum(_entry(offsets, group + i), m) for i in (0, 1))
    first = begin + (tile_m - first_tile(begin, group, block_m)) * block_m
    ids = ptx.global_pointer(kernel, "expert_ids", grouping.groups * 4)
    expert = _entry(ids, group)
    has_expert = less(expert, grouping.experts)
    return GroupRows(
        first=first,
        end=end,
        exist=both(is_in_group, less(first, end)),
        expert=choose(has_expert, expert, 0),
        have_expert=has_expert,
    )


def _entry(table: Pointer, position: Index) -> IndexValue:
    """An i32 of a table."""
    return IndexValue((table + position * 4).load(ptx.i32(), alignment=4))


def _started_groups(
    offsets: Pointer, grouping: Grouping, m: Index, tile_m: Index, block_m: int
) -> Index:
    """How many groups have their first tile at ``tile_m`` or before: a group each lane at once."""
    lane = ptx.thread_id() % WARP_LANES
    started: Index = 0
    for first in range(0, grouping.groups, WARP_LANES):
        group = lane + first
        exists = less(group, grouping.groups)
        offset = minimum(_entry(offsets, choose(exists, group, 0)), m)
        has_started = both(exists, less(first_tile(offset, group, block_m), tile_m + 1))
        assert isinstance(has_started, ir.Value)
        started = ptx.count_lanes(has_started) + started
    return started
