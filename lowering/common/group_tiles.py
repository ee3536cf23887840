# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles of a grouped matmul, whose groups of rows are known on the device alone.

A tile has rows of one group, so how many tiles there are depends on the offsets. The launch has
as many as any division of M rows into groups can need, and group g owns those from
``offsets[g] // rows + g`` on: enough for it, and none of the next group's. The numbers rise with
g, so a workgroup finds its group by counting those whose first tile is not past its own.
"""

from __future__ import annotations

from block32.lowering.common.index import Index


def group_tiles(m: Index, rows: int, groups: int) -> Index:
    """Tiles of ``rows`` rows along M that a launch for ``m`` rows in ``groups`` groups has."""
    return m // rows + groups


def first_tile(offset: Index, group: Index, rows: int) -> Index:
    """The first tile of a group whose rows begin at ``offset``."""
    return offset // rows + group
