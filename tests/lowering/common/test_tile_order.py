# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tile orders visit every tile once, and splits of a tile share a die."""

import pytest

from block32.lowering.common import tile_order
from block32.lowering.common.index import as_integer


@pytest.mark.parametrize("order", ["n", "m"])
def test_positions_are_a_bijection(order: str):
    positions = []
    for tile in range(35):
        tile_m, tile_n = tile_order.tile_position(tile, 5, 7, order)
        positions.append((as_integer(tile_m), as_integer(tile_n)))
    assert sorted(positions) == [(m, n) for m in range(5) for n in range(7)]
    assert positions[1] == ((0, 1) if order == "n" else (1, 0))


@pytest.mark.parametrize(("tiles", "splits"), [(1, 3), (8, 2), (13, 5), (640, 4)])
def test_splits_of_a_tile_share_a_die(tiles: int, splits: int):
    workgroups = as_integer(tile_order.split_workgroups(tiles, splits, 8))
    dies: dict[int, set[int]] = {}
    seen = set()
    for workgroup in range(workgroups):
        tile, split = tile_order.split_position(workgroup, splits, 8)
        seen.add((tile, split))
        dies.setdefault(as_integer(tile), set()).add(workgroup % 8)
    assert len(seen) == workgroups, "no two workgroups do the same"
    assert {(t, s) for t in range(tiles) for s in range(splits)} <= seen
    assert all(len(used) == 1 for used in dies.values())


@pytest.mark.parametrize("workgroups", [1, 7, 8, 9, 64, 100])
def test_die_contiguous_is_a_permutation_in_runs(workgroups: int):
    order = [as_integer(tile_order.die_contiguous(w, workgroups, 8)) for w in range(workgroups)]
    assert sorted(order) == list(range(workgroups))
    for die in range(min(8, workgroups)):
        of_die = order[die::8]
        assert of_die == list(range(of_die[0], of_die[0] + len(of_die)))
