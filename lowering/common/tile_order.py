# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which output tile a workgroup takes, from its number in a one-dimensional grid."""

from __future__ import annotations

from block32.lowering.common.index import Index, ceil_div, minimum


def tile_position(tile: Index, tiles_m: Index, tiles_n: Index, order: str) -> tuple[Index, Index]:
    """(tile_m, tile_n) of a tile number; ``order`` says which of the two changes fastest."""
    if order == "m":
        return tile % tiles_m, tile // tiles_m
    return tile // tiles_n, tile % tiles_n


def split_workgroups(tiles: Index, splits: int, dies: int) -> Index:
    """Workgroups of a split-K launch, of which some have no tile (see ``split_position``)."""
    return ceil_div(tiles, dies) * (dies * splits)


def split_position(workgroup: Index, splits: int, dies: int) -> tuple[Index, Index]:
    """(tile, split) of a workgroup, all splits of a tile on one die.

    Workgroups go to the dies in turn, so those with equal ``workgroup % dies`` share a die. The
    tile may lie past the last one: such a workgroup has nothing to do.
    """
    tile = workgroup // (dies * splits) * dies + workgroup % dies
    return tile, workgroup // dies % splits


def die_contiguous(workgroup: Index, workgroups: Index, dies: int) -> Index:
    """A permutation of ``0 .. workgroups - 1`` that gives each die a run of neighbouring tiles.

    Workgroups go to the dies in turn; neighbouring tiles share rows of x or w, which then meet in
    one die's cache. The first ``workgroups % dies`` dies have one tile more than the others.
    """
    die, turn = workgroup % dies, workgroup // dies
    short_run, longer = workgroups // dies, workgroups % dies
    return die * short_run + minimum(die, longer) + turn
